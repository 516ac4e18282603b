// How kernels are launched: one printable struct, made by one function.
#pragma once

#include <string>

#include "cuda/runtime.h"

namespace coconet::cuda {

struct LaunchConfig {
    int threads;               // per block
    int blocks;                // per rank; fixed for a communicator, since blocks meet by number
    int unroll;                // packs of each operand in flight per thread
    int pack_bytes;            // of a load or store
    int64_t chunk_bytes;       // of a block's staging slot
    int64_t one_shot_bytes;    // inputs up to this size go through one exchange
    int64_t attachment_bytes;  // of a block's share of such an input

    // Elements of which a block's share is a multiple: one pack per thread.
    int64_t grain(int64_t itemsize) const { return threads * pack_bytes / itemsize; }
};

// ranks_on_device: of this communicator. blocks, threads: 0, or as given.
LaunchConfig launch_config(const DeviceInfo& device, int ranks_on_device, int blocks, int threads);
std::string to_string(const LaunchConfig& config);

}  // namespace coconet::cuda
