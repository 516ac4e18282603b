// Are the peers' processes alive? Asked through pidfds; where the system has none, every rank keeps
// a heartbeat going in its control block.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "common/layout.h"

namespace coconet {

class Liveness {
  public:
    // pidfds: one per rank (own entry ignored), taken over; empty to use heartbeats. A rank with -1
    // counts as alive: it is a thread of this process.
    Liveness(int rank, std::vector<ControlBlock*> blocks, std::vector<int> pidfds);
    ~Liveness();
    Liveness(const Liveness&) = delete;
    Liveness& operator=(const Liveness&) = delete;

    bool alive(int peer);

  private:
    void beat();

    struct Pulse {
        uint32_t count = 0;
        int64_t changed_ns = 0, looked_ns = 0;
    };
    const int rank_;
    std::vector<ControlBlock*> blocks_;
    std::vector<int> pidfds_;
    std::vector<Pulse> pulses_;
    std::thread* beating_ = nullptr;
    std::mutex mutex_;
    std::condition_variable stop_;
    bool stopping_ = false;
};

}  // namespace coconet
