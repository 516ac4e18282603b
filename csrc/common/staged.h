// Skeleton 1 for operands that only their own rank can reach: the same phases, chunk by chunk
// through the ranks' staging areas.
//
// For each chunk of every slice:
//   publish   copy the own input for the peers' slices to the own staging area
//   reduce    own slice: own input + the peers' staged input in rank order, op, store to the own
//             output and, for an all-gather, to where each peer's input was
//   collect   copy what the peers have put there to the own output (all-gather only)
// Chunk k+1 is published before chunk k is reduced, and k reduced before k-1 is collected, so that
// a rank rarely waits. Results take the place of inputs because a line that changes cores is what a
// chunk costs: the reducing core has just got these.
//
// Slots: before this rank publishes chunk k+1 it has reduced k-1, so all peers have published k-1,
// which each does after it has reduced k-3; and it has collected k-3 itself. So nobody uses the
// slot of k-3 any more, which is that of k+1.
//
// An Io gives In, Out of the same size; input(run), output(run): the own memory; sources(run, f)
// and destinations(run, f), as in rs_op_ag.h, where f(rank) is the place of that rank's input in
// its staging area; contributes(rank, tensor), anyone(tensor): who has an input; kGather.
//
// A Stage gives chunk_bytes, how much of a slot is used, and slot(rank, chunk).
//
// The Machine gives besides: first_chunk(), the number of the next chunk; signal(phase, value), and
// wait(peer, phase, value), wait_all(phase, value) with the result of wait_inputs(); copy(to, from,
// elements, stream) between own and staged memory; finish_chunks(count), the end of the call.
#pragma once

#include "common/layout.h"
#include "common/rs_op_ag.h"

namespace coconet {

template <class Machine, class Slices, class Io, class Op, class Stage>
COCONET_HD void rs_op_ag_staged(const Machine& m, const Slices& slices, const Io& io, const Op& op,
                                const Stage& stage, bool stream) {
    using In = typename Io::In;
    using Out = typename Io::Out;
    static_assert(sizeof(In) == sizeof(Out) && kStageSlots >= 4);
    const int rank = m.rank, world = m.world;
    // Elements of each slice per chunk.
    const auto per_slice = static_cast<int>(stage.chunk_bytes / sizeof(In)) / world;
    const int64_t step = per_slice / kSliceAlign * kSliceAlign;
    int64_t longest = 0;
    COCONET_NO_UNROLL
    for (int r = 0; r < world; ++r) {
        const Share share = share_of(m, slices.size(r));
        longest = max64(longest, share.to - share.from);
    }
    const int64_t num_chunks = divide(longest + step - 1, step).quotient;
    const uint32_t first = m.first_chunk();

    const auto for_chunk = [&](int r, int64_t k, auto&& f) {
        const Share share = share_of(m, slices.size(r));
        slices.for_runs(r, min64(share.from + k * step, share.to),
                        min64(share.from + (k + 1) * step, share.to), f);
    };
    // Where the staged input of a rank for the owner's slice is, and the result goes.
    const auto staged = [&](int r, int owner, int64_t k, const Run& run) {
        const int64_t at = run.index - share_of(m, slices.size(owner)).from - k * step;
        return reinterpret_cast<In*>(stage.slot(r, first + static_cast<uint32_t>(k))) +
               owner * step + at;
    };

    const auto publish = [&](int64_t k) {
        COCONET_NO_UNROLL
        for (int peer = 0; peer < world; ++peer) {
            if (peer == rank) continue;
            for_chunk(peer, k, [&](const Run& run) {
                if (io.contributes(rank, run.tensor))
                    m.copy(staged(rank, peer, k, run), io.input(run), run.length, false);
            });
        }
        m.signal(kPublish, first + static_cast<uint32_t>(k) + 1);
    };
    const auto reduce = [&](int64_t k) {
        if (!m.wait_all(kPublish, first + static_cast<uint32_t>(k) + 1)) return false;
        for_chunk(rank, k, [&](const Run& run) {
            const auto place = [&](int r) { return staged(r, rank, k, run); };
            const auto src = io.sources(run, place);
            if (src.count == 0) return;
            // Results stay in the cache for the peers.
            const Streamed own = stream ? Streamed::own : Streamed::none;
            reduce_run(m, src, io.destinations(run, place), own, run, op);
        });
        m.signal(kReduce, first + static_cast<uint32_t>(k) + 1);
        return true;
    };
    const auto collect = [&](int64_t k) {
        COCONET_NO_UNROLL
        for (int peer = 0; peer < world; ++peer) {
            if (peer == rank) continue;
            if (!m.wait(peer, kReduce, first + static_cast<uint32_t>(k) + 1)) return false;
            for_chunk(peer, k, [&](const Run& run) {
                if (!io.anyone(run.tensor)) return;
                m.copy(io.output(run), reinterpret_cast<const Out*>(staged(rank, peer, k, run)),
                       run.length, stream);
            });
        }
        return true;
    };

    if (!m.wait_inputs()) return;
    if (num_chunks > 0) publish(0);
    COCONET_NO_UNROLL
    for (int64_t k = 0; k < num_chunks; ++k) {
        if (k + 1 < num_chunks) publish(k + 1);
        if (!reduce(k)) return;
        if (Io::kGather && k > 0 && !collect(k - 1)) return;
    }
    if (Io::kGather && num_chunks > 0 && !collect(num_chunks - 1)) return;
    m.finish_chunks(static_cast<uint32_t>(num_chunks));
}

}  // namespace coconet
