// The CPU machine of the skeletons: a pack is a GCC vector, as wide as the instruction set's.
//
// Included only by a kernels_*.cpp file, after its target pragma and inside its own namespace
// (COCONET_ISA), so that code for one instruction set is never linked into another.
#pragma once

#include <utility>

#include "common/convert.h"
#include "common/rs_op_ag.h"
#include "cpu/channel.h"

#if defined(COCONET_ISA_AVX512)
#include "cpu/simd_avx512.h"
#elif defined(COCONET_ISA_AVX2)
#include "cpu/simd_avx2.h"
#else
#include "cpu/simd_portable.h"
#endif

namespace coconet::COCONET_ISA {

#if defined(COCONET_PLAIN_STORES)  // sanitizers don't see the intrinsics of streaming stores
constexpr bool kStreamingStores = false;
#else
constexpr bool kStreamingStores = true;
#endif

// Sum: the type in which the elements are added up (SumOf).
template <class Sum>
struct CpuMachine {
    static constexpr int kLanes = kPackBytes / sizeof(Sum);
    static constexpr int kUnroll = 2;
    typedef Sum Pack __attribute__((vector_size(kPackBytes)));

    Channel& channel;
    int rank;

    void wait_inputs() const { channel.wait_inputs(); }
    void complete_outputs() const { channel.complete_outputs(); }

    COCONET_HD Pack splat(Sum x) const { return Pack{} + x; }
    COCONET_HD Pack fma(Pack a, Pack b, Pack c) const { return COCONET_ISA::fma(a, b, c); }
    COCONET_HD Pack sqrt(Pack x) const { return COCONET_ISA::sqrt(x); }

    COCONET_HD Pack load(const Sum* p, AllLanes) const {
        Pack x;
        __builtin_memcpy(&x, p, sizeof x);
        return x;
    }
    template <class Half>
    COCONET_HD Pack load(const Half* p, AllLanes) const {
        return widen(p);
    }
    template <class T>
    COCONET_HD Pack load(const T* p, SomeLanes lanes) const {
        T buffer[kLanes] = {};
        for (int k = 0; k < lanes.n; ++k) buffer[k] = p[k];
        return load(buffer, AllLanes{});
    }

    template <class T>
    COCONET_HD bool can_stream(const T* p) const {
        return reinterpret_cast<uintptr_t>(p) % (kLanes * sizeof(T)) == 0;
    }
    // What is stored for a pack of elements of type T.
    template <class T>
    COCONET_HD auto rounded(Pack x) const {
        if constexpr (sizeof(T) == sizeof(Sum))
            return x;
        else
            return narrow(static_cast<const T*>(nullptr), x);
    }
    template <class T>
    using Rounded = decltype(std::declval<CpuMachine>().template rounded<T>(Pack{}));

    template <bool Stream, class R>
    COCONET_HD void store_whole(void* p, R x) const {
        store_vector<Stream && kStreamingStores>(p, x);
    }
    template <class T>
    COCONET_HD void store(T* p, Pack x, AllLanes) const {
        store_whole<false>(p, rounded<T>(x));
    }
    template <class T>
    COCONET_HD void store(T* p, Pack x, SomeLanes lanes) const {
        T buffer[kLanes];
        store(buffer, x, AllLanes{});
        for (int k = 0; k < lanes.n; ++k) p[k] = buffer[k];
    }
};

COCONET_HD void copy_bytes(void* to, const void* from, int64_t bytes, bool stream) {
    typedef char Pack __attribute__((vector_size(kPackBytes)));
    auto* dst = static_cast<char*>(to);
    const auto* src = static_cast<const char*>(from);
    int64_t i = 0;
    if (kStreamingStores && stream && reinterpret_cast<uintptr_t>(dst) % kPackBytes == 0)
        for (; i + 2 * kPackBytes <= bytes; i += 2 * kPackBytes) {
            Pack x[2];
            __builtin_memcpy(x, src + i, sizeof x);
            store_vector<true>(dst + i, x[0]);
            store_vector<true>(dst + i + kPackBytes, x[1]);
        }
    __builtin_memcpy(dst + i, src + i, bytes - i);
}

}  // namespace coconet::COCONET_ISA
