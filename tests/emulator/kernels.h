// What the emulator's tests share: memory that host and kernels see, launches of any function.
//
// Files emulated_* test the emulator alone; the kernels of the others are also right for a GPU
// (MODE=cuda).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cases.h"
#include "common/errors.h"
#include "cuda/access.cuh"
#include "cuda/launch.cuh"

namespace coconet::native {

using namespace coconet::cuda;

// Zeroed; the host may access it while no kernel runs.
template <class T>
class Memory {
  public:
    explicit Memory(int64_t n)
        : size_(n), data_(static_cast<T*>(allocate_host_visible(n * sizeof(T)))) {}
    ~Memory() { release_host_visible(data_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    T* data() const { return data_; }
    int64_t size() const { return size_; }
    T& operator[](int64_t i) const { return data_[i]; }

  private:
    const int64_t size_;
    T* const data_;
};

inline LaunchShape blocks_of(unsigned blocks, unsigned threads, size_t shared_bytes = 0) {
    return {blocks, 1, threads, shared_bytes, true};
}

template <class Params>
void run(void (*kernel)(Params), const LaunchShape& shape, const Params& params) {
    launch(kernel, shape, nullptr, params);
    synchronize(nullptr);
}

template <class T>
void expect_equal(const Memory<T>& found, const std::vector<T>& wanted, const char* what) {
    for (size_t i = 0; i < wanted.size(); ++i)
        if (found[i] != wanted[i])
            failed(std::string(what) + ": element " + std::to_string(i) + " is " +
                   std::to_string(found[i]) + ", not " + std::to_string(wanted[i]));
}

// The message of the error that f must raise.
template <class F>
std::string error_of(F&& f) {
    try {
        f();
    } catch (const Error& error) {
        expect(error.kind == ErrorKind::communicator, "an error of another kind than expected");
        return error.what();
    }
    failed("an error was expected");
}

}  // namespace coconet::native
