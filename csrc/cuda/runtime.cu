// runtime.h and launch.cuh by CUDA's runtime, which is linked statically.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/errors.h"
#include "cuda/launch.cuh"
#include "cuda/runtime.h"

#if !defined(COCONET_CUDA_TARGETS)  // setup.py says
#define COCONET_CUDA_TARGETS ""
#endif

namespace coconet::cuda {

namespace {

[[noreturn]] void raise(const std::string& what, cudaError_t error) {
    cudaGetLastError();  // or the next call would report this error again
    throw Error(ErrorKind::communicator, "CUDA: " + what + " failed: " + cudaGetErrorString(error));
}

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) raise(what, error);
}

cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream); }

constexpr size_t kSharedBytesByDefault = 48 << 10;  // more must be asked for, kernel by kernel

void allow_shared(const void* kernel, size_t bytes) {
    if (bytes > kSharedBytesByDefault)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(bytes)),
              ("a kernel with " + std::to_string(bytes) + " bytes of shared memory").c_str());
}

}  // namespace

int device_count(std::string* why) {
    int driver = 0, count = 0;
    cudaDriverGetVersion(&driver);
    const cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (error == cudaSuccess && count > 0) return count;
    if (why) {
        if (driver == 0)
            *why = "no CUDA driver is installed";
        else
            *why = error == cudaSuccess ? "no CUDA device" : cudaGetErrorString(error);
    }
    return 0;
}

DeviceInfo device_info(int device) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return {properties.name, properties.major, properties.minor, properties.multiProcessorCount,
            static_cast<int64_t>(properties.totalGlobalMem)};
}

DeviceGuard::DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
}

DeviceGuard::~DeviceGuard() { cudaSetDevice(before_); }

void* allocate(int device, int64_t bytes) {
    const DeviceGuard guard(device);
    const size_t size = std::max<int64_t>(bytes, 1);
    void* p = nullptr;
    const cudaError_t error = cudaMalloc(&p, size);
    if (error != cudaSuccess) raise("cudaMalloc of " + std::to_string(size) + " bytes", error);
    check(cudaMemset(p, 0, size), "cudaMemset");
    // Other streams don't wait for the default one.
    check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    return p;
}

void release(int, void* p) { cudaFree(p); }

void* allocate_host_visible(int64_t bytes) {
    const size_t size = std::max<int64_t>(bytes, 1);
    void* p = nullptr;
    const cudaError_t error = cudaHostAlloc(&p, size, cudaHostAllocMapped | cudaHostAllocPortable);
    if (error != cudaSuccess) raise("cudaHostAlloc of " + std::to_string(size) + " bytes", error);
    std::fill_n(static_cast<char*>(p), size, 0);
    return p;
}

void release_host_visible(void* p) { cudaFreeHost(p); }

void copy_async(void* to, const void* from, int64_t bytes, Stream stream) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, native(stream)), "cudaMemcpyAsync");
}

void zero_async(void* p, int64_t bytes, Stream stream) {
    check(cudaMemsetAsync(p, 0, bytes, native(stream)), "cudaMemsetAsync");
}

void synchronize(Stream stream) {
    check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize");
}

bool capturing(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(native(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

void order(Stream earlier, Stream later) {
    cudaEvent_t event;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    const cudaError_t recorded = cudaEventRecord(event, native(earlier));
    const cudaError_t waits = cudaStreamWaitEvent(native(later), event, 0);
    cudaEventDestroy(event);  // once it was reached
    check(recorded, "cudaEventRecord");
    check(waits, "cudaStreamWaitEvent");
}

void launch(const KernelCall& call, const LaunchShape& shape, Stream stream) {
    allow_shared(call.kernel, shape.shared_bytes);
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = shape.cooperative;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(shape.blocks_x, shape.blocks_y);
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = native(stream);
    config.attrs = &cooperative;
    config.numAttrs = 1;
    void* arguments[] = {const_cast<void*>(call.params)};
    const cudaError_t error = cudaLaunchKernelExC(&config, call.kernel, arguments);
    if (error != cudaSuccess) raise("a launch of " + to_string(shape), error);
}

int resident_blocks(int device, const void* kernel, unsigned threads, size_t shared_bytes) {
    const DeviceGuard guard(device);
    allow_shared(kernel, shared_bytes);
    int blocks = 0, multiprocessors = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(threads),
                                                        shared_bytes),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
    return blocks * multiprocessors;
}

#define COCONET_TEXT(...) #__VA_ARGS__
#define COCONET_EXPANDED(...) COCONET_TEXT(__VA_ARGS__)

const char* runtime_version() {
    return COCONET_EXPANDED(__CUDACC_VER_MAJOR__) "." COCONET_EXPANDED(__CUDACC_VER_MINOR__);
}

const char* runtime_targets() { return COCONET_CUDA_TARGETS; }

}  // namespace coconet::cuda
