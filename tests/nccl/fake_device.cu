// Stands in for cuda/runtime.h and the kernels: device memory is host memory.
#include <cstdio>
#include <cstring>

#include "common/errors.h"
#include "nccl/nccl_kernels.h"

namespace coconet::cuda {

DeviceGuard::DeviceGuard(int device) {
    if (device != 3)
        throw Error(ErrorKind::communicator, "CUDA: cudaSetDevice failed: invalid device ordinal");
}
DeviceGuard::~DeviceGuard() = default;

void zero_async(void* p, int64_t bytes, Stream) { memset(p, 0, bytes); }
void synchronize(Stream) {}

std::vector<void*> window_pointers(ncclWindow_t window, int ranks) {
    printf("window_pointers of %p\n", static_cast<void*>(window));
    std::vector<void*> pointers;
    for (int rank = 0; rank < ranks; ++rank)
        pointers.push_back(reinterpret_cast<void*>(0x1000 * (rank + 1L)));
    return pointers;
}

void launch_barrier(const ncclDevComm& comm, Stream stream) {
    printf("barrier of %d on %p\n", comm.lsaSize, stream);
}

}  // namespace coconet::cuda
