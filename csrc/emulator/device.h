// CUDA's own names, as kernels use them, on the emulator's blocks and warps.
#pragma once

#include <cstdint>
#include <type_traits>

#include "emulator/block.h"
#include "emulator/types.h"
#include "emulator/warp.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// No __shared__, since no variable of C++ is one for each block: COCONET_SHARED and
// COCONET_DYNAMIC_SHARED take its place.

#define threadIdx (::coconet::emulator::current->index)
#define blockIdx (::coconet::emulator::current->block.index)
#define blockDim (::coconet::emulator::current->block.shape)
#define gridDim (::coconet::emulator::current->block.grid_shape)

// Default arguments, which take the caller's place.
#define COCONET_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(COCONET_PLACE) {
    coconet::emulator::current->block.barrier(false, {"__syncthreads", file, line});
}
inline int __syncthreads_or(int predicate, COCONET_PLACE) {
    return coconet::emulator::current->block.barrier(predicate != 0,
                                                     {"__syncthreads_or", file, line});
}

namespace coconet::emulator {

inline void spin(const Place& place) {
    if (current) current->block.grid->spin(place);  // host code uses the same primitives
}
inline void progress() {
    if (current) current->block.grid->progress();
}
inline void perturb() {
    if (current) current->block.grid->perturb();
}
// Not inline: ThreadSanitizer doesn't know fences, and the compiler says so.
void fence();
[[noreturn]] void misaligned(const void* p, size_t bytes, const char* what);
// Fails if an address isn't a multiple of the size, which would fault on a GPU.
inline void expect_aligned(const void* p, size_t bytes, const char* what) {
    if (reinterpret_cast<uintptr_t>(p) % bytes != 0) misaligned(p, bytes, what);
}

template <class T>
using Identity = T;  // so that float[32]* can be written
template <class T>
constexpr size_t shared_align = alignof(T) > 16 ? alignof(T) : 16;

// Copies of the current thread. finish_copies carries out those of all groups but the newest n.
void copy_later(void* to, const void* from);
void commit_copies();
void finish_copies(unsigned n, void (*copy)(void* to, const void* from));

template <class T>
T shuffled(unsigned mask, T value, unsigned source, const Place& place) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16);
    current->block.warp().shuffle(mask, &value, sizeof value, source, place);
    return value;
}

}  // namespace coconet::emulator

constexpr int warpSize = coconet::emulator::kWarp;

inline void __syncwarp(unsigned mask = ~0u, COCONET_PLACE) {
    coconet::emulator::current->block.warp().sync(mask, {"__syncwarp", file, line});
}

// width: lanes are cut into groups of that many, a power of two; a source beyond the own group is
// the own lane (or wraps around, for __shfl_sync).
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, COCONET_PLACE) {
    const unsigned lane = coconet::emulator::current->lane();
    const unsigned from = (lane & ~(width - 1u)) | (source & (width - 1u));
    return coconet::emulator::shuffled(mask, value, from, {"__shfl_sync", file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize, COCONET_PLACE) {
    const unsigned lane = coconet::emulator::current->lane();
    const unsigned from = lane ^ lanes;
    const bool beyond = from >= (lane & ~(width - 1u)) + width;
    return coconet::emulator::shuffled(mask, value, beyond ? lane : from,
                                       {"__shfl_xor_sync", file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, COCONET_PLACE) {
    const unsigned lane = coconet::emulator::current->lane();
    const bool beyond = (lane & (width - 1u)) + delta >= static_cast<unsigned>(width);
    return coconet::emulator::shuffled(mask, value, beyond ? lane : lane + delta,
                                       {"__shfl_down_sync", file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, COCONET_PLACE) {
    const unsigned lane = coconet::emulator::current->lane();
    const bool beyond = (lane & (width - 1u)) < delta;
    return coconet::emulator::shuffled(mask, value, beyond ? lane : lane - delta,
                                       {"__shfl_up_sync", file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, COCONET_PLACE) {
    return coconet::emulator::current->block.warp().ballot(mask, predicate != 0,
                                                           {"__ballot_sync", file, line});
}
inline int __any_sync(unsigned mask, int predicate, COCONET_PLACE) {
    return coconet::emulator::current->block.warp().ballot(mask, predicate != 0,
                                                           {"__any_sync", file, line}) != 0;
}
inline int __all_sync(unsigned mask, int predicate, COCONET_PLACE) {
    return coconet::emulator::current->block.warp().ballot(mask, predicate == 0,
                                                           {"__all_sync", file, line}) == 0;
}

template <class T>
T atomicAdd(T* p, T value) {
    coconet::emulator::progress();
    if constexpr (std::is_integral_v<T>) {
        return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
    } else {
        T before, after;
        __atomic_load(p, &before, __ATOMIC_RELAXED);
        do {
            after = before + value;
        } while (!__atomic_compare_exchange(p, &before, &after, true, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED));
        return before;
    }
}

inline void __threadfence() { coconet::emulator::fence(); }
inline void __threadfence_block() { coconet::emulator::fence(); }
inline void __threadfence_system() { coconet::emulator::fence(); }
