// Parameters of the RS-Adam-AG kernels, and their launcher. For host and device.
#pragma once

#include "common/adam.h"
#include "cuda/collectives.h"

namespace coconet::cuda {

// Where the operands of a tensor of the list are, for a rank; made by the first kernel of a call.
struct ResolvedTensor {
    int32_t count;  // of ranks with a gradient
    uint8_t ranks[kMaxRanks];
    const char* gradients[kMaxRanks];  // theirs, in rank order
    char* weights[kMaxRanks];          // of all ranks, the own one first
};
struct AdamPlan {
    uint32_t go;      // the ranks agree
    uint32_t direct;  // all operands are in the heaps
};

// Per block; the update has more in registers than other ops.
constexpr unsigned kAdamThreads = 384;

struct RankTensors {
    Mail mail;  // operands: the entries' place in the heap; are all tensors in the heap
    const int64_t *starts, *numels;
    // Of the call: the table for the peers and the own pointers.
    void* const* weights;
    const void* const* gradients;  // nullptr: absent
    // Filled by the first kernel. steps: updates done; constants of this one.
    AdamPlan* plan;
    ResolvedTensor* resolved;
    int64_t* steps;
    AdamStep* constants;
    float *exp_avg, *exp_avg_sq, *master;
};

struct AdamCall {
    DType dtype;
    int32_t num_tensors;
    int64_t total, slice;  // of the list, in elements
    int64_t grain;
    AdamConstants constants;
    double lr, beta1, beta2;
    bool bias_correction;
};

using AdamLaunch = Launch<AdamCall, RankTensors>;

void launch_rs_adam_ag(const AdamLaunch& launch, const LaunchShape& shape, Stream stream);

}  // namespace coconet::cuda
