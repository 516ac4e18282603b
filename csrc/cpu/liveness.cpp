#include "cpu/liveness.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "cpu/system.h"

namespace coconet {

namespace {

constexpr auto kBeat = std::chrono::milliseconds(100);
constexpr int64_t kLostNs = 3'000'000'000;  // a loaded machine may delay a beat
constexpr int64_t kAwayNs = 500'000'000;

}  // namespace

Liveness::Liveness(int rank, std::vector<ControlBlock*> blocks, std::vector<int> pidfds)
    : rank_(rank), blocks_(std::move(blocks)), pidfds_(std::move(pidfds)), pulses_(blocks_.size()) {
    if (!pidfds_.empty()) return;
    // Python's signals belong to its own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    beating_ = new std::thread([this] { beat(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Liveness::~Liveness() {
    if (beating_) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        stop_.notify_all();
        beating_->join();
        delete beating_;
    }
    for (int fd : pidfds_)
        if (fd >= 0) close(fd);
}

void Liveness::beat() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_.wait_for(lock, kBeat, [this] { return stopping_; }))
        blocks_[rank_]->heartbeat.fetch_add(1, std::memory_order_relaxed);
}

bool Liveness::alive(int peer) {
    if (!pidfds_.empty()) {
        // A pidfd becomes readable when its process ends.
        pollfd p{pidfds_[peer], POLLIN, 0};
        return poll(&p, 1, 0) <= 0;
    }
    Pulse& pulse = pulses_[peer];
    const uint32_t count = blocks_[peer]->heartbeat.load(std::memory_order_relaxed);
    const int64_t now = now_ns();
    // The peer has 3 s from when this rank looks: both may have been stopped before (Ctrl-Z).
    if (count != pulse.count || now - pulse.looked_ns > kAwayNs) pulse.changed_ns = now;
    pulse.count = count;
    pulse.looked_ns = now;
    return now - pulse.changed_ns < kLostNs;
}

}  // namespace coconet
