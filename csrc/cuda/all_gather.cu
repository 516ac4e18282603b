// all_gather: every rank copies its peers' shards.
//
// Unfused:  y = the shards of all ranks, one behind the other.
//
// Small shards are attached (see one_shot.cuh), shards in the heaps read where they are, others go
// through the staging areas (common/all_gather.h). Ranks may have different numbers of rows; a rank
// learns those of its peers on entering.
#include "common/all_gather.h"

#include "cuda/reduce.cuh"

namespace coconet::cuda {

namespace {

// The cut of the result; false when the shards don't add up to it, which is recorded.
COCONET_DEVICE bool find_slices(const Channel& channel, const Mail& mine, DimSlices* slices) {
    const int r = static_cast<int>(threadIdx.x);
    if (r < channel.world) slices->begins[r + 1] = channel.mail(r, mine).operands[2];
    __syncthreads();
    if (r == 0) {
        slices->begins[0] = 0;
        for (int i = 0; i < channel.world; ++i) slices->begins[i + 1] += slices->begins[i];
    }
    __syncthreads();
    if (slices->begins[channel.world] == slices->dim) return true;
    if (r == 0 && channel.block == 0) {
        channel.record_values(slices->dim,
                              [&](int i) { return channel.mail(i, mine).operands[2]; });
    }
    channel.leave();
    return false;
}

// T: an unsigned integer, a unit of the slices.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    all_gather_kernel(const __grid_constant__ GatherLaunch launch) {
    const Channel channel(launch.segments);
    const RankOperands& mine = own_operands(launch);
    const GatherCall& call = launch.common;
    const auto* shard = static_cast<const T*>(mine.input);
    auto* output = static_cast<T*>(mine.output);
    const Team team = Team::block(call.grain);
    const CudaMachine<T, 1> machine(channel, team);
    const auto attachment = [&](int r) { return reinterpret_cast<T*>(channel.attachment(r)); };
    const Share own =
        share_of(machine, call.slices.outer * mine.mail.operands[2] * call.slices.inner);
    if (call.one_shot)
        machine.copy(attachment(channel.rank), shard + own.from, own.to - own.from, false);
    if (!channel.enter(mine.mail, launch.descriptor)) return;

    COCONET_SHARED(DimSlices, slices);
    if (threadIdx.x == 0) {
        slices.outer = call.slices.outer;
        slices.dim = call.slices.dim;
        slices.inner = call.slices.inner;
    }
    if (!find_slices(channel, mine.mail, &slices)) return;
    COCONET_SHARED(Places, places);
    const bool direct = find_places(channel, mine.mail, false, &places);
    if (call.one_shot) {
        const auto shard_of = [&](int r) -> const T* {
            return attachment(r) - share_of(machine, slices.size(r)).from;
        };
        gather_whole(machine, slices, shard_of, output, false);
        channel.leave();
    } else if (direct) {
        const auto shard_of = [&](int r) { return reinterpret_cast<const T*>(places.input[r]); };
        gather_whole(machine, slices, shard_of, output, false);
        channel.complete_outputs();
    } else {
        gather_staged(machine, slices, shard, output, Stage(channel), false);
    }
}

}  // namespace

void launch_all_gather(const GatherLaunch& call, const LaunchShape& shape, Stream stream) {
    switch (call.common.unit) {
        case 8:
            return launch(all_gather_kernel<uint64_t>, shape, stream, call);
        case 4:
            return launch(all_gather_kernel<uint32_t>, shape, stream, call);
        case 2:
            return launch(all_gather_kernel<uint16_t>, shape, stream, call);
        default:
            return launch(all_gather_kernel<uint8_t>, shape, stream, call);
    }
}

}  // namespace coconet::cuda
