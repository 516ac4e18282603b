// all_reduce: skeleton 1 with the sum as op, and every rank as destination.
//
// Unfused:  y = sum over ranks of x, on every rank.
//
// Small inputs, whatever their place (one_shot.cuh): every rank adds up everything.
// All operands in the heaps: each rank adds up its slice out of its peers' memory and stores it to
// theirs. Otherwise the same chunk by chunk through the staging areas (common/staged.h).
#include "cuda/one_shot.cuh"
#include "cuda/reduce.cuh"

namespace coconet::cuda {

namespace {

template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    all_reduce_kernel(const __grid_constant__ ReduceLaunch launch) {
    const Channel channel(launch.segments);
    const RankOperands& mine = own_operands(launch);
    const ReduceCall& call = launch.common;
    if (!channel.enter(mine.mail, launch.descriptor)) return;

    COCONET_SHARED(Places, places);
    const bool direct = find_places(channel, mine.mail, true, &places);
    const Team team = Team::block(call.grain);
    const auto op = reduce_op<T>(call.scale);
    if (direct) {
        const CudaMachine<T, kReduceUnroll> machine(channel, team);
        rs_op_ag(machine, call.slices, AllReduceIo<T>{places, channel.rank, channel.world}, op);
    } else {
        const CudaMachine<T, kStagedUnroll> machine(channel, team);
        const StagedReduceIo<T, true> io{static_cast<const T*>(mine.input),
                                         static_cast<T*>(mine.output), channel.rank, channel.world};
        rs_op_ag_staged(machine, call.slices, io, op, Stage(channel), false);
    }
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    all_reduce_one_shot_kernel(const __grid_constant__ ReduceLaunch launch) {
    const Channel channel(launch.segments);
    const FlatSlices whole(launch.common.slices.dim, 1);
    reduce_one_shot<T>(channel, own_operands(launch), launch, whole, 1, 0);
}

}  // namespace

void launch_all_reduce(const ReduceLaunch& call, const LaunchShape& shape, Stream stream) {
    with_reduce_type(call.common.dtype, [&](auto element) {
        using T = decltype(element);
        launch(call.common.one_shot ? all_reduce_one_shot_kernel<T> : all_reduce_kernel<T>, shape,
               stream, call);
    });
}

}  // namespace coconet::cuda
