// The layout of a rank's shared segment: control block, attachments, staging area, heap. Every
// offset that another process relies on is defined here.
#pragma once

#include <atomic>

#include "common/base.h"

namespace coconet {

// What a rank tells its peers about its progress. Each counter only grows, compared modulo 2^32.
enum Phase : int {
    kEnter,    // calls entered: descriptor and inputs are ready
    kPublish,  // chunks copied to the staging area
    kReduce,   // chunks reduced
    kExit,     // calls whose stores are complete
    kNumPhases
};
constexpr const char* kPhaseNames[kNumPhases] = {"enter", "publish", "reduce", "exit"};

COCONET_HD constexpr bool reached(uint32_t seen, uint32_t want) {
    return static_cast<int32_t>(seen - want) >= 0;
}

// 128: adjacent lines are prefetched in pairs.
struct alignas(128) Signal {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> waiters;  // processes asleep on value
    // Enter only: which version of the descriptor the call has, by parity of the call. In the line
    // that a waiter has anyway.
    std::atomic<uint32_t> versions[2];
};

enum class OpCode : int32_t {
    none,
    rejected,  // the rank's arguments were bad; text says why
    barrier,
    empty,
    touch,
    all_reduce,
    reduce_scatter,
    all_gather,
    rs_adam_ag,
    ping
};

// What a call is, in full: peers compare fields (meaning: op_fields) and use operands.
constexpr int kMaxFields = 72, kMaxOperands = 4;  // torch has up to 64 dimensions
struct Descriptor {
    OpCode op;
    int32_t num_fields;
    int64_t operands[kMaxOperands];
    int64_t fields[kMaxFields];
    char text[512];
};

enum class FailureKind : int32_t { none, closed, peer_lost, timeout };

struct Failure {
    std::atomic<uint32_t> set;
    FailureKind kind;
    char text[1024];
};

// One entry per tensor of a list, in the heap of each rank.
struct TensorEntry {
    int64_t numel;
    int64_t weight;    // heap offset in bytes, or kPrivate
    int64_t gradient;  // heap offset in bytes, kPrivate or kAbsent
};
constexpr int64_t kPrivate = -1, kAbsent = -2;

constexpr int kMaxBlocks = 1 << 16;
struct FreedBlocks {
    uint64_t bits[kMaxBlocks / 64];
};

struct ControlBlock {
    std::atomic<uint32_t> closed;
    std::atomic<uint32_t> heartbeat;
    Failure failure;
    Signal signals[kNumPhases];
    Descriptor descriptors[2];  // by parity of the version: a fast rank may be one call ahead
    FreedBlocks freed[2];       // heap blocks that this rank has freed, by parity of the call
};

// Staging for operands outside the heap: chunk c of a rank's input goes to slot c modulo
// kStageSlots of its own area, and the peers put their results in its place. Nobody waits for a
// slot: see staged.h for why four suffice. A power of two, since chunk numbers wrap. Smaller inputs
// travel with the descriptor, by parity of the call.
constexpr int kStageSlots = 4;
#if defined(COCONET_STRESS)  // the native tests: many chunks
constexpr int64_t kStageSlotBytes = 8 << 10;
constexpr int64_t kAttachmentBytes = 2 << 10;
#else
constexpr int64_t kStageSlotBytes = 256 << 10;
constexpr int64_t kAttachmentBytes = 64 << 10;
#endif

constexpr int64_t kPage = 4096, kHugePage = 2 << 20;
constexpr int64_t kAttachmentOffset = round_up(sizeof(ControlBlock), kPage);
constexpr int64_t kStageOffset = kAttachmentOffset + 2 * kAttachmentBytes;
constexpr int64_t kHeapOffset = round_up(kStageOffset + kStageSlots * kStageSlotBytes, kHugePage);
constexpr int64_t kHeapAlign = 256;

}  // namespace coconet
