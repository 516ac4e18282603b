// Skeleton 1 for operands that only their own rank can reach: the same phases, chunk by chunk
// through the ranks' staging areas.
//
// For each chunk of every slice:
//   publish   copy the own input for the peers' slices to the own staging area
//   reduce    own slice: own input + the peers' staged input in rank order, op, store to the own
//             output and to the own result area
//   collect   copy the peers' results to the own output (all-gather only)
// Chunk k+1 is published before chunk k is reduced, and k reduced before k-1 is collected, so that
// a rank rarely waits. A slot is written again when every peer has signalled its last use.
//
// An Io gives In, Out; input(run), output(run): the own memory; contributes(rank, tensor); kGather.
#pragma once

#include "cpu/kernels.h"

namespace coconet::COCONET_ISA {

template <class Machine, class Slices, class Io, class Op>
COCONET_HD void rs_op_ag_staged(Machine& m, const Slices& slices, const Io& io, const Op& op,
                                const Stage& stage, bool stream) {
    using In = typename Io::In;
    using Out = typename Io::Out;
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
    // All ranks have done this phase for the chunk that last used the slot of this one.
    const auto wait_slot = [&](Phase phase, uint32_t chunk) {
        channel.wait_all(phase, chunk + 1 - kStageSlots);
    };

    const auto publish = [&](int64_t k) {
        const uint32_t chunk = first + static_cast<uint32_t>(k);
        wait_slot(kReduce, chunk);
        In* area = reinterpret_cast<In*>(slot(stage.input[rank], chunk));
        for (int peer = 0; peer < world; ++peer) {
            if (peer == rank) continue;
            for_chunk(peer, k, [&](const Run& run) {
                if (!io.contributes(rank, run.tensor)) return;
                copy_bytes(area + peer * step + run.index - k * step, io.input(run),
                           run.length * sizeof(In), false);
            });
        }
        channel.signal(kPublish, chunk + 1);
    };
    const auto reduce = [&](int64_t k) {
        const uint32_t chunk = first + static_cast<uint32_t>(k);
        channel.wait_all(kPublish, chunk + 1);
        if (Io::kGather) wait_slot(kCollect, chunk);
        Out* results = reinterpret_cast<Out*>(slot(stage.result[rank], chunk));
        for_chunk(rank, k, [&](const Run& run) {
            const int64_t at = run.index - k * step;
            const In* src[kMaxRanks];
            int num_src = 0;
            for (int r = 0; r < world; ++r) {
                if (!io.contributes(r, run.tensor)) continue;
                src[num_src++] = r == rank
                                     ? io.input(run)
                                     : reinterpret_cast<const In*>(slot(stage.input[r], chunk)) +
                                           rank * step + at;
            }
            Out* dst[2] = {io.output(run), results + at};
            if (num_src > 0) reduce_run(m, src, num_src, dst, Io::kGather ? 2 : 1, false, run, op);
        });
        channel.signal(kReduce, chunk + 1);
    };
    const auto collect = [&](int64_t k) {
        const uint32_t chunk = first + static_cast<uint32_t>(k);
        for (int peer = 0; peer < world; ++peer) {
            if (peer == rank) continue;
            channel.wait(peer, kReduce, chunk + 1);
            const Out* results = reinterpret_cast<const Out*>(slot(stage.result[peer], chunk));
            for_chunk(peer, k, [&](const Run& run) {
                if (!io.anyone(run.tensor)) return;
                copy_bytes(io.output(run), results + run.index - k * step, run.length * sizeof(Out),
                           stream);
            });
        }
        channel.signal(kCollect, chunk + 1);
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
