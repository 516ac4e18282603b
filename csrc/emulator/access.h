// The emulator's twin of cuda/access.cuh, which includes it and documents the names.
//
// Peers' data is accessed plainly, so that ThreadSanitizer sees whether signals order it. A load
// that a kernel may spin on first lets the other threads run.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>

#include "emulator/device.h"

#define COCONET_DEVICE inline

#define COCONET_DYNAMIC_SHARED(T, name) \
    T* const name = static_cast<T*>(::coconet::emulator::current->block.dynamic_shared)

#define COCONET_SHARED(T, name)                                                     \
    static const char name##_key = 0; /* its address */                             \
    auto& name = *static_cast<::coconet::emulator::Identity<T>*>(                   \
        ::coconet::emulator::current->block.shared_variable(&name##_key, sizeof(T), \
                                                            ::coconet::emulator::shared_align<T>))

namespace coconet::cuda {

inline uint32_t load_acquire(const uint32_t* p, COCONET_PLACE) {
    emulator::spin({"load_acquire", file, line});
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void store_release(uint32_t* p, uint32_t v) {
    emulator::perturb();
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
    emulator::progress();
}
inline uint32_t load_relaxed(const uint32_t* p, COCONET_PLACE) {
    emulator::spin({"load_relaxed", file, line});
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void store_relaxed(uint32_t* p, uint32_t v) {
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
    emulator::progress();
}
inline bool claim(uint32_t* p) {
    uint32_t expected = 0;
    const bool claimed =
        __atomic_compare_exchange_n(p, &expected, 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    emulator::progress();
    return claimed;
}

template <class T>
T load_peer(const T* p) {
    static_assert(
        sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16,
        "load_peer takes 1, 2, 4, 8 or 16 bytes");
    emulator::expect_aligned(p, sizeof(T), "load_peer");
    emulator::perturb();
    return *p;
}
template <class T>
void store_peer(T* p, T value) {
    static_assert(
        sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16,
        "store_peer takes 1, 2, 4, 8 or 16 bytes");
    emulator::expect_aligned(p, sizeof(T), "store_peer");
    emulator::perturb();
    *p = value;
}

inline uint64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}
inline void pause() { emulator::spin({}); }

inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float sqrt_rn(float x) { return std::sqrt(x); }

// Copied when the thread waits, not before: a missing wait or barrier leaves the poison.
inline void cp_async16(void* shared, const void* global) {
    emulator::expect_aligned(shared, 16, "cp_async16");
    emulator::expect_aligned(global, 16, "cp_async16");
    emulator::copy_later(shared, global);
}
inline void cp_async_commit() { emulator::commit_copies(); }
template <int N>
void cp_async_wait() {
    // Here and not in the emulator, for ThreadSanitizer to see the accesses.
    emulator::finish_copies(N, [](void* to, const void* from) {
        *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
    });
}

}  // namespace coconet::cuda
