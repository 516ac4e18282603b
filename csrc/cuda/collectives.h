// Parameters of the collectives' kernels, and their launchers. For host and device.
#pragma once

#include "common/slices.h"
#include "cuda/launch.cuh"
#include "cuda/layout.h"

namespace coconet::cuda {

// What every launch has. ranks: by rank, or one for a launch for one rank.
template <class Common, class PerRank>
struct Launch {
    Segments segments;
    Descriptor descriptor;  // of the call, where ranks are launched one by one
    Common common;
    PerRank ranks[kMaxRanks];
};

struct RankOperands {
    Mail mail;  // operands: input and output in the heap or kPrivate; all_gather: also the rows
    const void* input;
    void* output;
};

struct ReduceCall {
    DType dtype;
    double scale;
    int64_t grain;
    DimSlices slices;  // all_reduce: one dimension of all elements, cut as FlatSlices does
    bool one_shot;
};

struct GatherCall {
    // In units of 1, 2, 4 or 8 bytes; dim: rows of the result. begins follow from the ranks' rows.
    DimSlices slices;
    int32_t unit;
    int64_t grain;
    bool one_shot;
};

struct BarrierCall {};

using ReduceLaunch = Launch<ReduceCall, RankOperands>;
using GatherLaunch = Launch<GatherCall, RankOperands>;
using BarrierLaunch = Launch<BarrierCall, RankOperands>;

// shape: blocks_x blocks of each rank, blocks_y ranks.
void launch_all_reduce(const ReduceLaunch& launch, const LaunchShape& shape, Stream stream);
void launch_reduce_scatter(const ReduceLaunch& launch, const LaunchShape& shape, Stream stream);
void launch_all_gather(const GatherLaunch& launch, const LaunchShape& shape, Stream stream);
// Also tells the peers of a call that was given bad arguments.
void launch_barrier(const BarrierLaunch& launch, const LaunchShape& shape, Stream stream);

}  // namespace coconet::cuda
