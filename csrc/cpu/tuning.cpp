#include "cpu/tuning.h"

#include "common/layout.h"

namespace coconet {

Tuning tuning(int world, bool near, bool oversubscribed) {
    Tuning t;
    // One exchange of n bytes with each peer against two of n / world: where waking up is dear,
    // more bytes are worth it.
    const int64_t kib = oversubscribed ? (world <= 4 ? 64 : 16) : world <= 3 ? 4 : 2;
    t.one_shot_bytes = min64(kib << 10, kAttachmentBytes);
    t.chunk_bytes = world <= 4 ? kStageSlotBytes / 2 : kStageSlotBytes;
    // Far apart, a line that a peer needs is sooner had from memory than from this core's cache.
    t.stream_bytes = near ? 4 << 20 : 2 << 20;
    t.staged_stream_bytes = near ? 2 << 20 : 1 << 20;
    t.spins = oversubscribed ? 50 : 2000;
    return t;
}

}  // namespace coconet
