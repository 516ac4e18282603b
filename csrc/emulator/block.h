// One resident block: runs its CUDA threads, each a fiber, on the OS thread that owns it.
//
// A thread runs until it waits: at a barrier of the block or the warp, or in a loop on memory, whose
// every load lets the others run ("spin"). Which ready thread comes next is their order, or random
// from a seed. When no thread is ready the kernel is deadlocked; when all that are have spun for
// seconds with no store to a signal, it waits for something that doesn't come. Either ends the
// process with a report of where each thread of the launch waits: fibers can't be unwound.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/launch.cuh"
#include "emulator/fiber.h"
#include "emulator/sanitizers.h"
#include "emulator/types.h"

namespace coconet::emulator {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kWarp = 32;

class Block;
class Warp;

// Where in a kernel a thread waits: what in, and the line. Default arguments give the caller's.
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
    unsigned groups = 0;  // of copies committed
    Fiber fiber;

    unsigned lane() const { return number % kWarp; }
};

// The CUDA thread that runs on this OS thread; null outside kernels.
extern __thread Thread* current __attribute__((tls_model("initial-exec")));

// One launch of a kernel. Lives on the stack of launch()'s caller.
struct Launch {
    const cuda::KernelCall& call;
    const cuda::LaunchShape& shape;
    unsigned number;                             // of this process, for the schedule
    std::atomic<unsigned> next{0};               // block to run
    std::atomic<uint32_t> workers{0};            // that still run some
    std::vector<std::atomic<const Block*>> on{};  // by worker, for reports
    Token begin{}, end{};

    unsigned blocks() const { return shape.blocks_x * shape.blocks_y; }
};

class Block {
  public:
    Block();
    ~Block();
    void run(Launch& launch, unsigned number);

    // --- for the current thread ---
    // Waits for every thread that hasn't ended; true if any of them gave true.
    bool barrier(bool predicate, const Place& place);
    // Lets the other ready threads run, and other blocks when all have spun once.
    void spin(const Place& place);
    // Something was stored that others may spin on.
    void progress();
    // Waits until wake() is called for it.
    void wait(const Place& place);
    void wake(Thread& thread);
    Warp& warp();
    Thread& lane(unsigned lane);  // of the same warp
    [[noreturn]] void fail(const std::string& what);

    uint3 index{};
    dim3 grid, shape;
    void* dynamic_shared = nullptr;
    uint32_t runs = 0;  // how many blocks this one has been

    std::string describe() const;

  private:
    friend struct Thread;
    static void thread_main();
    Thread* next();
    void switch_to_next(Thread& self);
    void release_barrier();
    void rest();
    void prepare_shared();

    Fiber host_;
    std::vector<std::unique_ptr<Thread>> threads_;
    std::vector<std::unique_ptr<Warp>> warps_;
    Launch* launch_ = nullptr;
    unsigned live_ = 0;

    // Ready threads, a ring.
    Thread* ready_[kMaxThreads];
    unsigned first_ready_ = 0, num_ready_ = 0;
    uint64_t random_ = 0;  // 0: in order

    // Two of each, for this barrier and the next: a fast thread may be there already.
    unsigned arrived_ = 0, generation_ = 0;
    bool any_[2] = {};
    Token met_[2] = {};
    Token begin_{}, end_{};

    unsigned spun_ = 0;  // since the last progress
    unsigned rests_ = 0;
    bool progressed_ = false;
    int64_t last_progress_ns_ = 0;
    size_t shared_bytes_ = 0;
};

// Overwrites memory with bytes that are NaN as floats and large as integers, unseen by sanitizers.
void poison(void* p, size_t bytes);

// A __shared__ variable: poisoned when the first thread of a block comes to it. One for each OS
// thread, since that runs one block at a time.
template <class T>
struct SharedVariable {
    alignas(alignof(T) > 16 ? alignof(T) : 16) unsigned char storage[sizeof(T)];
    uint32_t run;

    T& of_block();
};
void poison_once(void* p, size_t bytes, uint32_t& run);

template <class T>
T& SharedVariable<T>::of_block() {
    poison_once(storage, sizeof storage, run);
    return *reinterpret_cast<T*>(storage);
}

}  // namespace coconet::emulator
