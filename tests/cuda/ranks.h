// What the native tests of csrc/cuda share: ranks as threads, tensors, values.
#pragma once

#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "cases.h"
#include "common/convert.h"
#include "cuda/backend.h"
#include "cuda/layout.h"

namespace coconet::native {

using cuda::Communicator;
using cuda::Options;
using cuda::Stream;
using Random = std::mt19937;

inline uint32_t below(Random& random, uint32_t n) { return static_cast<uint32_t>(random() % n); }

// --- ranks ---------------------------------------------------------------------------------------

// local: virtual ranks of one launch. peer: a launch per rank, each on its own thread.
enum class Kind { local, peer };
constexpr Kind kKinds[] = {Kind::local, Kind::peer};

// ThreadSanitizer is slow, and sees an unordered access with few ranks and threads too.
#if defined(__SANITIZE_THREAD__)
constexpr bool kThorough = false;
#else
constexpr bool kThorough = true;
#endif
inline std::vector<int> world_sizes() {
    return kThorough ? std::vector<int>{1, 2, 3, 4, 5, 8, 16} : std::vector<int>{2, 3};
}

// Small heaps, few blocks, a timeout that turns a hang into a failure.
Options options(uint32_t first_epoch = 0);

// A communicator with all its ranks.
class World {
  public:
    World(Kind kind, int size, const Options& options = native::options());
    ~World();
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    // Runs body on a thread per rank. Kernels run in another order each time. A rank whose body
    // throws closes its communicator; then the case fails.
    void run(const std::function<void(Communicator&)>& body) const;
    // A rank's stream: one for all where one launch is for all.
    Stream stream(int rank) const;
    // The memory of a peer.
    const void* buffer(int rank) const { return buffers_[rank]; }

    const Kind kind;
    const int size;
    std::vector<std::shared_ptr<Communicator>> ranks;

  private:
    std::vector<void*> buffers_;
};

void for_each_world(const std::vector<int>& sizes, const std::function<void(Communicator&)>& body);

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
static_assert(std::size(kReduceDTypes) == kNumReduceDTypes);
inline bool is_integer(DType dtype) { return dtype == DType::i64 || dtype == DType::i32; }

// Integers as unsigned ones, whose overflow is defined.
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
            return f(uint64_t{});
        case DType::i32:
            return f(uint32_t{});
        default:
            return f(float{});
    }
}
inline int64_t itemsize(DType dtype) {
    return with_type(dtype, [](auto t) { return static_cast<int64_t>(sizeof t); });
}
template <class T>
constexpr bool kIsHalf = !std::is_same_v<SumOf<T>, T>;

template <class T>
SumOf<T> widen(T x) {
    if constexpr (kIsHalf<T>)
        return to_float(x);
    else
        return x;
}
template <class T>
T rounded(SumOf<T> x) {
    if constexpr (kIsHalf<T>) {
        T y;
        from_float(x, &y);
        return y;
    } else {
        return x;
    }
}

// --- tensors -------------------------------------------------------------------------------------

enum class Place { heap, own, mixed };  // mixed: odd ranks' own memory
constexpr Place kPlaces[] = {Place::heap, Place::own, Place::mixed};

// How far a tensor's start is from an aligned address, in elements: not at all, as far on every
// rank, or differently.
enum class Shift { none, equal, unequal };
inline Shift shift_of(uint32_t salt) { return static_cast<Shift>(salt % 3); }

// Contiguous, filled with a pattern; so is what lies around it in the heap.
class Tensor {
  public:
    Tensor(Communicator& comm, int64_t itemsize, std::vector<int64_t> sizes, Place place,
           Shift shift);
    ~Tensor();
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    template <class T = char>
    T* data() const {
        return reinterpret_cast<T*>(data_);
    }
    int64_t numel() const;
    Operand operand(DType dtype) const {
        return {data_, dtype, itemsize_, sizes_.data(), static_cast<int64_t>(sizes_.size())};
    }
    // Nobody has written around it, or into it.
    void expect_margins() const;
    void expect_untouched() const;
    uint64_t checksum() const;

  private:
    void expect_pattern(const char* from, const char* to) const;

    Communicator& comm_;
    const int64_t itemsize_;
    const std::vector<int64_t> sizes_;
    std::vector<char> own_;
    char* block_ = nullptr;
    int64_t block_bytes_ = 0;
    char* data_;
};

// --- checked calls -------------------------------------------------------------------------------

// Inputs by salt: small integers if it is even, else any numbers, so that the order of the sums
// shows. Results must be exact either way.
struct Reduction {
    DType dtype;
    std::vector<int64_t> sizes;
    bool average;  // integers are summed all the same
    Place place, output;
    uint32_t salt;

    bool averages() const { return average && !is_integer(dtype); }
    Shift shift() const { return shift_of(salt / 2); }
};

// The operands and the result of a call that may be replayed.
class AllReduce {
  public:
    AllReduce(Communicator& comm, const Reduction& r, bool in_place);
    void fill(uint32_t salt);  // the input
    void call(Stream stream);
    void check() const;
    uint64_t checksum() const { return result().checksum(); }

  private:
    const Tensor& result() const { return output_ ? *output_ : input_; }

    Communicator& comm_;
    Reduction r_;
    Tensor input_;
    std::unique_ptr<Tensor> output_;
};

// Each returns a checksum of the result.
uint64_t check_all_reduce(Communicator& comm, const Reduction& r, bool in_place);
uint64_t check_reduce_scatter(Communicator& comm, const Reduction& r, int64_t dim, Split split);
// rows: of every rank's shard, which is [outer, rows, inner] and gathered along dim 1.
uint64_t check_all_gather(Communicator& comm, DType dtype, int64_t itemsize, int64_t outer,
                          const std::vector<int64_t>& rows, int64_t inner, Place place,
                          Place output, uint32_t salt);

}  // namespace coconet::native
