// What host code needs of a device: memory, copies, streams. runtime.cu is CUDA's runtime,
// csrc/emulator/runtime.cpp the CPU, for tests. Device pointers are plain addresses in both.
//
// Unless noted, a failure raises Error(communicator, "CUDA: <what> failed: <why>").
#pragma once

#include <cstdint>
#include <string>

namespace coconet::cuda {

using Stream = void*;  // a cudaStream_t

struct DeviceInfo {
    std::string name;
    int major, minor;  // compute capability
    int multiprocessors;
    int64_t memory;  // bytes
};

// 0 if none can be used; why then says what is missing. Never throws.
int device_count(std::string* why);
DeviceInfo device_info(int device);

// Makes a device the current one for its lifetime.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device);
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int before_ = 0;
};

// Zeroed, aligned to 256 bytes. Not while a stream is captured.
void* allocate(int device, int64_t bytes);
void release(int device, void* p);  // never throws

// Zeroed, pinned host memory at one address for the host and every device.
void* allocate_host_visible(int64_t bytes);
void release_host_visible(void* p);  // never throws

void copy_async(void* to, const void* from, int64_t bytes, Stream stream);
void zero_async(void* p, int64_t bytes, Stream stream);
void synchronize(Stream stream);
bool capturing(Stream stream);
// What is launched on `later` from now on begins after what was launched on `earlier`.
void order(Stream earlier, Stream later);

// The toolkit that built this, as "13.0".
const char* runtime_version();
// nvcc's names of what there is code for, with commas between them.
const char* runtime_targets();

}  // namespace coconet::cuda
