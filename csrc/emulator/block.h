// A resident block: its threads, barrier and shared memory. Kept in a pool, with its fibers and
// their stacks, for later launches.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "emulator/grid.h"
#include "emulator/sanitizers.h"
#include "emulator/thread.h"

namespace coconet::emulator {

class Warp;

class Block {
  public:
    static Block* take();  // from the pool
    static void put(Block* block);

    Block();
    ~Block();
    // Makes its threads ready; they run as the grid's schedule has it.
    void begin(Grid& grid, unsigned number);
    void end();
    std::string describe() const;

    // --- for the current thread ---
    // __syncthreads: waits for every thread that hasn't ended; true if any of them gave true.
    bool barrier(bool predicate, const Place& place);
    Warp& warp();
    Thread& lane(unsigned lane);  // of the same warp
    // The variable of this block that key stands for.
    void* shared_variable(const void* key, size_t bytes, size_t align);

    Grid* grid = nullptr;
    uint3 index{};
    dim3 grid_shape, shape;
    void* dynamic_shared = nullptr;

  private:
    friend struct Thread;
    static void thread_main();
    void release_barrier();
    void* new_shared(const void* key, size_t bytes, size_t align);

    struct Shared {
        const void* key;
        void* memory;
        size_t align;
    };

    std::vector<std::unique_ptr<Thread>> threads_;
    std::vector<std::unique_ptr<Warp>> warps_;
    std::vector<Shared> shared_;
    unsigned live_ = 0;
    // Two of each, for this barrier and the next: a fast thread may be there already.
    unsigned arrived_ = 0, generation_ = 0;
    bool any_[2] = {};
    Token met_[2] = {};
    Block* next_in_pool_ = nullptr;
};

}  // namespace coconet::emulator
