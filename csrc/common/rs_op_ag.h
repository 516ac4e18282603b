// Skeleton 1, rs_op_ag: reduce-scatter, op, all-gather in one pass.
//
// Unfused:  g = all_reduce(x);  y = op(g) on every rank.
//
// Phases, on every rank:
//   1. wait until every peer's input is ready
//   2. for each pack of the own slice: load it from all ranks, add up in rank order, apply
//      op, store the result to every destination
//   3. signal, and wait until every peer's stores are complete
//
// A Machine (the backend) gives:
//   1. rank, world
//   2. part, parts, grain           the share of each slice that is this machine's: a rank's CPU
//   has
//                                   all of it, a CUDA block one of many
//   3. Pack, kLanes                 some elements of the type that is added up
//   4. load, store                  packs of own memory, with dtype conversion: whole (AllLanes) or
//                                   the first n lanes (SomeLanes)
//      load_peer, rounded, store_rounded<Stream>
//                                   packs of memory that a peer reads or writes too; rounded is the
//                                   pack as it lies in memory; Stream writes past the cache
//   5. for_parts(length, src, dst, op, f)
//                                   calls f(machine, from, to) for the parts of a run, each with a
//                                   machine whose packs fit their alignment
//      for_steps(from, to, f)       calls f(Packs<n>, i, lanes) for every n packs, distance()
//                                   elements apart, of a part: this thread's, with loads in flight
//   6. wait_inputs(), complete_outputs()
//                                   false: a peer is lost and the call ends without a result (a
//                                   machine may throw instead)
//
// An Io says where the slice is read and written:
//   1. In, Out                      element types
//   2. sources(run)                 the run's inputs in rank order: count and operator[]; none
//                                   leaves the run as it is
//   3. destinations(run)            likewise; the first is the own copy
//   4. stream                       may they be written past the cache
//
// An Op is the math on one pack:
//   1. kStreamOwn                   may the own copy be written past the cache (it was not just
//                                   read)
//   2. bind(run)                    the op at the start of a run, with
//      kStateless                   has it no memory of its own
//      fetch(machine, i, lanes)     loads what apply needs for the lanes at element i
//      apply(machine, i, lanes, fetched, sum)
//                                   the result; stores the op's own state
#pragma once

#include "common/slices.h"

namespace coconet {

struct AllLanes {};
struct SomeLanes {
    int n;
};

struct Nothing {};

struct SumOp {
    static constexpr bool kStreamOwn = true, kStateless = true;

    COCONET_HD SumOp bind(const Run&) const { return *this; }
    template <class Machine, class Lanes>
    COCONET_HD Nothing fetch(const Machine&, int64_t, Lanes) const {
        return {};
    }
    template <class Machine, class Lanes, class Pack>
    COCONET_HD Pack apply(const Machine&, int64_t, Lanes, Nothing, const Pack& sum) const {
        return sum;
    }
};

// 1 for a sum, 1 / world size for an average.
template <class Sum>
struct ScaleOp {
    static constexpr bool kStreamOwn = true, kStateless = true;
    Sum scale;

    COCONET_HD ScaleOp bind(const Run&) const { return *this; }
    template <class Machine, class Lanes>
    COCONET_HD Nothing fetch(const Machine&, int64_t, Lanes) const {
        return {};
    }
    template <class Machine, class Lanes, class Pack>
    COCONET_HD Pack apply(const Machine&, int64_t, Lanes, Nothing, const Pack& sum) const {
        return sum * scale;
    }
};

// Sources or destinations of a run.
template <class T>
struct Pointers {
    int count = 0;
    T* at[kMaxRanks];

    COCONET_HD void add(T* p) { at[count++] = p; }
    COCONET_HD T* operator[](int i) const { return at[i]; }
};

// Which destinations are written past the cache: none, the own copy, or all; the own copy only
// where the op allows it.
enum class Streamed { none, own, all };

template <int Count>
struct Packs {
    static constexpr int count = Count;
};

// The packs of one step. World > 0 fixes the number of sources at compile time.
template <int World, Streamed kStreamed, int Count, class Machine, class Lanes, class Sources,
          class Destinations, class Op>
COCONET_HD void reduce_step(const Machine& m, const Sources& src, const Destinations& dst,
                            const Op& op, int64_t i, Lanes lanes) {
    using Pack = typename Machine::Pack;
    constexpr bool kStreamOwn = kStreamed != Streamed::none && Op::kStreamOwn;
    constexpr bool kStreamOthers = kStreamed == Streamed::all;
    const int64_t distance = m.distance();
    const int sources = World > 0 ? World : src.count;

    Pack sum[Count];
    {
        const auto* first = src[0] + i;
        COCONET_UNROLL
        for (int u = 0; u < Count; ++u) sum[u] = m.load_peer(first + u * distance, lanes);
    }
    COCONET_NO_UNROLL
    for (int q = 1; q < sources; ++q) {
        const auto* next = src[q] + i;
        COCONET_UNROLL
        for (int u = 0; u < Count; ++u) sum[u] = sum[u] + m.load_peer(next + u * distance, lanes);
    }
    decltype(op.fetch(m, i, lanes)) fetched[Count];
    COCONET_UNROLL
    for (int u = 0; u < Count; ++u) fetched[u] = op.fetch(m, i + u * distance, lanes);
    COCONET_UNROLL
    for (int u = 0; u < Count; ++u)
        sum[u] = op.apply(m, i + u * distance, lanes, fetched[u], sum[u]);

    auto* own = dst[0] + i;
    decltype(m.rounded(own, sum[0])) result[Count];  // once for all destinations
    COCONET_UNROLL
    for (int u = 0; u < Count; ++u) result[u] = m.rounded(own, sum[u]);
    COCONET_UNROLL
    for (int u = 0; u < Count; ++u)
        m.template store_rounded<kStreamOwn>(own + u * distance, result[u], lanes);
    COCONET_NO_UNROLL
    for (int d = 1; d < dst.count; ++d) {
        auto* other = dst[d] + i;
        COCONET_UNROLL
        for (int u = 0; u < Count; ++u)
            m.template store_rounded<kStreamOthers>(other + u * distance, result[u], lanes);
    }
}

template <int World, Streamed kStreamed, class Machine, class Sources, class Destinations, class Op>
COCONET_HD void reduce_run(const Machine& m, const Sources& src, const Destinations& dst,
                           const Run& run, const Op& bindable) {
    const auto op = bindable.bind(run);
    m.for_parts(run.length, src, dst, op, [&](const auto& machine, int64_t from, int64_t to) {
        machine.for_steps(from, to, [&](auto packs, int64_t i, auto lanes) {
            reduce_step<World, kStreamed, decltype(packs)::count>(machine, src, dst, op, i, lanes);
        });
    });
}

template <int World, class Machine, class Sources, class Destinations, class Op>
COCONET_HD void reduce_run(const Machine& m, const Sources& src, const Destinations& dst,
                           Streamed stream, const Run& run, const Op& op) {
    if constexpr (Machine::kStreams) {
        const int streamed = stream == Streamed::none ? 0 : stream == Streamed::own ? 1 : dst.count;
        for (int d = 0; d < streamed; ++d)
            if (!m.can_stream(dst[d])) stream = Streamed::none;
        if (stream == Streamed::all) return reduce_run<World, Streamed::all>(m, src, dst, run, op);
        if (stream == Streamed::own) return reduce_run<World, Streamed::own>(m, src, dst, run, op);
    }
    reduce_run<World, Streamed::none>(m, src, dst, run, op);
}

// Picks the variant of reduce_run for the number of sources and the destinations' alignment.
template <class Machine, class Sources, class Destinations, class Op>
COCONET_HD void reduce_run(const Machine& m, const Sources& src, const Destinations& dst,
                           Streamed stream, const Run& run, const Op& op) {
    if (Machine::kPairs && src.count == 2)
        reduce_run<2>(m, src, dst, stream, run, op);
    else
        reduce_run<0>(m, src, dst, stream, run, op);
}

// The elements of a slice of this size that are this machine's.
struct Share {
    int64_t from, to;
};
template <class Machine>
COCONET_HD Share share_of(const Machine& m, int64_t size) {
    if (m.parts == 1) return {0, size};
    const int64_t even = divide(size + m.parts - 1, m.parts).quotient;
    const int64_t step = divide(even + m.grain - 1, m.grain).quotient * m.grain;
    return {min64(m.part * step, size), min64((m.part + 1) * step, size)};
}

// Phase 2 alone.
template <class Machine, class Slices, class Io, class Op>
COCONET_HD void reduce_slice(const Machine& m, const Slices& slices, const Io& io, const Op& op) {
    const Share share = share_of(m, slices.size(m.rank));
    slices.for_runs(m.rank, share.from, share.to, [&](const Run& run) {
        const auto src = io.sources(run);
        if (src.count == 0) return;
        const Streamed stream = io.stream ? Streamed::all : Streamed::none;
        reduce_run(m, src, io.destinations(run), stream, run, op);
    });
}

// All operands are in memory that every rank can reach.
template <class Machine, class Slices, class Io, class Op>
COCONET_HD void rs_op_ag(const Machine& m, const Slices& slices, const Io& io, const Op& op) {
    if (!m.wait_inputs()) return;
    reduce_slice(m, slices, io, op);
    m.complete_outputs();
}

}  // namespace coconet
