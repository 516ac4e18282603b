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
// An Io gives In, Out of the same size; input(run), output(run): the own memory;
// contributes(rank, tensor); kGather.
#pragma once

#include "cpu/kernels.h"

namespace coconet::COCONET_ISA {

template <class Machine, class Slices, class Io, class Op>
COCONET_HD void rs_op_ag_staged(Machine& m, const Slices& slices, const Io& io, const Op& op,
                                const Stage& stage, bool stream) {
    using In = typename Io::In;
    using Out = typename Io::Out;
    static_assert(sizeof(In) == sizeof(Out) && kStageSlots >= 4);
    Channel& channel = m.channel;
    const int rank = channel.rank, world = channel.world;
    // Elements of each slice per chunk.
    const int64_t step = stage.chunk_bytes / sizeof(In) / world / kSliceAlign * kSliceAlign;
    int64_t longest = 0;
    for (int r = 0; r < world; ++r) longest = max64(longest, slices.size(r));
    const int64_t num_chunks = ceil_div(longest, step);
    const uint32_t first = channel.chunk;

    const auto slot = [](char* area, uint32_t chunk) {
        return area + (chunk % kStageSlots) * kStageSlotBytes;
    };
    const auto for_chunk = [&](int r, int64_t k, auto&& f) {
        slices.for_runs(r, min64(k * step, slices.size(r)), min64((k + 1) * step, slices.size(r)),
                        f);
    };
    // Where rank's staged input for this rank's slice of the chunk is, and the result goes.
    const auto staged = [&](int r, int owner, uint32_t chunk) {
        return slot(stage.area[r], chunk) + owner * step * static_cast<int64_t>(sizeof(In));
    };

    const auto publish = [&](int64_t k) {
        const uint32_t chunk = first + static_cast<uint32_t>(k);
        for (int peer = 0; peer < world; ++peer) {
            if (peer == rank) continue;
            In* input = reinterpret_cast<In*>(staged(rank, peer, chunk));
            for_chunk(peer, k, [&](const Run& run) {
                if (!io.contributes(rank, run.tensor)) return;
                copy_bytes(input + run.index - k * step, io.input(run), run.length * sizeof(In),
                           false);
            });
        }
        channel.signal(kPublish, chunk + 1);
    };
    const auto reduce = [&](int64_t k) {
        const uint32_t chunk = first + static_cast<uint32_t>(k);
        channel.wait_all(kPublish, chunk + 1);
        for_chunk(rank, k, [&](const Run& run) {
            const int64_t at = run.index - k * step;
            const In* src[kMaxRanks];
            Out* dst[kMaxRanks];
            int num_src = 0, num_dst = 0;
            dst[num_dst++] = io.output(run);
            for (int r = 0; r < world; ++r) {
                char* place = staged(r, rank, chunk);
                if (io.contributes(r, run.tensor))
                    src[num_src++] =
                        r == rank ? io.input(run) : reinterpret_cast<const In*>(place) + at;
                if (Io::kGather && r != rank) dst[num_dst++] = reinterpret_cast<Out*>(place) + at;
            }
            // Results stay in the cache for the peers.
            const Streamed own = stream ? Streamed::own : Streamed::none;
            if (num_src > 0) reduce_run(m, src, num_src, dst, num_dst, own, run, op);
        });
        channel.signal(kReduce, chunk + 1);
    };
    const auto collect = [&](int64_t k) {
        const uint32_t chunk = first + static_cast<uint32_t>(k);
        for (int peer = 0; peer < world; ++peer) {
            if (peer == rank) continue;
            channel.wait(peer, kReduce, chunk + 1);
            const Out* results = reinterpret_cast<const Out*>(staged(rank, peer, chunk));
            for_chunk(peer, k, [&](const Run& run) {
                if (!io.anyone(run.tensor)) return;
                copy_bytes(io.output(run), results + run.index - k * step, run.length * sizeof(Out),
                           stream);
            });
        }
    };

    m.wait_inputs();
    if (num_chunks > 0) publish(0);
    for (int64_t k = 0; k < num_chunks; ++k) {
        if (k + 1 < num_chunks) publish(k + 1);
        reduce(k);
        if (Io::kGather && k > 0) collect(k - 1);
    }
    if (Io::kGather && num_chunks > 0) collect(num_chunks - 1);
    channel.finish_chunks(static_cast<uint32_t>(num_chunks));
}

}  // namespace coconet::COCONET_ISA
