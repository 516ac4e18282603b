// Signals between a block of one rank and the same block of the others.
//
// Ordering: signal() is a barrier of the block followed by a release, so it publishes what every
// thread of the block has written; a wait acquires and ends in a barrier, so every thread sees what
// the peers have published. The counters only grow; each has one writer, and lies with its reader,
// so that a wait polls its own memory.
//
// Waiting: all threads of a block call the same functions. A wait ends when the counter is reached,
// or false: at the timeout, which is recorded for the host, or when another block has recorded one.
#pragma once

#include <stddef.h>

#include "cuda/access.cuh"
#include "cuda/layout.h"

namespace coconet::cuda {

class Channel {
  public:
    COCONET_DEVICE explicit Channel(const Segments& segments)
        : rank(gridDim.y > 1 ? static_cast<int>(blockIdx.y) : segments.rank),
          world(segments.world),
          block(static_cast<int>(blockIdx.x)),
          s_(segments),
          call_(pad(rank).progress[block].calls + 1) {}

    const int rank, world, block;

    COCONET_DEVICE char* heap(int r) const { return s_.base[r] + s_.geometry.heap; }
    // This block's: of the call's parity, and a chunk's slot.
    COCONET_DEVICE char* attachment(int r) const {
        return s_.base[r] + s_.geometry.attachments +
               (block * 2 + (call_ & 1)) * s_.geometry.attachment_bytes;
    }
    COCONET_DEVICE char* slot(int r, uint32_t chunk) const {
        return s_.base[r] + s_.geometry.stage +
               (block * kStageSlots + chunk % kStageSlots) * s_.geometry.slot_bytes;
    }
    COCONET_DEVICE int64_t slot_bytes() const { return s_.geometry.slot_bytes; }

    // Tells the peers what this rank calls, after what the block has written, and waits for theirs.
    // False as well when the ranks disagree, which is recorded.
    COCONET_DEVICE bool enter(const Mail& mine, const Descriptor& descriptor) const {
        const int peer = static_cast<int>(threadIdx.x);
        const int parity = call_ & 1;
        if (peer < world && peer != rank) {
            Mail* to = &pad(peer).blocks[block].mail[parity][rank];
            store_peer(&to->hash, mine.hash);
            for (int i = 0; i < 3; ++i) store_peer(&to->operands[i], mine.operands[i]);
        }
        if (block == 0 && s_.check) {
            const int words = words_of(descriptor);
            const auto* from = reinterpret_cast<const int64_t*>(&descriptor);
            for (int i = peer; i < words * world; i += static_cast<int>(blockDim.x)) {
                auto* to = &pad(i / words).descriptors[parity][rank];
                store_peer(reinterpret_cast<int64_t*>(to) + i % words, from[i % words]);
            }
        }
        signal(kEnter, call_);
        if (!wait_all(kEnter, call_)) return false;
        const bool differs = s_.check && peer < world && mail(peer, mine).hash != mine.hash;
        if (!__syncthreads_or(differs)) return true;
        if (block == 0 && peer == 0) record_disagreement(parity);
        leave();
        return false;
    }
    // After enter(): what a rank has sent.
    COCONET_DEVICE Mail mail(int peer, const Mail& mine) const {
        if (peer == rank) return mine;
        const Mail* from = &pad(rank).blocks[block].mail[call_ & 1][peer];
        Mail mail;
        mail.hash = load_peer(&from->hash);
        for (int i = 0; i < 3; ++i) mail.operands[i] = load_peer(&from->operands[i]);
        return mail;
    }

    COCONET_DEVICE void signal(Phase phase, uint32_t value) const {
        __syncthreads();
        const int peer = static_cast<int>(threadIdx.x);
        if (peer < world && peer != rank)
            store_release(&pad(peer).blocks[block].signals[phase][rank], value);
    }
    COCONET_DEVICE bool wait(int peer, Phase phase, uint32_t want) const {
        const bool lost = threadIdx.x == 0 && peer != rank && !reached_in_time(peer, phase, want);
        return !__syncthreads_or(lost);
    }
    COCONET_DEVICE bool wait_all(Phase phase, uint32_t want) const {
        const int peer = static_cast<int>(threadIdx.x);
        const bool lost = peer < world && peer != rank && !reached_in_time(peer, phase, want);
        return !__syncthreads_or(lost);
    }

    // Takes part in a call that another kernel of this rank has entered: the counter keeps up.
    COCONET_DEVICE void follow() const { signal(kEnter, call_); }
    // Ends a call: all blocks of all ranks are done with each other's memory.
    COCONET_DEVICE bool complete_outputs() const {
        leave();
        return wait_all(kExit, call_);
    }
    // Ends a call whose peers needn't be done yet.
    COCONET_DEVICE void leave() const {
        signal(kExit, call_);
        if (threadIdx.x == 0) pad(rank).progress[block].calls = call_;
    }
    COCONET_DEVICE uint32_t first_chunk() const { return pad(rank).progress[block].chunks; }
    // Phases that a call didn't use keep up with the others.
    COCONET_DEVICE void finish_chunks(uint32_t first, uint32_t count) const {
        signal(kPublish, first + count);
        signal(kReduce, first + count);
        if (threadIdx.x == 0) pad(rank).progress[block].chunks = first + count;
        leave();
    }

    // Records that the ranks disagree about an element of a list; for one thread.
    template <class Value>
    COCONET_DEVICE void record_values(int64_t tensor, const Value& value) const {
        Report* report = claim_report();
        if (report == nullptr) return;
        report->tensor = tensor;
        for (int r = 0; r < world; ++r) report->values[r] = value(r);
        publish(report, kDisagreement);
    }

  private:
    COCONET_DEVICE ControlPad& pad(int r) const {
        return *reinterpret_cast<ControlPad*>(s_.base[r]);
    }

    // Without the fields and the text that it doesn't use.
    COCONET_DEVICE static int words_of(const Descriptor& d) {
        if (d.op == OpCode::rejected) return sizeof(Descriptor) / sizeof(int64_t);
        return offsetof(Descriptor, fields) / sizeof(int64_t) + d.num_fields;
    }

    COCONET_DEVICE bool reached_in_time(int peer, Phase phase, uint32_t want) const {
        const uint32_t* signal = &pad(rank).blocks[block].signals[phase][peer];
        uint64_t start = 0;
        for (uint32_t spins = 1;; ++spins) {
            const uint32_t seen = load_acquire(signal);
            if (reached(seen, want)) return true;
            if (spins % 256 != 0) continue;
            if (load_relaxed(&s_.report->claimed) != 0) return false;
            const uint64_t now = nanoseconds();
            if (start == 0) start = now;
            if (now - start < s_.timeout_ns) continue;
            Report* report = claim_report();
            if (report == nullptr) return false;
            report->peer = peer;
            report->phase = phase;
            report->expected = want;
            report->seen = seen;
            publish(report, static_cast<uint32_t>(FailureKind::timeout));
            return false;
        }
    }

    COCONET_DEVICE void record_disagreement(int parity) const {
        Report* report = claim_report();
        if (report == nullptr) return;
        report->tensor = -1;
        for (int r = 0; r < world; ++r) {
            const auto* from = reinterpret_cast<const int64_t*>(&pad(rank).descriptors[parity][r]);
            auto* to = reinterpret_cast<int64_t*>(&report->descriptors[r]);
            for (size_t i = 0; i < sizeof(Descriptor) / sizeof(int64_t); ++i)
                to[i] = load_peer(from + i);
        }
        publish(report, kDisagreement);
    }

    // The report, for the first one to ask for it.
    COCONET_DEVICE Report* claim_report() const {
        if (!claim(&s_.report->claimed)) return nullptr;
        s_.report->op = s_.op;
        s_.report->rank = rank;
        s_.report->block = block;
        return s_.report;
    }
    COCONET_DEVICE void publish(Report* report, uint32_t kind) const {
        store_release(&report->kind, kind);
    }

    const Segments& s_;
    const uint32_t call_;
};

}  // namespace coconet::cuda
