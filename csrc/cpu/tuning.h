// Every size that decides how a collective runs, in one place. Measured: docs/tuning.md.
#pragma once

#include "common/base.h"

namespace coconet {

struct Tuning {
    // Equal on all ranks.
    int64_t one_shot_bytes;  // inputs outside the heap up to this size travel with the descriptor
    int64_t chunk_bytes;     // what a rank stages at a time
    // May differ between ranks.
    int64_t stream_bytes;         // outputs larger than this are written past the cache
    int64_t staged_stream_bytes;  // the same where inputs and outputs pass the staging areas
    int spins;                    // looks at a signal before the core is given to others
};

// near: the cores of the ranks share a cache. oversubscribed: there are more ranks than cores.
Tuning tuning(int world, bool near, bool oversubscribed);

}  // namespace coconet
