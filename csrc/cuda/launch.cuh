// Launches a kernel through a function call, so that the same text runs on CUDA and in the
// emulator.
//
// A kernel takes one struct, by value:
//   template <...> __global__ void __launch_bounds__(512) kernel(const __grid_constant__ Params p)
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include "cuda/runtime.h"

namespace coconet::cuda {

struct LaunchShape {
    unsigned blocks_x, blocks_y;
    unsigned threads;     // of a block
    size_t shared_bytes;  // dynamic shared memory of a block
    bool cooperative;     // all blocks run at the same time, or the launch fails
};

inline std::string to_string(const LaunchShape& shape) {
    return std::to_string(shape.blocks_x) + " x " + std::to_string(shape.blocks_y) +
           (shape.cooperative ? " cooperative" : "") + " blocks of " +
           std::to_string(shape.threads) + " threads and " + std::to_string(shape.shared_bytes) +
           " bytes of shared memory";
}

// A kernel and its argument without their types.
struct KernelCall {
    const void* kernel;
    const void* params;
    size_t params_bytes;
    void (*run)(const void* kernel, const void* params);  // one thread's share; emulator only
};

void launch(const KernelCall& call, const LaunchShape& shape, Stream stream);
int resident_blocks(int device, const void* kernel, unsigned threads, size_t shared_bytes);

// On the current device. Raises Error(communicator) with the shape and what CUDA says.
template <class Params>
void launch(void (*kernel)(Params), const LaunchShape& shape, Stream stream, const Params& params) {
    static_assert(std::is_trivially_copyable_v<Params>);
    KernelCall call{reinterpret_cast<const void*>(kernel), &params, sizeof params, nullptr};
#if defined(COCONET_EMULATED)
    call.run = [](const void* kernel, const void* params) {
        reinterpret_cast<void (*)(Params)>(const_cast<void*>(kernel))(
            *static_cast<const Params*>(params));
    };
#endif
    launch(call, shape, stream);
}

// How many blocks of this shape a device runs at the same time, all multiprocessors together.
template <class Params>
int resident_blocks(int device, void (*kernel)(Params), unsigned threads, size_t shared_bytes) {
    return resident_blocks(device, reinterpret_cast<const void*>(kernel), threads, shared_bytes);
}

}  // namespace coconet::cuda
