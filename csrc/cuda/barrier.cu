// barrier: enters a call and leaves it. A rank whose arguments were bad tells its peers so with it.
#include "cuda/collectives.h"
#include "cuda/machine.cuh"

namespace coconet::cuda {

namespace {

__global__ void __launch_bounds__(kMaxThreads, 1)
    barrier_kernel(const __grid_constant__ BarrierLaunch launch) {
    const Channel channel(launch.segments);
    if (channel.enter(own_operands(launch).mail, launch.descriptor)) channel.leave();
}

}  // namespace

void launch_barrier(const BarrierLaunch& call, const LaunchShape& shape, Stream stream) {
    launch(barrier_kernel, shape, stream, call);
}

}  // namespace coconet::cuda
