// The emulator as a test sees it: schedules, limits, graphs.
//
// It runs the kernels and launchers of csrc/cuda, compiled by g++ with -DCOCONET_EMULATED, on the
// CPU: each CUDA thread is a fiber, each launch runs on the OS thread that asks for it and is done
// when it returns. Tests only. Launches of several OS threads may wait for each other.
//
// Not modelled: scopes narrower than the system, caches, mbarrier, TMA, clusters, multimem.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/runtime.h"

namespace coconet::emulator {

// 0: the threads of a block take turns in order. Else each choice of the next thread is random, the
// same for the same seed, launch and block. At first COCONET_EMULATOR_SEED, or 0.
void set_seed(uint64_t seed);

// Seconds without progress after which a kernel that spins ends the process with a report; 0:
// never. At first COCONET_EMULATOR_TIMEOUT, or 120.
void set_spin_timeout(double seconds);

// Of the emulated device, at first 2: how many blocks are resident follows from it.
void set_multiprocessors(int n);

// What was launched and copied on a stream between begin_capture and end_capture; nothing of it is
// run until replay(). As a CUDA graph, it holds the values of the parameters, not what they point
// to.
class Graph {
  public:
    Graph();
    Graph(Graph&&) noexcept;
    Graph& operator=(Graph&&) noexcept;
    ~Graph();
    void replay() const;

    struct Content;

  private:
    friend Graph end_capture(cuda::Stream stream);
    std::unique_ptr<Content> content_;
};

void begin_capture(cuda::Stream stream);
Graph end_capture(cuda::Stream stream);

}  // namespace coconet::emulator
