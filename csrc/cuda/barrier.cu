// barrier: enters a call and leaves it. A rank whose arguments were bad tells its peers so with it,
// and ranks exchange a number with it: operand 2 of the mail, which goes to `output` by rank.
#include "cuda/collectives.h"
#include "cuda/machine.cuh"

namespace coconet::cuda {

namespace {

__global__ void __launch_bounds__(kMaxThreads, 1)
    barrier_kernel(const __grid_constant__ BarrierLaunch launch) {
    const Channel channel(launch.segments);
    const RankOperands& mine = own_operands(launch);
    if (!channel.enter(mine.mail, launch.descriptor)) return;
    const int r = static_cast<int>(threadIdx.x);
    if (mine.output != nullptr && channel.block == 0 && r < channel.world)
        static_cast<int64_t*>(mine.output)[r] = channel.mail(r, mine.mail).operands[2];
    channel.leave();
}

}  // namespace

void launch_barrier(const BarrierLaunch& call, const LaunchShape& shape, Stream stream) {
    launch(barrier_kernel, shape, stream, call);
}

}  // namespace coconet::cuda
