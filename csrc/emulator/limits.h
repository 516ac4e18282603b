// What fits on the emulated device: the limits of compute capability 8.0.
#pragma once

#include "cuda/launch.cuh"

namespace coconet::emulator {

// On all multiprocessors together; 0 if such a block doesn't fit at all.
int resident_blocks(unsigned threads, size_t shared_bytes, int multiprocessors);

// Why CUDA would refuse such a launch, in its words; null if it wouldn't.
const char* refused(const cuda::LaunchShape& shape, int multiprocessors);

}  // namespace coconet::emulator
