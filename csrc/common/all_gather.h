// all_gather: every rank copies its peers' shards, out of memory that it can reach, or chunk by
// chunk out of their staging areas.
//
// Staged, for each chunk of the shards:
//   publish   copy the chunk of the own shard to the own staging area
//   collect   copy the peers' chunks to the own output
// Chunk k+1 is published before chunk k is collected. Slots as in staged.h: before a rank publishes
// k+1 it has collected k-1, so all peers have published k-1, after they have collected k-3.
//
// Machine and Stage as in staged.h.
#pragma once

#include "common/layout.h"
#include "common/rs_op_ag.h"

namespace coconet {

// shard(rank): where that rank's shard is.
template <class T, class Machine, class Slices, class Shard>
COCONET_HD void gather_whole(const Machine& m, const Slices& slices, const Shard& shard, T* output,
                             bool stream) {
    COCONET_NO_UNROLL
    for (int i = 0; i < m.world; ++i) {
        const int peer = (m.rank + i) % m.world;  // not all from the same rank at once
        const T* source = shard(peer);
        const Share share = share_of(m, slices.size(peer));
        slices.for_runs(peer, share.from, share.to, [&](const Run& run) {
            m.copy(output + run.offset, source + run.index, run.length, stream);
        });
    }
}

template <class T, class Machine, class Slices, class Stage>
COCONET_HD void gather_staged(const Machine& m, const Slices& slices, const T* shard, T* output,
                              const Stage& stage, bool stream) {
    const int64_t step = stage.chunk_bytes / static_cast<int64_t>(sizeof(T));
    int64_t longest = 0;
    COCONET_NO_UNROLL
    for (int r = 0; r < m.world; ++r) {
        const Share share = share_of(m, slices.size(r));
        longest = max64(longest, share.to - share.from);
    }
    const int64_t num_chunks = divide(longest + step - 1, step).quotient;
    const uint32_t first = m.first_chunk();

    const auto slot = [&](int r, uint32_t chunk) {
        return reinterpret_cast<T*>(stage.slot(r, chunk));
    };
    const auto publish = [&](int64_t k) {
        const uint32_t chunk = first + static_cast<uint32_t>(k);
        const Share share = share_of(m, slices.size(m.rank));
        const int64_t begin = share.from + k * step, end = min64(begin + step, share.to);
        if (begin < end) m.copy(slot(m.rank, chunk), shard + begin, end - begin, false);
        m.signal(kPublish, chunk + 1);
    };
    const auto collect = [&](int64_t k) {
        const uint32_t chunk = first + static_cast<uint32_t>(k);
        COCONET_NO_UNROLL
        for (int i = 0; i < m.world; ++i) {
            const int peer = (m.rank + i) % m.world;
            const bool own = peer == m.rank;
            if (!own && !m.wait(peer, kPublish, chunk + 1)) return false;
            const Share share = share_of(m, slices.size(peer));
            const int64_t begin = share.from + k * step;
            const T* source = own ? shard + begin : slot(peer, chunk);
            slices.for_runs(peer, begin, min64(begin + step, share.to), [&](const Run& run) {
                m.copy(output + run.offset, source + run.index - begin, run.length, stream);
            });
        }
        return true;
    };

    if (num_chunks > 0) publish(0);
    COCONET_NO_UNROLL
    for (int64_t k = 0; k < num_chunks; ++k) {
        if (k + 1 < num_chunks) publish(k + 1);
        if (!collect(k)) return;
    }
    m.finish_chunks(static_cast<uint32_t>(num_chunks));
}

}  // namespace coconet
