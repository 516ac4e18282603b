// One exchange for small inputs, as the CPU backend's attachments: the inputs are copied to where
// peers can read them before the call is entered, so no rank waits a second time.
//
//   1. copy the block's share of each section (of the input) to the block's attachment
//   2. enter: every peer has done so
//   3. add up the own section out of all attachments
//
// all_reduce has one section, everything; reduce_scatter one per rank, the slices. Attachments are
// double-buffered by parity of the call: who enters call n has read those of call n-1.
#pragma once

#include "cuda/reduce.cuh"

namespace coconet::cuda {

template <class T, class Slices>
COCONET_DEVICE void reduce_one_shot(const Channel& channel, const RankOperands& mine,
                                    const ReduceLaunch& launch, const Slices& slices, int sections,
                                    int own) {
    const ReduceCall& call = launch.common;
    const CudaMachine<T, 1> machine(channel, Team::block(call.grain));
    int64_t longest = 0;
    COCONET_NO_UNROLL
    for (int s = 0; s < sections; ++s) {
        const Share share = share_of(machine, slices.size(s));
        longest = max64(longest, share.to - share.from);
    }
    const int64_t section = round_up(longest, kSliceAlign);

    auto* attachment = reinterpret_cast<T*>(channel.attachment(channel.rank));
    COCONET_NO_UNROLL
    for (int s = 0; s < sections; ++s) {
        const Share share = share_of(machine, slices.size(s));
        slices.for_runs(s, share.from, share.to, [&](const Run& run) {
            machine.copy(attachment + s * section + run.index - share.from,
                         static_cast<const T*>(mine.input) + run.offset, run.length, false);
        });
    }
    if (!channel.enter(mine.mail, launch.descriptor)) return;

    COCONET_SHARED(char* [kMaxRanks], inputs);
    const int r = static_cast<int>(threadIdx.x);
    if (r < channel.world)
        inputs[r] = channel.attachment(r) + own * section * static_cast<int64_t>(sizeof(T));
    __syncthreads();
    const Share share = share_of(machine, slices.size(own));
    slices.for_runs(own, share.from, share.to, [&](const Run& run) {
        const RankPointers<const T> src{channel.world, inputs, run.index - share.from};
        const One<T> dst{static_cast<T*>(mine.output) + run.index};
        reduce_run(machine, src, dst, Streamed::none, run, reduce_op<T>(call.scale));
    });
    channel.leave();
}

}  // namespace coconet::cuda
