// The CUDA machine of the skeletons: a pack is 16 bytes of the operands' type, converted to the
// type in which they are added up. The threads of a block share the block's part of every slice, or
// those of a warp do, where runs are short.
//
// Operands are accessed as peers' memory, wherever they are; an op's own state is not.
#pragma once

#include <string.h>

#include "common/convert.h"
#include "common/rs_op_ag.h"
#include "cuda/channel.cuh"

#if !defined(COCONET_EMULATED)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace coconet::cuda {

constexpr int kWarp = 32;

// The own part of a launch's parameters.
template <class Launch>
COCONET_DEVICE const auto& own_operands(const Launch& launch) {
    return launch.ranks[gridDim.y > 1 ? blockIdx.y : 0];
}

template <class Sum, int Lanes>
struct Pack {
    Sum v[Lanes];
};

#define COCONET_PACK_OPERATOR(op)                                                                \
    template <class Sum, int Lanes>                                                              \
    COCONET_DEVICE Pack<Sum, Lanes> operator op(Pack<Sum, Lanes> a, const Pack<Sum, Lanes>& b) { \
        COCONET_UNROLL                                                                           \
        for (int k = 0; k < Lanes; ++k) a.v[k] = a.v[k] op b.v[k];                               \
        return a;                                                                                \
    }
COCONET_PACK_OPERATOR(+)
COCONET_PACK_OPERATOR(-)
COCONET_PACK_OPERATOR(/)
#undef COCONET_PACK_OPERATOR

template <class Sum, int Lanes>
COCONET_DEVICE Pack<Sum, Lanes> operator*(Pack<Sum, Lanes> a, const Pack<Sum, Lanes>& b) {
    COCONET_UNROLL
    for (int k = 0; k < Lanes; ++k) a.v[k] = a.v[k] * b.v[k];
    return a;
}
template <class Sum, int Lanes>
COCONET_DEVICE Pack<Sum, Lanes> operator*(Pack<Sum, Lanes> a, Sum b) {
    COCONET_UNROLL
    for (int k = 0; k < Lanes; ++k) a.v[k] = a.v[k] * b;
    return a;
}

// Between an element and the type in which it is added up.
template <class T>
COCONET_DEVICE T widened(T x) {
    return x;
}
COCONET_DEVICE float widened(bf16_t x) { return to_float(x); }
template <class T>
COCONET_DEVICE void narrow(T x, T* out) {
    *out = x;
}
#if defined(COCONET_EMULATED)
COCONET_DEVICE float widened(f16_t x) { return to_float(x); }
COCONET_DEVICE void narrow(float x, bf16_t* out) { from_float(x, out); }
COCONET_DEVICE void narrow(float x, f16_t* out) { from_float(x, out); }
#else
COCONET_DEVICE float widened(f16_t x) { return __half2float(__ushort_as_half(x.bits)); }
COCONET_DEVICE void narrow(float x, bf16_t* out) {
    out->bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
COCONET_DEVICE void narrow(float x, f16_t* out) {
    out->bits = __half_as_ushort(__float2half_rn(x));
}
#endif

// Some elements as they lie in memory.
template <class T, int Lanes>
struct alignas(Lanes * sizeof(T) % kPackBytes == 0 ? kPackBytes : alignof(T)) Raw {
    T v[Lanes];
};

// Accesses of kPackBytes, or of one element. Peer: to memory that a peer reads or writes too.
template <bool Peer, class T, int Lanes>
COCONET_DEVICE Raw<T, Lanes> load_raw(const T* p) {
    using Word = std::conditional_t<Lanes == 1, T, uint4>;
    Raw<T, Lanes> raw;
    COCONET_UNROLL
    for (size_t w = 0; w < sizeof raw / sizeof(Word); ++w) {
        const Word* from = reinterpret_cast<const Word*>(p) + w;
        Word word;
        if constexpr (Peer)
            word = load_peer(from);
        else
            word = *from;
        memcpy(reinterpret_cast<char*>(&raw) + w * sizeof(Word), &word, sizeof(Word));
    }
    return raw;
}
template <bool Peer, class T, int Lanes>
COCONET_DEVICE void store_raw(T* p, const Raw<T, Lanes>& raw) {
    using Word = std::conditional_t<Lanes == 1, T, uint4>;
    COCONET_UNROLL
    for (size_t w = 0; w < sizeof raw / sizeof(Word); ++w) {
        Word* to = reinterpret_cast<Word*>(p) + w;
        Word word;
        memcpy(&word, reinterpret_cast<const char*>(&raw) + w * sizeof(Word), sizeof(Word));
        if constexpr (Peer)
            store_peer(to, word);
        else
            *to = word;
    }
}

// Which threads work together on which part of every slice.
struct Team {
    int thread, threads;
    int part, parts;
    int64_t grain;

    COCONET_DEVICE static Team block(int64_t grain) {
        return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), grain};
    }
    // For phases without a barrier of the block between them.
    COCONET_DEVICE static Team warp(int64_t grain) {
        const int warps = static_cast<int>(blockDim.x) / kWarp;
        const int warp = static_cast<int>(threadIdx.x) / kWarp;
        return {static_cast<int>(threadIdx.x) % kWarp, kWarp,
                static_cast<int>(blockIdx.x) * warps + warp, static_cast<int>(gridDim.x) * warps,
                grain};
    }
};

// T: the operands' type. Unroll: packs of each operand in flight.
template <class T, int Unroll, int Lanes = kPackBytes / static_cast<int>(sizeof(T))>
struct CudaMachine {
    static constexpr int kLanes = Lanes;
    static constexpr bool kStreams = false, kPairs = false;
    using Sum = SumOf<T>;
    using Pack = cuda::Pack<Sum, Lanes>;

    const Channel& channel;
    Team team;
    int rank, world;
    int part, parts;
    int64_t grain;

    COCONET_DEVICE CudaMachine(const Channel& c, const Team& t)
        : channel(c),
          team(t),
          rank(c.rank),
          world(c.world),
          part(t.part),
          parts(t.parts),
          grain(t.grain) {}

    // The peers' inputs are ready: the channel has entered the call.
    COCONET_DEVICE bool wait_inputs() const { return true; }
    COCONET_DEVICE void complete_outputs() const { channel.complete_outputs(); }
    COCONET_DEVICE uint32_t first_chunk() const { return channel.first_chunk(); }
    COCONET_DEVICE void signal(Phase phase, uint32_t value) const { channel.signal(phase, value); }
    COCONET_DEVICE bool wait(int peer, Phase phase, uint32_t want) const {
        return channel.wait(peer, phase, want);
    }
    COCONET_DEVICE bool wait_all(Phase phase, uint32_t want) const {
        return channel.wait_all(phase, want);
    }
    COCONET_DEVICE void finish_chunks(uint32_t count) const {
        channel.finish_chunks(channel.first_chunk(), count);
    }

    COCONET_DEVICE Pack splat(Sum x) const {
        Pack y;
        COCONET_UNROLL
        for (int k = 0; k < Lanes; ++k) y.v[k] = x;
        return y;
    }
    COCONET_DEVICE Pack fma(const Pack& a, const Pack& b, Pack c) const {
        COCONET_UNROLL
        for (int k = 0; k < Lanes; ++k) c.v[k] = fma_rn(a.v[k], b.v[k], c.v[k]);
        return c;
    }
    COCONET_DEVICE Pack sqrt(Pack x) const {
        COCONET_UNROLL
        for (int k = 0; k < Lanes; ++k) x.v[k] = sqrt_rn(x.v[k]);
        return x;
    }

    template <class U>
    COCONET_DEVICE Pack load(const U* p, AllLanes) const {
        return widened_pack(load_raw<false, U, Lanes>(p));
    }
    template <class U>
    COCONET_DEVICE Pack load_peer(const U* p, AllLanes) const {
        return widened_pack(load_raw<true, U, Lanes>(p));
    }
    template <class U>
    COCONET_DEVICE Raw<U, Lanes> rounded(const U*, const Pack& x) const {
        Raw<U, Lanes> raw;
        COCONET_UNROLL
        for (int k = 0; k < Lanes; ++k) narrow(x.v[k], &raw.v[k]);
        return raw;
    }
    template <bool Stream, class U>
    COCONET_DEVICE void store_rounded(U* p, const Raw<U, Lanes>& x, AllLanes) const {
        store_raw<true>(p, x);
    }
    template <class U>
    COCONET_DEVICE void store(U* p, const Pack& x, AllLanes) const {
        store_raw<false>(p, rounded(p, x));
    }

    // Heads and tails, and runs whose operands are not aligned alike, go element by element; so do
    // ops with state, whose alignment is that of an aligned run.
    template <class Sources, class Destinations, class Op, class F>
    COCONET_DEVICE void for_parts(int64_t length, const Sources& src, const Destinations& dst,
                                  const Op&, F&& f) const {
        const CudaMachine<T, 1, 1> narrow(channel, team);
        const auto misfit = [](const void* p) {
            return static_cast<int>(reinterpret_cast<uintptr_t>(p) % kPackBytes);
        };
        const int off = misfit(dst[0]);
        bool alike = off % sizeof(T) == 0 && (off == 0 || Op::kStateless);
        COCONET_NO_UNROLL
        for (int q = 0; q < src.count; ++q) alike = alike && misfit(src[q]) == off;
        COCONET_NO_UNROLL
        for (int d = 1; d < dst.count; ++d) alike = alike && misfit(dst[d]) == off;

        int64_t head = length, body = 0;
        if (alike) {
            head = min64(off == 0 ? 0 : (kPackBytes - off) / static_cast<int>(sizeof(T)), length);
            body = (length - head) / Lanes * Lanes;
            f(*this, head, head + body);
        }
        COCONET_NO_UNROLL
        for (int tail = 0; tail < 2; ++tail)
            f(narrow, tail ? head + body : 0, tail ? length : head);
    }
    template <class F>
    COCONET_DEVICE void for_steps(int64_t from, int64_t to, F&& f) const {
        int64_t base = from;
        if constexpr (Unroll > 1) {
            COCONET_NO_UNROLL
            for (; base + Unroll * distance() <= to; base += Unroll * distance())
                f(Packs<Unroll>{}, base + team.thread * Lanes, AllLanes{});
        }
        COCONET_NO_UNROLL
        for (int64_t i = base + team.thread * Lanes; i < to; i += distance())
            f(Packs<1>{}, i, AllLanes{});
    }
    COCONET_DEVICE int64_t distance() const { return static_cast<int64_t>(team.threads) * Lanes; }

    template <class U>
    COCONET_DEVICE void copy(U* to, const U* from, int64_t n, bool) const {
        copy_elements(team, to, from, n);
    }

  private:
    template <class U>
    COCONET_DEVICE static Pack widened_pack(const Raw<U, Lanes>& raw) {
        Pack x;
        COCONET_UNROLL
        for (int k = 0; k < Lanes; ++k) x.v[k] = widened(raw.v[k]);
        return x;
    }
};

// Between memories of which either may be a peer's.
template <class T>
COCONET_DEVICE void copy_elements(const Team& team, T* to, const T* from, int64_t n) {
    constexpr int kUnroll = 4, kElements = kPackBytes / static_cast<int>(sizeof(T));
    const auto misfit = [](const void* p) {
        return static_cast<int>(reinterpret_cast<uintptr_t>(p) % kPackBytes);
    };
    const int off = misfit(to);
    int64_t head = n, body = 0;
    if (off == misfit(from) && off % sizeof(T) == 0) {
        head = min64(off == 0 ? 0 : (kPackBytes - off) / static_cast<int>(sizeof(T)), n);
        body = (n - head) / kElements;
        auto* dst = reinterpret_cast<uint4*>(to + head);
        const auto* src = reinterpret_cast<const uint4*>(from + head);
        int64_t base = team.thread;
        COCONET_NO_UNROLL
        for (; base + (kUnroll - 1) * team.threads < body; base += kUnroll * team.threads) {
            uint4 word[kUnroll];
            COCONET_UNROLL
            for (int u = 0; u < kUnroll; ++u) word[u] = load_peer(src + base + u * team.threads);
            COCONET_UNROLL
            for (int u = 0; u < kUnroll; ++u) store_peer(dst + base + u * team.threads, word[u]);
        }
        COCONET_NO_UNROLL
        for (; base < body; base += team.threads) store_peer(dst + base, load_peer(src + base));
    }
    const int64_t packed = body * kElements;
    COCONET_NO_UNROLL
    for (int64_t rest = team.thread; rest < n - packed; rest += team.threads) {
        const int64_t i = rest < head ? rest : rest + packed;
        store_peer(to + i, load_peer(from + i));
    }
}

}  // namespace coconet::cuda
