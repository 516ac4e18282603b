// Signals between the ranks of a communicator, and waiting for them.
//
// Ordering: signal() releases everything the rank has written; wait() acquires it. Each counter has
// one writer, its rank, in the rank's own control block.
//
// Waiting: spin, then yield, then sleep on a futex. Every wait ends: when the counter is reached,
// when a peer is lost or has failed, at the timeout, or on an interrupt; the last three throw Error
// after the failure was recorded for the peers to see.
#pragma once

#include "common/layout.h"

namespace coconet {

class Liveness;

#if defined(COCONET_STRESS)
// Defined by the native tests: delays a rank here and there, so that others run ahead of it.
void perturb();
#else
inline void perturb() {}
#endif

class Channel {
  public:
    Channel(int rank, int world, ControlBlock* const* blocks, Liveness& liveness,
            double timeout_seconds, uint32_t first_epoch, int spins);

    const int rank, world;

    void signal(Phase phase, uint32_t value);
    void wait(int peer, Phase phase, uint32_t want) {
        const Signal& s = blocks_[peer]->signals[phase];
        if (!reached(s.value.load(std::memory_order_acquire), want)) wait_long(peer, phase, want);
        perturb();
    }
    void wait_all(Phase phase, uint32_t want) {
        for (int peer = 0; peer < world; ++peer)
            if (peer != rank) wait(peer, phase, want);
    }

    // Starts a call: publishes the descriptor, waits for those of all peers.
    void enter(const Descriptor& mine);
    const Descriptor& descriptor(int peer) const { return known_[peer]; }
    // What this rank published for the call before the last one may be overwritten: every peer has
    // left that call.
    void settle() { wait_all(kEnter, epoch_); }
    // Posts a descriptor without waiting for the peers to arrive.
    void post(const Descriptor& mine);
    void wait_inputs() { wait_all(kEnter, epoch_); }
    void complete_outputs() {
        signal(kExit, epoch_);
        wait_all(kExit, epoch_);
    }
    // Ends a call that doesn't wait for its peers.
    void leave() { signal(kExit, epoch_); }

    // The number that the next call will have.
    uint32_t next_epoch() const { return epoch_ + 1; }
    // Chunks staged so far, by every op; the number of a chunk selects its slot.
    uint32_t chunk;
    // Phases that didn't use their chunks keep up with the others.
    void skip_chunks(uint32_t num_chunks) {
        chunk += num_chunks;
        signal(kPublish, chunk);
        signal(kReduce, chunk);
    }
    // Ends a call that staged chunks.
    void finish_chunks(uint32_t num_chunks) {
        skip_chunks(num_chunks);
        leave();
    }
    // For messages: what the rank is doing.
    const char* op_name = "";

    // Records why this communicator fails, so that no peer waits for it, and throws.
    [[noreturn]] void fail(FailureKind kind, const char* text);
    [[noreturn]] void fail_interrupted();

    // Tests only: send this process a signal when it is about to post the phase.
    void inject_fault(Phase phase, int signal_number) {
        fault_phase_ = phase;
        fault_signal_ = signal_number;
    }

  private:
    void wait_long(int peer, Phase phase, uint32_t want);
    void check_peers(Phase phase, uint32_t want);

    ControlBlock* blocks_[kMaxRanks];
    Liveness& liveness_;
    const int64_t timeout_ns_;
    const int spins_;
    uint32_t epoch_;
    // The descriptors of the current call. Repeated calls have the same, which is then not written
    // and read again: lines that change cores cost more than the rest of a small call.
    Descriptor known_[kMaxRanks];
    uint32_t versions_[kMaxRanks] = {};
    int fault_phase_ = -1;
    int fault_signal_ = 0;
};

// Asks the layer above whether the waiting thread should stop (Ctrl-C).
extern bool (*interrupt_requested)();

}  // namespace coconet
