// The layout of a rank's device memory: control pad, attachments, staging areas, heap. Every offset
// that another rank relies on is defined here.
//
// Every block of a rank talks only with the same block of the other ranks and works on its share of
// every slice, so each has its own signals, attachments and staging area.
#pragma once

#include "common/descriptor.h"
#include "common/layout.h"

namespace coconet::cuda {

constexpr int kMaxRanks = 16;
constexpr int kMaxBlocks = 256;   // per rank
constexpr int kMaxThreads = 512;  // per block; at least kMaxRanks
constexpr int kPackBytes = 16;    // of a load or store
constexpr int kReduceUnroll = 4;  // packs of each operand in flight per thread

// What a rank tells its peers when it enters a call.
struct alignas(16) Mail {
    uint64_t hash;        // of the call's descriptor
    int64_t operands[3];  // input and output: offset in the heap or kPrivate; by op
};

// Of one block of a rank; written by the peers.
struct BlockPad {
    uint32_t signals[kNumPhases][kMaxRanks];
    Mail mail[2][kMaxRanks];  // by parity of the call: a fast rank may be one call ahead
};

// Of one block of a rank; the block's own. Here rather than on the host, so that a captured graph
// can be replayed.
struct Progress {
    uint32_t calls;   // entered
    uint32_t chunks;  // staged
};

struct ControlPad {
    BlockPad blocks[kMaxBlocks];
    Progress progress[kMaxBlocks];
    Descriptor descriptors[2][kMaxRanks];  // of block 0's calls, by parity
};

// Where a rank's areas begin, and how large a block's part of them is.
struct Geometry {
    int64_t attachments, stage, heap;  // offsets in bytes
    int64_t attachment_bytes;          // per block, twice: by parity of the call
    int64_t slot_bytes;                // per block, kStageSlots times
};

constexpr Geometry geometry(int blocks, int64_t attachment_bytes, int64_t slot_bytes) {
    const int64_t attachments = round_up(sizeof(ControlPad), kPage);
    const int64_t stage = attachments + round_up(blocks * 2 * attachment_bytes, kPage);
    const int64_t heap = stage + round_up(blocks * kStageSlots * slot_bytes, kHugePage);
    return {attachments, stage, heap, attachment_bytes, slot_bytes};
}

// What a kernel that gives up tells the host. In memory that both can reach; the first one to set
// `claimed` writes, and sets `kind` when it is done.
struct Report {
    uint32_t claimed;
    uint32_t kind;  // FailureKind, or kDisagreement
    int32_t op, rank, peer, phase, block;
    uint32_t expected, seen;
    int64_t tensor;                     // disagreement about an element of a list, or -1
    int64_t values[kMaxRanks];          // what each rank has there
    Descriptor descriptors[kMaxRanks];  // disagreement about a call
};
constexpr uint32_t kDisagreement = 100;

// The part of a kernel's parameters that every op has.
struct Segments {
    char* base[kMaxRanks];  // of each rank's memory
    int32_t world;
    int32_t rank;  // of a launch for one rank; launches for all have blockIdx.y
    int32_t op;
    bool check;  // compare what the ranks call
    Geometry geometry;
    uint64_t timeout_ns;
    Report* report;
};

}  // namespace coconet::cuda
