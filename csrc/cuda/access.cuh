// Device primitives: signals, accesses to a peer's memory, clocks, asynchronous copies. The only
// inline PTX. Each has a plain twin for the emulator, in emulator/access.h.
//
// Memory that a peer or the host may access at the same time is reached through these alone: order
// comes from load_acquire and store_release, never from volatile.
#pragma once

#include <cstdint>

#if defined(COCONET_EMULATED)

#include "emulator/access.h"

#else

#include <cuda_runtime.h>

#define COCONET_DEVICE __device__ __forceinline__

// T* name: the dynamic shared memory of the block.
#define COCONET_DYNAMIC_SHARED(T, name)                                  \
    extern __shared__ __align__(128) unsigned char coconet_shared_raw[]; \
    T* const name = reinterpret_cast<T*>(coconet_shared_raw)

// A variable of the block: COCONET_SHARED(float[32], sums). __shared__ for both compilers; the
// emulator fills it with garbage at first.
#define COCONET_SHARED(T, name)   \
    using name##_shared_type = T; \
    __shared__ name##_shared_type name

namespace coconet::cuda {

// --- signals, in memory that other devices and the host see --------------------------------------

COCONET_DEVICE uint32_t load_acquire(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

COCONET_DEVICE void store_release(uint32_t* p, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

COCONET_DEVICE uint32_t load_relaxed(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

COCONET_DEVICE void store_relaxed(uint32_t* p, uint32_t v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Sets *p from 0 to 1; true for the one caller that did it. Orders nothing else.
COCONET_DEVICE bool claim(uint32_t* p) {
    uint32_t before;
    asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], 0, 1;"
                 : "=r"(before)
                 : "l"(p)
                 : "memory");
    return before == 0;
}

// --- data of a peer: 1, 2, 4, 8 or 16 bytes in one access, not cached in L1 ----------------------

template <class T>
COCONET_DEVICE T load_peer(const T* p) {
    T value;
    if constexpr (sizeof(T) == 16) {
        uint4 v;
        asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(p)
                     : "memory");
        memcpy(&value, &v, 16);
    } else if constexpr (sizeof(T) == 8) {
        uint64_t v;
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
        memcpy(&value, &v, 8);
    } else if constexpr (sizeof(T) == 4) {
        uint32_t v;
        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
        memcpy(&value, &v, 4);
    } else if constexpr (sizeof(T) == 2) {
        uint16_t v;
        asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
        memcpy(&value, &v, 2);
    } else {
        static_assert(sizeof(T) == 1, "load_peer takes 1, 2, 4, 8 or 16 bytes");
        uint16_t v;  // there are no 8-bit registers
        asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
        memcpy(&value, &v, 1);
    }
    return value;
}

template <class T>
COCONET_DEVICE void store_peer(T* p, T value) {
    if constexpr (sizeof(T) == 16) {
        uint4 v;
        memcpy(&v, &value, 16);
        asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x),
                     "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
    } else if constexpr (sizeof(T) == 8) {
        uint64_t v;
        memcpy(&v, &value, 8);
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
    } else if constexpr (sizeof(T) == 4) {
        uint32_t v;
        memcpy(&v, &value, 4);
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
    } else if constexpr (sizeof(T) == 2) {
        uint16_t v;
        memcpy(&v, &value, 2);
        asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
    } else {
        static_assert(sizeof(T) == 1, "store_peer takes 1, 2, 4, 8 or 16 bytes");
        uint16_t v = 0;
        memcpy(&v, &value, 1);
        asm volatile("st.relaxed.sys.global.u8 [%0], %1;" ::"l"(p), "h"(v) : "memory");
    }
}

// --- time ----------------------------------------------------------------------------------------

// One clock for all devices of a host.
COCONET_DEVICE uint64_t nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
    return t;
}

// In a loop that waits.
COCONET_DEVICE void pause() { __nanosleep(40); }

// --- arithmetic, rounded to nearest whatever the compiler's flags --------------------------------

COCONET_DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
COCONET_DEVICE float sqrt_rn(float x) { return __fsqrt_rn(x); }

// --- asynchronous copies from global to shared memory, 16 bytes ----------------------------------

COCONET_DEVICE void cp_async16(void* shared, const void* global) {
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

COCONET_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's groups of copies but the N newest. Other threads see them after a
// barrier.
template <int N>
COCONET_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace coconet::cuda

#endif
