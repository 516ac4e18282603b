// What the native tests share: ranks as threads, tensors, values.
#pragma once

#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "cases.h"
#include "common/convert.h"
#include "common/errors.h"
#include "cpu/collectives.h"
#include "cpu/local.h"

namespace coconet::native {

// --- ranks ---------------------------------------------------------------------------------------

using Ranks = std::vector<std::shared_ptr<Communicator>>;
using Random = std::mt19937;

inline uint32_t below(Random& random, uint32_t n) { return static_cast<uint32_t>(random() % n); }

CommunicatorOptions options(uint32_t first_epoch = 0);
// Runs body on a thread per rank. Ranks are delayed at random, one of them more than the others.
// A rank whose body throws closes its communicator; then the case fails.
void run_ranks(const Ranks& ranks, const std::function<void(Communicator&)>& body);
void run_ranks(int world, const std::function<void(Communicator&)>& body);

// Threads of a rank's own. Joined at the end, also when the case has failed.
struct Threads : std::vector<std::thread> {
    ~Threads() {
        for (std::thread& thread : *this) thread.join();
    }
};

// Runs f, which must raise an error of this kind; returns its message.
template <class F>
std::string raised(ErrorKind kind, F&& f) {
    try {
        f();
    } catch (const Error& error) {
        if (error.kind != kind)
            failed("an error of another kind than expected: " + std::string(error.what()));
        return error.what();
    }
    failed("an error was expected");
}

// --- dtypes --------------------------------------------------------------------------------------

constexpr DType kAdamDTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr DType kReduceDTypes[] = {DType::f32, DType::bf16, DType::f16,
                                   DType::f64, DType::i64,  DType::i32};
constexpr int kNumAdamDTypes = 3;
static_assert(std::size(kReduceDTypes) == kNumReduceDTypes);
inline bool is_integer(DType dtype) { return dtype == DType::i64 || dtype == DType::i32; }

template <class F>
auto with_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::bf16:
            return f(bf16_t{});
        case DType::f16:
            return f(f16_t{});
        case DType::f64:
            return f(double{});
        case DType::i64:
            return f(int64_t{});
        case DType::i32:
            return f(int32_t{});
        default:
            return f(float{});
    }
}
inline int64_t itemsize(DType dtype) {
    return with_type(dtype, [](auto t) { return static_cast<int64_t>(sizeof t); });
}
template <class T>
constexpr bool kIsHalf = !std::is_same_v<SumOf<T>, T>;
inline void put(DType dtype, void* p, int64_t i, double value) {
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        if constexpr (kIsHalf<T>)
            from_float(static_cast<float>(value), static_cast<T*>(p) + i);
        else
            static_cast<T*>(p)[i] = static_cast<T>(value);
    });
}
inline double get(DType dtype, const void* p, int64_t i) {
    return with_type(dtype, [&](auto t) -> double {
        using T = decltype(t);
        if constexpr (kIsHalf<T>)
            return to_float(static_cast<const T*>(p)[i]);
        else
            return static_cast<double>(static_cast<const T*>(p)[i]);
    });
}

// --- tensors -------------------------------------------------------------------------------------

enum class Place { heap, own, mixed };  // mixed: odd ranks' own memory
constexpr Place kPlaces[] = {Place::heap, Place::own, Place::mixed};

// Contiguous. The start is shifted by a few elements, differently on each rank.
class Tensor {
  public:
    // A collective call, unless place is own. room: elements to allocate, where ranks differ in
    // size.
    Tensor(Communicator& comm, int64_t itemsize, std::vector<int64_t> sizes, Place place,
           int64_t room = 0);
    // An output: the block, or memory from new_output().
    Tensor(Communicator& comm, int64_t itemsize, std::vector<int64_t> sizes);
    ~Tensor();
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    char* data() const { return data_; }
    int64_t numel() const;
    Operand operand(DType dtype) const {
        return {data_, dtype, itemsize_, sizes_.data(), static_cast<int64_t>(sizes_.size())};
    }

    // For outputs: memory of the size that the op asks for along dim, poisoned.
    NewOutput new_output(int64_t dim = 0);
    void adopt(const Output& block);

    // A checksum, to see later that nobody has touched the tensor.
    uint64_t checksum() const;

  private:
    // Not a shared_ptr: its counter would order what the tensor's own marks must order.
    Heap* const heap_;
    const int64_t itemsize_;
    std::vector<int64_t> sizes_;
    std::vector<char> own_;
    Output block_;
    char* data_ = nullptr;
};

// --- checked calls: integer-valued inputs, exact results -----------------------------------------

struct Reduction {
    DType dtype;
    std::vector<int64_t> sizes;
    bool average;  // integers are summed all the same
    Place place;
    uint32_t salt;

    bool averages() const { return average && !is_integer(dtype); }
};

std::unique_ptr<Tensor> check_all_reduce(Communicator& comm, const Reduction& r, bool in_place);
std::unique_ptr<Tensor> check_reduce_scatter(Communicator& comm, const Reduction& r, int64_t dim,
                                             Split split);
// rows: of every rank's shard, which is [outer, rows, inner] and gathered along dim 1.
std::unique_ptr<Tensor> check_all_gather(Communicator& comm, DType dtype, int64_t itemsize,
                                         int64_t outer, const std::vector<int64_t>& rows,
                                         int64_t inner, Place place, uint32_t salt);

}  // namespace coconet::native
