// RS-Adam-AG: skeleton 1 with Adam as op over a list of tensors, and every rank as destination.
//
// Unfused:  g = mean over ranks of the gradients;  Adam(w, g) on every rank.
//
// 1. prepare_kernel, one block per rank: enters the call, reads where every rank's tensors are,
//    counts the steps of those with a gradient somewhere, and leaves all this to
// 2. rs_adam_ag_kernel: each block updates its share of the rank's slice, straight out of and into
//    the ranks' tensors when all are in the heaps, otherwise through the staging areas.
//
// Step counts are in device memory, so that a replayed graph steps on.
#include "cuda/rs_adam_ag.h"

#include <math.h>

#include "cuda/reduce.cuh"

namespace coconet::cuda {

namespace {

COCONET_DEVICE TensorEntry entry_of(const Channel& channel, const Mail& mail, int rank,
                                    int tensor) {
    const auto* entry =
        reinterpret_cast<const TensorEntry*>(channel.heap(rank) + mail.operands[0]) + tensor;
    return {load_peer(&entry->numel), load_peer(&entry->weight), load_peer(&entry->gradient)};
}

COCONET_DEVICE AdamStep step_constants(const AdamCall& call, int64_t step) {
    if (!call.bias_correction) return {static_cast<float>(call.lr), 1.0f};
    const double bias1 = 1 - pow(call.beta1, static_cast<double>(step));
    const double bias2 = 1 - pow(call.beta2, static_cast<double>(step));
    return {static_cast<float>(call.lr / bias1), static_cast<float>(1 / sqrt(bias2))};
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    prepare_kernel(const __grid_constant__ AdamLaunch launch) {
    const Channel channel(launch.segments);
    const RankTensors& mine = own_operands(launch);
    const AdamCall& call = launch.common;
    if (threadIdx.x == 0) mine.plan->go = 0;
    if (!channel.enter(mine.mail, launch.descriptor)) return;

    COCONET_SHARED(Mail[kMaxRanks], mails);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < channel.world) mails[thread] = channel.mail(thread, mine.mail);
    __syncthreads();

    bool differs = false;
    for (int t = thread; t < call.num_tensors; t += static_cast<int>(blockDim.x))
        for (int r = 0; r < channel.world; ++r)
            if (entry_of(channel, mails[r], r, t).numel != mine.numels[t]) {
                differs = true;
                channel.record_values(
                    t, [&](int i) { return entry_of(channel, mails[i], i, t).numel; });
            }
    if (__syncthreads_or(differs)) {
        channel.leave();
        return;
    }

    bool direct = true;
    for (int r = 0; r < channel.world; ++r) direct = direct && mails[r].operands[1] != 0;
    for (int t = thread; t < call.num_tensors; t += static_cast<int>(blockDim.x)) {
        ResolvedTensor& tensor = mine.resolved[t];
        int count = 0;
        for (int r = 0; r < channel.world; ++r) {
            const TensorEntry entry = entry_of(channel, mails[r], r, t);
            const int place = r == channel.rank ? 0 : r < channel.rank ? r + 1 : r;
            tensor.weights[place] = channel.heap(r) + entry.weight;
            if (entry.gradient == kAbsent) continue;
            tensor.ranks[count] = static_cast<uint8_t>(r);
            tensor.gradients[count++] = channel.heap(r) + entry.gradient;
        }
        tensor.count = count;
        if (count > 0) mine.constants[t] = step_constants(call, ++mine.steps[t]);
    }
    if (thread == 0) *mine.plan = {1, direct};
    channel.leave();
}

template <class T>
struct AdamIo {
    using In = T;
    using Out = T;
    static constexpr bool stream = false;
    const ResolvedTensor* tensors;
    int world;

    COCONET_DEVICE RankPointers<const T, const char> sources(const Run& run) const {
        const ResolvedTensor& tensor = tensors[run.tensor];
        return {tensor.count, tensor.gradients, run.offset};
    }
    COCONET_DEVICE RankPointers<T> destinations(const Run& run) const {
        return {world, tensors[run.tensor].weights, run.offset};
    }
};

template <class T, class Place>
struct PresentSources {
    int count, rank;
    const uint8_t* ranks;
    const T* own;
    Place place;

    COCONET_DEVICE const T* operator[](int q) const {
        return ranks[q] == rank ? own : place(ranks[q]);
    }
};

template <class T>
struct StagedAdamIo {
    using In = T;
    using Out = T;
    static constexpr bool kGather = true;
    const RankTensors& mine;
    int rank, world;

    // Asked of the own rank.
    COCONET_DEVICE bool contributes(int, int32_t tensor) const {
        return mine.gradients[tensor] != nullptr;
    }
    COCONET_DEVICE bool anyone(int32_t tensor) const { return mine.resolved[tensor].count > 0; }
    COCONET_DEVICE const T* input(const Run& run) const {
        return static_cast<const T*>(mine.gradients[run.tensor]) + run.offset;
    }
    COCONET_DEVICE T* output(const Run& run) const {
        return static_cast<T*>(mine.weights[run.tensor]) + run.offset;
    }
    template <class Place>
    COCONET_DEVICE PresentSources<T, Place> sources(const Run& run, const Place& place) const {
        const ResolvedTensor& tensor = mine.resolved[run.tensor];
        return {tensor.count, rank, tensor.ranks, input(run), place};
    }
    template <class Place>
    COCONET_DEVICE StagedDestinations<T, Place> destinations(const Run& run,
                                                             const Place& place) const {
        return {world, rank, output(run), place};
    }
};

template <class T>
__global__ void __launch_bounds__(kAdamThreads, 1)
    rs_adam_ag_kernel(const __grid_constant__ AdamLaunch launch) {
    const RankTensors& mine = own_operands(launch);
    if (mine.plan->go == 0) return;  // on every rank
    const Channel channel(launch.segments);
    channel.follow();
    const AdamCall& call = launch.common;
    const Team team = Team::block(call.grain);
    const ListSlices slices{mine.starts, mine.numels, call.num_tensors, call.total, call.slice};
    const AdamOp<T> op{call.constants, mine.constants,  reinterpret_cast<T* const*>(mine.weights),
                       mine.exp_avg,   mine.exp_avg_sq, mine.master};
    if (mine.plan->direct) {
        // Packs of 16-bit weights bring twice as much state.
        const CudaMachine<T, sizeof(T) == sizeof(float) ? 2 : 1> machine(channel, team);
        rs_op_ag(machine, slices, AdamIo<T>{mine.resolved, channel.world}, op);
    } else {
        const CudaMachine<T, 1> machine(channel, team);
        rs_op_ag_staged(machine, slices, StagedAdamIo<T>{mine, channel.rank, channel.world}, op,
                        Stage(channel), false);
    }
}

}  // namespace

void launch_rs_adam_ag(const AdamLaunch& call, const LaunchShape& shape, Stream stream) {
    LaunchShape one_block = shape;
    one_block.blocks_x = 1;
    launch(prepare_kernel, one_block, stream, call);
    LaunchShape update = shape;
    update.threads = update.threads < kAdamThreads ? update.threads : kAdamThreads;
    switch (call.common.dtype) {
        case DType::bf16:
            return launch(rs_adam_ag_kernel<bf16_t>, update, stream, call);
        case DType::f16:
            return launch(rs_adam_ag_kernel<f16_t>, update, stream, call);
        default:
            return launch(rs_adam_ag_kernel<float>, update, stream, call);
    }
}

}  // namespace coconet::cuda
