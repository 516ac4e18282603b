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
// A Machine (the backend) gives: Pack, kLanes, kUnroll; load and store of packs with dtype
// conversion, whole (AllLanes) or the first n lanes (SomeLanes); rounded<T>, the pack as it lies in
// memory, and store_whole<Stream> for it, where Stream writes past the cache; can_stream(pointer);
// rank, wait_inputs(), complete_outputs().
//
// An Io says where the slice is read and written:
//   1. In, Out                      element types
//   2. sources(run, src)            fills src[] with the run's inputs in rank order, returns how
//                                   many; 0 leaves the run as it is
//   3. destinations(run, dst)       fills dst[], returns how many; dst[0] is the own copy
//
// An Op is the math on one pack:
//   1. kStreamOwn                   may the own copy be written past the cache (it was not just
//   read)
//   2. bind(run)                    the op at the start of a run: a functor
//                                   (machine, i, lanes, sum) -> Pack for the lanes at element i
#pragma once

#include "common/slices.h"

namespace coconet {

struct AllLanes {};
struct SomeLanes {
    int n;
};

struct SumOp {
    static constexpr bool kStreamOwn = true;

    COCONET_HD SumOp bind(const Run&) const { return *this; }
    template <class Machine, class Lanes>
    COCONET_HD typename Machine::Pack operator()(const Machine&, int64_t, Lanes,
                                                 typename Machine::Pack sum) const {
        return sum;
    }
};

// 1 for a sum, 1 / world size for an average.
template <class Sum>
struct ScaleOp {
    static constexpr bool kStreamOwn = true;
    Sum scale;

    COCONET_HD ScaleOp bind(const Run&) const { return *this; }
    template <class Machine, class Lanes>
    COCONET_HD typename Machine::Pack operator()(const Machine&, int64_t, Lanes,
                                                 typename Machine::Pack sum) const {
        return sum * scale;
    }
};

// Which destinations are written past the cache: none, the own copy, or all; the own copy only
// where the op allows it.
enum class Streamed { none, own, all };

// One contiguous run. World > 0 fixes the number of sources at compile time.
template <int World, Streamed kStreamed, class Machine, class In, class Out, class Op>
COCONET_HD void reduce_run(const Machine& m, const In* const* src, int num_src, Out* const* dst,
                           int num_dst, const Run& run, const Op& bindable) {
    const auto op = bindable.bind(run);
    using Pack = typename Machine::Pack;
    constexpr int kLanes = Machine::kLanes, kUnroll = Machine::kUnroll;
    constexpr int64_t kStep = kLanes * kUnroll;
    constexpr bool kStreamOwn = kStreamed != Streamed::none && Op::kStreamOwn;
    constexpr bool kStreamOthers = kStreamed == Streamed::all;
    const int sources = World > 0 ? World : num_src;

    int64_t i = 0;
    for (; i + kStep <= run.length; i += kStep) {
        Pack sum[kUnroll];
        for (int u = 0; u < kUnroll; ++u) sum[u] = m.load(src[0] + i + u * kLanes, AllLanes{});
        for (int q = 1; q < sources; ++q)
            for (int u = 0; u < kUnroll; ++u)
                sum[u] = sum[u] + m.load(src[q] + i + u * kLanes, AllLanes{});
        for (int u = 0; u < kUnroll; ++u) sum[u] = op(m, i + u * kLanes, AllLanes{}, sum[u]);
        typename Machine::template Rounded<Out> result[kUnroll];  // once for all destinations
        for (int u = 0; u < kUnroll; ++u) result[u] = m.template rounded<Out>(sum[u]);
        for (int u = 0; u < kUnroll; ++u)
            m.template store_whole<kStreamOwn>(dst[0] + i + u * kLanes, result[u]);
        for (int d = 1; d < num_dst; ++d)
            for (int u = 0; u < kUnroll; ++u)
                m.template store_whole<kStreamOthers>(dst[d] + i + u * kLanes, result[u]);
    }
    for (; i < run.length; i += kLanes) {
        const SomeLanes lanes{static_cast<int>(min64(kLanes, run.length - i))};
        Pack sum = m.load(src[0] + i, lanes);
        for (int q = 1; q < sources; ++q) sum = sum + m.load(src[q] + i, lanes);
        sum = op(m, i, lanes, sum);
        for (int d = 0; d < num_dst; ++d) m.store(dst[d] + i, sum, lanes);
    }
}

template <int World, class Machine, class In, class Out, class Op>
COCONET_HD void reduce_run(const Machine& m, const In* const* src, int num_src, Out* const* dst,
                           int num_dst, Streamed stream, const Run& run, const Op& op) {
    const int streamed = stream == Streamed::none ? 0 : stream == Streamed::own ? 1 : num_dst;
    for (int d = 0; d < streamed; ++d)
        if (!m.can_stream(dst[d])) stream = Streamed::none;
    if (stream == Streamed::all)
        reduce_run<World, Streamed::all>(m, src, num_src, dst, num_dst, run, op);
    else if (stream == Streamed::own)
        reduce_run<World, Streamed::own>(m, src, num_src, dst, num_dst, run, op);
    else
        reduce_run<World, Streamed::none>(m, src, num_src, dst, num_dst, run, op);
}

// Picks the variant of reduce_run for the number of sources and the destinations' alignment.
template <class Machine, class In, class Out, class Op>
COCONET_HD void reduce_run(const Machine& m, const In* const* src, int num_src, Out* const* dst,
                           int num_dst, Streamed stream, const Run& run, const Op& op) {
    if (num_src == 2)
        reduce_run<2>(m, src, num_src, dst, num_dst, stream, run, op);
    else
        reduce_run<0>(m, src, num_src, dst, num_dst, stream, run, op);
}

// Phase 2 alone.
template <class Machine, class Slices, class Io, class Op>
COCONET_HD void reduce_slice(const Machine& m, const Slices& slices, const Io& io, const Op& op) {
    slices.for_runs(m.rank, 0, slices.size(m.rank), [&](const Run& run) {
        const typename Io::In* src[kMaxRanks];
        typename Io::Out* dst[kMaxRanks];
        const int num_src = io.sources(run, src);
        if (num_src == 0) return;
        const int num_dst = io.destinations(run, dst);
        reduce_run(m, src, num_src, dst, num_dst, io.stream ? Streamed::all : Streamed::none, run,
                   op);
    });
}

// All operands are in memory that every rank can reach.
template <class Machine, class Slices, class Io, class Op>
COCONET_HD void rs_op_ag(Machine& m, const Slices& slices, const Io& io, const Op& op) {
    m.wait_inputs();
    reduce_slice(m, slices, io, op);
    m.complete_outputs();
}

}  // namespace coconet
