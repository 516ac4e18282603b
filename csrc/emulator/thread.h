// One CUDA thread: a fiber, where it is in the grid, and where in its kernel it waits.
#pragma once

#include <vector>

#include "emulator/fiber.h"
#include "emulator/types.h"

namespace coconet::emulator {

constexpr unsigned kMaxThreads = 1024;  // of a block
constexpr unsigned kWarp = 32;

class Block;

// What a thread waits in, and the line of the kernel.
struct Place {
    const char* what = nullptr;
    const char* file = nullptr;
    int line = 0;
};

// 16 bytes on their way from global to shared memory.
struct AsyncCopy {
    void* to;
    const void* from;
    unsigned group;
};

struct Thread {
    Thread(Block& block, unsigned number);

    uint3 index{};
    Block& block;
    const unsigned number;  // within the block
    enum { ready, waiting, ended } state = ended;
    Place place;  // where it waited last
    std::vector<AsyncCopy> copies;
    unsigned groups = 0;  // of copies, committed so far
    Fiber fiber;

    unsigned lane() const { return number % kWarp; }
};

// The CUDA thread that runs on this OS thread; null outside kernels.
extern __thread Thread* current __attribute__((tls_model("initial-exec")));

}  // namespace coconet::emulator
