// One launch: its resident blocks, and which of their threads runs next.
//
// All of it runs on the OS thread that called launch(). A CUDA thread runs until it waits: at a
// barrier of its block or warp, or in a loop on memory, whose every load lets the others run
// ("spins"). The next one is the ready thread that has waited longest or, with a seed, any: a
// schedule is the same each time for the same seed.
//
// When no thread is ready, the kernel is deadlocked. When all that are have spun and nothing was
// stored to a signal, only another launch or the host can help: the OS thread yields, then sleeps
// in between, and gives up after the spin timeout. Either ends the process, with a report of where
// each thread waits: fibers can't be unwound.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/launch.cuh"
#include "emulator/fiber.h"
#include "emulator/sanitizers.h"
#include "emulator/thread.h"

namespace coconet::emulator {

class Grid {
  public:
    Grid(const cuda::KernelCall& call, const cuda::LaunchShape& shape);
    ~Grid();
    // Returns when every block has ended. At most `resident` run at the same time.
    void run(unsigned resident);

    // --- for the current thread ---
    // Lets the other ready threads run. Without a place, the last one stays on record.
    void spin(const Place& place);
    // Now and then, if there is a seed: as spin, but no sign of waiting.
    void perturb();
    // Something was stored that others may spin on.
    void progress();
    // Waits until wake() is called for it.
    void wait(const Place& place);
    void wake(Thread& thread);
    // The current thread has ended, and with it perhaps its block.
    void leave(bool block_ended);
    [[noreturn]] void fail(const std::string& what);

    const cuda::KernelCall& call;
    const cuda::LaunchShape& shape;
    // Before the launch comes before every thread, and every thread before its end.
    Token begin{}, end{};

  private:
    uint64_t random();
    Thread* next();
    void switch_to_next();
    void rest();

    Fiber host_;
    std::vector<Block*> blocks_;    // the resident ones
    Block* ended_block_ = nullptr;  // why the host goes on
    uint64_t random_;               // 0: in order

    // The ready threads: a ring, large enough for all.
    std::vector<Thread*> ready_;
    unsigned first_ready_ = 0, num_ready_ = 0;

    unsigned spun_ = 0;  // loads in loops since the last progress
    bool progressed_ = true;
    unsigned rests_ = 0;
    int64_t last_progress_ns_ = 0;
};

}  // namespace coconet::emulator
