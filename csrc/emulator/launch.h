// Runs a launch on the pool of OS threads; returns when every block has ended.
#pragma once

#include "cuda/launch.cuh"

namespace coconet::emulator {

// As CUDA's limits of a compute capability 8.0 device.
int resident_blocks(unsigned threads, size_t shared_bytes);
// Raises what CUDA would for a shape that can't be launched.
void check_shape(const cuda::LaunchShape& shape);
void run(const cuda::KernelCall& call, const cuda::LaunchShape& shape);

}  // namespace coconet::emulator
