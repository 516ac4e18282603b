// reduce_scatter: skeleton 1 with the sum as op; the slice stays with its rank.
//
// Unfused:  y = this rank's slice of the sum over ranks of x.
//
// As all_reduce, but outputs may lie anywhere.
#include "cuda/one_shot.cuh"
#include "cuda/reduce.cuh"

namespace coconet::cuda {

namespace {

template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    reduce_scatter_kernel(const __grid_constant__ ReduceLaunch launch) {
    const Channel channel(launch.segments);
    const RankOperands& mine = own_operands(launch);
    const ReduceCall& call = launch.common;
    if (!channel.enter(mine.mail, launch.descriptor)) return;

    COCONET_SHARED(Places, places);
    const bool direct = find_places(channel, mine.mail, false, &places);
    const auto op = reduce_op<T>(call.scale);
    T* const output = static_cast<T*>(mine.output);
    if (direct) {
        // Rows of a slice that are short keep a warp busy, not a block.
        const int64_t run = call.slices.rows(channel.rank) * call.slices.inner;
        const Team team = run < call.grain ? Team::warp(call.grain) : Team::block(call.grain);
        const CudaMachine<T, kReduceUnroll> machine(channel, team);
        rs_op_ag(machine, call.slices, ReduceScatterIo<T>{places.input, output, channel.world}, op);
    } else {
        const CudaMachine<T, kStagedUnroll> machine(channel, Team::block(call.grain));
        const StagedReduceIo<T, false> io{static_cast<const T*>(mine.input), output, channel.rank,
                                          channel.world};
        rs_op_ag_staged(machine, call.slices, io, op, Stage(channel), false);
    }
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    reduce_scatter_one_shot_kernel(const __grid_constant__ ReduceLaunch launch) {
    const Channel channel(launch.segments);
    reduce_one_shot<T>(channel, own_operands(launch), launch, launch.common.slices, channel.world,
                       channel.rank);
}

}  // namespace

void launch_reduce_scatter(const ReduceLaunch& call, const LaunchShape& shape, Stream stream) {
    with_reduce_type(call.common.dtype, [&](auto element) {
        using T = decltype(element);
        launch(call.common.one_shot ? reduce_scatter_one_shot_kernel<T> : reduce_scatter_kernel<T>,
               shape, stream, call);
    });
}

}  // namespace coconet::cuda
