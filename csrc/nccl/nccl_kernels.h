// What only NCCL's device functions can do; inside csrc/nccl.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include <vector>

#include "cuda/runtime.h"

namespace coconet::cuda {

// Where the window's memory of each of its ranks lies for the current device.
std::vector<void*> window_pointers(ncclWindow_t window, int ranks);

// A barrier of all ranks, in order with the stream.
void launch_barrier(const ncclDevComm& comm, Stream stream);

}  // namespace coconet::cuda
