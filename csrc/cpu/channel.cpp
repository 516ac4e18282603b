#include "cpu/channel.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "common/errors.h"
#include "cpu/liveness.h"
#include "cpu/system.h"

namespace coconet {

bool (*interrupt_requested)() = nullptr;

namespace {

constexpr int64_t kYieldNs = 200'000;        // then sleep
constexpr int64_t kNapNs = 50'000'000;       // how often a sleeper looks after its peers
constexpr int64_t kLongNapNs = 10 * kNapNs;  // longer than a busy system delays a sleeper

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Non-temporal stores are not ordered by a release store.
void flush_streaming_stores() {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

// Not FUTEX_PRIVATE: the word is shared between processes.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
    const timespec nap{0, kNapNs};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &nap, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A descriptor is filled up to here.
size_t used_bytes(const Descriptor& d) {
    return d.op == OpCode::rejected ? sizeof(Descriptor)
                                    : offsetof(Descriptor, fields) + d.num_fields * sizeof(int64_t);
}

ErrorKind error_kind(FailureKind kind) {
    switch (kind) {
        case FailureKind::peer_lost:
            return ErrorKind::peer_lost;
        case FailureKind::timeout:
            return ErrorKind::timeout;
        default:
            return ErrorKind::communicator;
    }
}

}  // namespace

Channel::Channel(int rank, int world, ControlBlock* const* blocks, Liveness& liveness,
                 double timeout_seconds, uint32_t first_epoch, int spins)
    : rank(rank),
      world(world),
      chunk(first_epoch),
      liveness_(liveness),
      timeout_ns_(static_cast<int64_t>(timeout_seconds * 1e9)),
      spins_(spins),
      epoch_(first_epoch) {
    for (int r = 0; r < world; ++r) blocks_[r] = blocks[r];
}

void Channel::signal(Phase phase, uint32_t value) {
    if (phase == fault_phase_) raise(fault_signal_);
    perturb();
    Signal& s = blocks_[rank]->signals[phase];
    flush_streaming_stores();
    // seq_cst on both: either this rank sees the sleeper, or the sleeper sees the new value.
    s.value.store(value, std::memory_order_seq_cst);
    if (s.waiters.load(std::memory_order_seq_cst) != 0) futex_wake(s.value);
}

void Channel::post(const Descriptor& mine) {
    settle();
    ++epoch_;
    uint32_t& version = versions_[rank];
    const size_t used = used_bytes(mine);
    if (version == 0 || memcmp(&mine, &known_[rank], used) != 0) {
        memcpy(&known_[rank], &mine, used);
        memcpy(&blocks_[rank]->descriptors[++version & 1], &mine, used);
    }
    blocks_[rank]->signals[kEnter].versions[epoch_ & 1].store(version, std::memory_order_relaxed);
    signal(kEnter, epoch_);
}

void Channel::enter(const Descriptor& mine) {
    post(mine);
    for (int peer = 0; peer < world; ++peer) {
        if (peer == rank) continue;
        wait(peer, kEnter, epoch_);
        const uint32_t version =
            blocks_[peer]->signals[kEnter].versions[epoch_ & 1].load(std::memory_order_relaxed);
        if (version == versions_[peer]) continue;
        versions_[peer] = version;
        const Descriptor& published = blocks_[peer]->descriptors[version & 1];
        memcpy(&known_[peer], &published, used_bytes(published));
    }
    // A peer may have entered and given up since.
    for (int peer = 0; peer < world; ++peer)
        if (peer != rank && blocks_[peer]->failure.set.load(std::memory_order_relaxed))
            check_peers(kEnter, epoch_);
}

void Channel::wait_long(int peer, Phase phase, uint32_t want) {
    Signal& s = blocks_[peer]->signals[phase];
    const auto arrived = [&] { return reached(s.value.load(std::memory_order_acquire), want); };
    for (int i = 0; i < spins_; ++i) {
        pause();
        if (arrived()) return;
    }
    const int64_t start = now_ns();
    while (now_ns() < start + kYieldNs) {
        sched_yield();
        if (arrived()) return;
    }
    int64_t waited = 0, looked = start;
    while (true) {
        s.waiters.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = s.value.load(std::memory_order_seq_cst);
        if (!reached(seen, want)) futex_wait(s.value, seen);
        s.waiters.fetch_sub(1, std::memory_order_relaxed);
        if (arrived()) return;
        if (interrupt_requested && interrupt_requested()) fail_interrupted();
        check_peers(phase, want);
        if (arrived()) return;
        // A process that was stopped (Ctrl-Z) has not waited: perhaps its peers were stopped too.
        const int64_t now = now_ns();
        waited += min64(now - looked, kLongNapNs);
        looked = now;
        if (waited > timeout_ns_) {
            char text[256];
            snprintf(text, sizeof text,
                     "%s on rank %d: waited %.1f s for rank %d in phase %s: expected %u, seen %u. "
                     "The rank is stuck or never made this call",
                     op_name, rank, timeout_ns_ * 1e-9, peer, kPhaseNames[phase], want,
                     s.value.load());
            fail(FailureKind::timeout, text);
        }
    }
}

void Channel::check_peers(Phase phase, uint32_t want) {
    char text[sizeof(Failure::text)];
    const auto pass_on_failure = [&](int peer) {
        const Failure& failure = blocks_[peer]->failure;
        if (!failure.set.load(std::memory_order_acquire)) return;
        snprintf(text, sizeof text, "%s on rank %d: rank %d reported: %.900s", op_name, rank, peer,
                 failure.text);
        fail(failure.kind, text);
    };
    for (int peer = 0; peer < world; ++peer)
        if (peer != rank) pass_on_failure(peer);
    // Every peer, not only the awaited one, which may be busy for long before it notices.
    for (int peer = 0; peer < world; ++peer) {
        if (peer == rank) continue;
        const bool closed = blocks_[peer]->closed.load(std::memory_order_acquire);
        // It may have failed since the look above; then it has said why.
        if (closed) pass_on_failure(peer);
        const char* how = closed                  ? "closed its communicator or exited"
                          : liveness_.alive(peer) ? nullptr
                                                  : "died";
        // A peer may have done its part before it went.
        const uint32_t seen = blocks_[peer]->signals[phase].value.load(std::memory_order_acquire);
        if (how == nullptr || reached(seen, want)) continue;
        snprintf(text, sizeof text,
                 "%s on rank %d: rank %d %s; it was awaited in phase %s: expected %u, seen %u",
                 op_name, rank, peer, how, kPhaseNames[phase], want, seen);
        fail(FailureKind::peer_lost, text);
    }
}

void Channel::fail(FailureKind kind, const char* text) {
    Failure& mine = blocks_[rank]->failure;
    if (!mine.set.load(std::memory_order_relaxed)) {
        mine.kind = kind;
        snprintf(mine.text, sizeof mine.text, "%s", text);
        mine.set.store(1, std::memory_order_release);
        for (Signal& s : blocks_[rank]->signals) futex_wake(s.value);
    }
    throw Error(error_kind(kind), text);
}

void Channel::fail_interrupted() {
    char text[128];
    snprintf(text, sizeof text, "%s on rank %d: interrupted while waiting for its peers", op_name,
             rank);
    try {
        fail(FailureKind::peer_lost, text);
    } catch (const Error&) {
        throw Error(ErrorKind::interrupted, text);
    }
}

}  // namespace coconet
