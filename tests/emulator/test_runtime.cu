// Memory, copies, devices.
#include <string.h>

#include "kernels.h"

namespace coconet::native {

std::string program() { return std::string("emulator tests, ") + runtime_version(); }

CASE(memory_is_zeroed_and_aligned) {
    for (const int64_t bytes : {0, 1, 1000, 70000}) {
        void* const p = allocate(0, bytes);
        expect(p != nullptr && reinterpret_cast<uintptr_t>(p) % 256 == 0, "badly aligned");
        std::vector<unsigned char> seen(bytes, 1), zero(bytes, 0), ones(bytes, 0xff);
        copy_async(seen.data(), p, bytes, nullptr);
        synchronize(nullptr);
        expect(seen == zero, "not zeroed");
        copy_async(p, ones.data(), bytes, nullptr);
        zero_async(p, bytes / 2, nullptr);
        copy_async(seen.data(), p, bytes, nullptr);
        synchronize(nullptr);
        if (bytes > 0) memset(ones.data(), 0, bytes / 2);
        expect(seen == ones, "not as copied and zeroed");
        release(0, p);
    }
    Memory<uint64_t> host(100);
    for (int64_t i = 0; i < 100; ++i) expect(host[i] == 0, "host memory isn't zeroed");
    release(0, nullptr);
}

CASE(devices_are_described) {
    std::string why;
    expect(device_count(&why) > 0, "no device");
    const DeviceInfo info = device_info(0);
    expect(!info.name.empty() && info.major >= 8 && info.multiprocessors > 0 && info.memory > 0,
           "no description of the device");
    expect_in("CUDA: ", error_of([] { device_info(99); }));
    expect_in("CUDA: ", error_of([] { DeviceGuard guard(99); }));
    DeviceGuard guard(0);
    expect(!capturing(nullptr), "a stream is captured");
    expect(strlen(runtime_version()) > 0, "no version of the runtime");
}

}  // namespace coconet::native
