#include "nccl/nccl_kernels.h"

#include <memory>

#include "cuda/launch.cuh"

namespace coconet::cuda {

namespace {

constexpr unsigned kThreads = 32;
constexpr LaunchShape kOneWarp{1, 1, kThreads, 0, false};

struct TableParams {
    ncclWindow_t window;
    void** table;
    int ranks;
};

__global__ void __launch_bounds__(kThreads)
    nccl_pointers_kernel(const __grid_constant__ TableParams p) {
    for (int rank = static_cast<int>(threadIdx.x); rank < p.ranks; rank += kThreads)
        p.table[rank] = ncclGetLsaPointer(p.window, 0, rank);
}

struct BarrierParams {
    ncclDevComm comm;
};

__global__ void __launch_bounds__(kThreads)
    nccl_barrier_kernel(const __grid_constant__ BarrierParams p) {
    ncclLsaBarrierSession<ncclCoopCta> session(ncclCoopCta(), p.comm, ncclTeamTagLsa(), 0);
    session.sync(ncclCoopCta(), ::cuda::memory_order_acq_rel);
}

}  // namespace

std::vector<void*> window_pointers(ncclWindow_t window, int ranks) {
    const std::unique_ptr<void, void (*)(void*)> table(
        allocate_host_visible(ranks * static_cast<int64_t>(sizeof(void*))), release_host_visible);
    void** const begin = static_cast<void**>(table.get());
    launch(nccl_pointers_kernel, kOneWarp, nullptr, TableParams{window, begin, ranks});
    synchronize(nullptr);
    return {begin, begin + ranks};
}

void launch_barrier(const ncclDevComm& comm, Stream stream) {
    launch(nccl_barrier_kernel, kOneWarp, stream, BarrierParams{comm});
}

}  // namespace coconet::cuda
