// The communicator of ranks on one host: who the peers are, the symmetric heap, and the frame in
// which every collective call runs.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/descriptor.h"
#include "common/errors.h"
#include "cpu/channel.h"
#include "cpu/heap.h"
#include "cpu/liveness.h"
#include "cpu/rendezvous.h"
#include "cpu/tuning.h"

namespace coconet {

struct CommunicatorOptions {
    int rank;
    int64_t heap_bytes;
    double timeout_seconds;
    bool check = true;            // compare what the ranks call
    uint32_t first_epoch = 0;     // where the counters start
    bool oversubscribed = false;  // there are more ranks than cores
};

class Communicator {
  public:
    Communicator(const CommunicatorOptions& options, Rendezvous::Result peers);
    ~Communicator();
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    const int rank, world;

    // Runs one collective call: body does its work through channel(). Only one call at a time. A
    // failure closes the communicator; later calls repeat its cause.
    template <class F>
    auto call(OpCode op, F&& body) {
        std::lock_guard<std::mutex> lock(mutex_);
        check_usable(op);
        channel_->op_name = op_name(op);
        try {
            return body();
        } catch (const Error& error) {
            if (error.kind != ErrorKind::mismatch && error.kind != ErrorKind::heap_exhausted)
                shut(error.kind, error.what());
            throw;
        } catch (const std::exception& error) {
            // Such as no memory for an output. The peers must not wait for this rank.
            abandon(error.what());
            throw;
        }
    }

    // Inside call().
    Channel& channel() { return *channel_; }
    // Publishes what this rank calls and learns what the others call; throws on every rank when
    // they disagree or one of them was given bad arguments. allocates: the call may allocate.
    void enter(const Descriptor& mine, bool allocates = false);
    // After enter(), in a call that moves this much on every rank: finds out every now and then
    // whether the ranks' cores share a cache, since the host may move them.
    void probe(int64_t bytes);
    // Before enter(): data that peers may read until they enter the next call.
    void attach(const void* data, int64_t bytes);
    const char* attachment_of(int peer) const {
        return attachment(peer, channel_->next_epoch() - 1);
    }
    // After enter(mine, true): a block of the heap with the same offset on every rank; nothing when
    // the heap has no room.
    std::optional<Heap::Block> allocate(int64_t bytes);
    bool all_ranks(const std::function<bool(const Descriptor&)>& predicate) const;
    char* heap_of(int peer) const { return segments_[peer]->data() + kHeapOffset; }
    char* stage_of(int peer) const { return segments_[peer]->data() + kStageOffset; }

    // Collective calls of its own.
    void barrier();
    Heap::Block empty(int64_t bytes);
    // This rank's arguments are bad: tells the peers, who raise it, and returns at once.
    void reject(OpCode op, const std::string& text);
    // Nanoseconds per flag round trip with the neighbour (ranks 0 and 1, 2 and 3, ...), on average;
    // 0 where there is none.
    double ping(int rounds);

    const Tuning& tuning() const { return tuning_; }
    const std::shared_ptr<Heap>& heap() const { return heap_; }
    bool closed() const { return closed_.load(std::memory_order_acquire); }  // from any thread
    // Drops the peers' memory and tells them. Tensors in the own heap stay valid.
    void close();
    void inject_fault(Phase phase, int signal) { channel_->inject_fault(phase, signal); }

  private:
    void check_usable(OpCode op) const;
    // Round trips with the neighbour, handed to f one by one.
    template <class F>
    void round_trips(int rounds, F&& f);
    void shut(ErrorKind kind, const std::string& cause);
    void abandon(const char* cause);
    bool forked() const;
    ControlBlock* control(int r) const;
    char* attachment(int r, uint32_t epoch) const {
        return segments_[r]->data() + kAttachmentOffset + (epoch & 1) * kAttachmentBytes;
    }

    const bool check_;
    const bool oversubscribed_;
    Tuning tuning_;
    uint32_t large_calls_ = 0;
    const int fork_generation_;
    std::shared_ptr<Heap> heap_;
    std::vector<Segment*> segments_;               // by rank; the own one belongs to the heap
    std::vector<std::shared_ptr<Segment>> peers_;  // the others
    std::unique_ptr<Liveness> liveness_;
    std::unique_ptr<Channel> channel_;
    std::mutex mutex_;
    std::atomic<bool> closed_{false};
    std::string cause_;
    ErrorKind cause_kind_ = ErrorKind::communicator;
};

}  // namespace coconet
