// The CPU machine of the skeletons: a pack is a GCC vector, as wide as the instruction set's.
//
// Included only by a kernels_*.cpp file, after its target pragma and inside its own namespace
// (COCONET_ISA), so that code for one instruction set is never linked into another.
#pragma once

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
    static constexpr bool kStreams = true, kPairs = true;  // variants of reduce_run
    static constexpr int part = 0, parts = 1;
    static constexpr int64_t grain = 1;
    typedef Sum Pack __attribute__((vector_size(kPackBytes)));

    Channel& channel;
    int rank, world;

    explicit CpuMachine(Channel& c) : channel(c), rank(c.rank), world(c.world) {}

    // Waits throw, so all of them succeed.
    bool wait_inputs() const {
        channel.wait_inputs();
        return true;
    }
    void complete_outputs() const { channel.complete_outputs(); }
    uint32_t first_chunk() const { return channel.chunk; }
    void signal(Phase phase, uint32_t value) const { channel.signal(phase, value); }
    bool wait(int peer, Phase phase, uint32_t want) const {
        channel.wait(peer, phase, want);
        return true;
    }
    bool wait_all(Phase phase, uint32_t want) const {
        channel.wait_all(phase, want);
        return true;
    }
    void finish_chunks(uint32_t count) const { channel.finish_chunks(count); }

    template <class Sources, class Destinations, class Op, class F>
    COCONET_HD void for_parts(int64_t length, const Sources&, const Destinations&, const Op&,
                              F&& f) const {
        f(*this, 0, length);
    }
    template <class F>
    COCONET_HD void for_steps(int64_t from, int64_t to, F&& f) const {
        int64_t i = from;
        for (; i + kLanes * kUnroll <= to; i += kLanes * kUnroll)
            f(Packs<kUnroll>{}, i, AllLanes{});
        for (; i < to; i += kLanes)
            f(Packs<1>{}, i, SomeLanes{static_cast<int>(min64(kLanes, to - i))});
    }
    COCONET_HD int64_t distance() const { return kLanes; }

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

    template <class T, class Lanes>
    COCONET_HD Pack load_peer(const T* p, Lanes lanes) const {
        return load(p, lanes);
    }

    template <class T>
    COCONET_HD bool can_stream(const T* p) const {
        return reinterpret_cast<uintptr_t>(p) % (kLanes * sizeof(T)) == 0;
    }
    template <class T>
    COCONET_HD auto rounded(const T* p, Pack x) const {
        if constexpr (sizeof(T) == sizeof(Sum))
            return x;
        else
            return narrow(p, x);
    }
    template <bool Stream, class T, class R>
    COCONET_HD void store_rounded(T* p, R x, AllLanes) const {
        store_vector<Stream && kStreamingStores>(p, x);
    }
    template <bool Stream, class T, class R>
    COCONET_HD void store_rounded(T* p, R x, SomeLanes lanes) const {
        T buffer[kLanes];
        store_vector<false>(buffer, x);
        for (int k = 0; k < lanes.n; ++k) p[k] = buffer[k];
    }
    template <class T, class Lanes>
    COCONET_HD void store(T* p, Pack x, Lanes lanes) const {
        store_rounded<false>(p, rounded(p, x), lanes);
    }
    template <class T>
    COCONET_HD void copy(T* to, const T* from, int64_t n, bool stream) const;
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

template <class Sum>
template <class T>
void CpuMachine<Sum>::copy(T* to, const T* from, int64_t n, bool stream) const {
    copy_bytes(to, from, n * static_cast<int64_t>(sizeof(T)), stream);
}

}  // namespace coconet::COCONET_ISA
