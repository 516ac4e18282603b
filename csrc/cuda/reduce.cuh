// What all_reduce and reduce_scatter share: parameters, operands, staging.
#pragma once

#include "common/staged.h"
#include "cuda/collectives.h"
#include "cuda/machine.cuh"

namespace coconet::cuda {

// Staged operands are in the L2 cache.
constexpr int kStagedUnroll = 2;

// A block's staging areas.
struct Stage {
    const Channel& channel;
    int64_t chunk_bytes;

    COCONET_DEVICE explicit Stage(const Channel& c) : channel(c), chunk_bytes(c.slot_bytes()) {}
    COCONET_DEVICE char* slot(int rank, uint32_t chunk) const { return channel.slot(rank, chunk); }
};

// Every rank's operands of a call, where this rank sees them. In shared memory.
struct Places {
    char* input[kMaxRanks];
    char* output[kMaxRanks];
};

// After enter(): fills places; false when some operand is outside its rank's heap.
COCONET_DEVICE bool find_places(const Channel& channel, const Mail& mine, bool outputs,
                                Places* places) {
    const int r = static_cast<int>(threadIdx.x);
    bool elsewhere = false;
    if (r < channel.world) {
        const Mail mail = channel.mail(r, mine);
        elsewhere = mail.operands[0] < 0 || (outputs && mail.operands[1] < 0);
        places->input[r] = channel.heap(r) + mail.operands[0];
        places->output[r] = channel.heap(r) + mail.operands[1];
    }
    return !__syncthreads_or(elsewhere);
}

// Sources and destinations of a run: pointers by rank, all moved by the run's place.
template <class T, class Byte = char>
struct RankPointers {
    int count;
    Byte* const* base;
    int64_t offset;

    COCONET_DEVICE T* operator[](int q) const { return reinterpret_cast<T*>(base[q]) + offset; }
};
// The same, but the own one comes first.
template <class T>
struct OwnFirst {
    int count, rank;
    char* const* base;
    int64_t offset;

    COCONET_DEVICE T* operator[](int d) const {
        const int r = d == 0 ? rank : d <= rank ? d - 1 : d;
        return reinterpret_cast<T*>(base[r]) + offset;
    }
};
template <class T>
struct One {
    static constexpr int count = 1;
    T* p;

    COCONET_DEVICE T* operator[](int) const { return p; }
};

template <class T>
struct AllReduceIo {
    using In = T;
    using Out = T;
    static constexpr bool stream = false;
    const Places& places;
    int rank, world;

    COCONET_DEVICE RankPointers<const T> sources(const Run& run) const {
        return {world, places.input, run.offset};
    }
    COCONET_DEVICE OwnFirst<T> destinations(const Run& run) const {
        return {world, rank, places.output, run.offset};
    }
};

template <class T>
struct ReduceScatterIo {
    using In = T;
    using Out = T;
    static constexpr bool stream = false;
    char* const* inputs;
    T* output;
    int world;

    COCONET_DEVICE RankPointers<const T> sources(const Run& run) const {
        return {world, inputs, run.offset};
    }
    COCONET_DEVICE One<T> destinations(const Run& run) const { return {output + run.index}; }
};

// Sources in rank order, the own one in its place; destinations with the own one first.
template <class T, class Place>
struct StagedSources {
    int count, rank;
    const T* own;
    Place place;

    COCONET_DEVICE const T* operator[](int q) const { return q == rank ? own : place(q); }
};
template <class T, class Place>
struct StagedDestinations {
    int count, rank;
    T* own;
    Place place;

    COCONET_DEVICE T* operator[](int d) const {
        return d == 0 ? own : place(d <= rank ? d - 1 : d);
    }
};

template <class T, bool Gather>
struct StagedReduceIo {
    using In = T;
    using Out = T;
    static constexpr bool kGather = Gather;
    const T* in;
    T* out;
    int rank, world;

    COCONET_DEVICE bool contributes(int, int32_t) const { return true; }
    COCONET_DEVICE bool anyone(int32_t) const { return true; }
    COCONET_DEVICE const T* input(const Run& run) const { return in + run.offset; }
    COCONET_DEVICE T* output(const Run& run) const {
        return out + (Gather ? run.offset : run.index);
    }
    template <class Place>
    COCONET_DEVICE StagedSources<T, Place> sources(const Run& run, const Place& place) const {
        return {world, rank, input(run), place};
    }
    template <class Place>
    COCONET_DEVICE StagedDestinations<T, Place> destinations(const Run& run,
                                                             const Place& place) const {
        return {Gather ? world : 1, rank, output(run), place};
    }
};

// Integers are only summed.
template <class T>
COCONET_DEVICE auto reduce_op(double scale) {
    using Sum = SumOf<T>;
    if constexpr (static_cast<Sum>(0.5) != 0)
        return ScaleOp<Sum>{static_cast<Sum>(scale)};
    else
        return SumOp{};
}

// Calls f with an element of the type; integers are summed as unsigned ones, whose overflow is
// defined.
template <class F>
void with_reduce_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::bf16:
            return f(bf16_t{});
        case DType::f16:
            return f(f16_t{});
        case DType::f64:
            return f(double{});
        case DType::i64:
            return f(uint64_t{});
        case DType::i32:
            return f(uint32_t{});
        default:
            return f(float{});
    }
}

}  // namespace coconet::cuda
