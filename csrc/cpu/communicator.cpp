#include "cpu/communicator.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <utility>

#include "cpu/system.h"

namespace coconet {

namespace {

std::atomic<int> fork_generation{0};

void count_fork() { fork_generation.fetch_add(1, std::memory_order_relaxed); }

std::string format_bytes(int64_t bytes) {
    char text[64];
    snprintf(text, sizeof text, "%.1f MiB", bytes / 1048576.0);
    return text;
}

}  // namespace

Communicator::Communicator(const CommunicatorOptions& options, Rendezvous::Result peers)
    : rank(options.rank),
      world(static_cast<int>(peers.segments.size())),
      check_(options.check),
      oversubscribed_(options.oversubscribed),
      tuning_(coconet::tuning(world, false, oversubscribed_)),
      fork_generation_(fork_generation.load()) {
    static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
    (void)registered;
    heap_ = std::make_shared<Heap>(std::move(peers.segments[rank]), options.heap_bytes);
    segments_.resize(world);
    for (int r = 0; r < world; ++r) {
        segments_[r] = r == rank ? &heap_->segment() : peers.segments[r].get();
        if (r != rank) peers_.push_back(std::move(peers.segments[r]));
    }
    std::vector<ControlBlock*> blocks;
    for (int r = 0; r < world; ++r) blocks.push_back(control(r));
    for (Signal& s : blocks[rank]->signals) s.value.store(options.first_epoch);
    liveness_ = std::make_unique<Liveness>(rank, blocks, std::move(peers.pidfds));
    channel_ =
        std::make_unique<Channel>(rank, world, blocks.data(), *liveness_, options.timeout_seconds,
                                  options.first_epoch, tuning_.spins);
}

Communicator::~Communicator() { close(); }

ControlBlock* Communicator::control(int r) const {
    return reinterpret_cast<ControlBlock*>(segments_[r]->data());
}

bool Communicator::forked() const { return fork_generation.load() != fork_generation_; }

void Communicator::check_usable(OpCode op) const {
    if (forked())
        throw Error(ErrorKind::communicator,
                    std::string(op_name(op)) +
                        ": this communicator belongs to the parent of this forked process; "
                        "create one of its own here");
    if (closed())
        throw Error(cause_kind_, std::string(op_name(op)) +
                                     ": the communicator is closed; first cause: " + cause_);
}

void Communicator::shut(ErrorKind kind, const std::string& cause) {
    if (closed()) return;
    cause_ = cause;
    cause_kind_ = kind == ErrorKind::interrupted ? ErrorKind::communicator : kind;
    closed_.store(true, std::memory_order_release);
    if (forked()) {
        // The parent's threads and flags are not this process's to touch.
        (void)liveness_.release();
        return;
    }
    control(rank)->closed.store(1, std::memory_order_release);
    liveness_.reset();
    peers_.clear();
}

void Communicator::abandon(const char* cause) {
    const std::string text = std::string(channel_->op_name) + " on rank " + std::to_string(rank) +
                             " failed inside the call: " + cause;
    try {
        channel_->fail(FailureKind::peer_lost, text.c_str());
    } catch (const Error&) {
        shut(ErrorKind::communicator, text);
    }
}

void Communicator::close() {
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    // In a forked child another thread of the parent may have held the lock for ever.
    if (!forked()) lock.lock();
    shut(ErrorKind::communicator, "close() was called on rank " + std::to_string(rank));
}

void Communicator::enter(const Descriptor& mine, bool allocates) {
    if (allocates) {
        channel_->settle();
        heap_->publish_freed(&control(rank)->freed[channel_->next_epoch() & 1]);
    }
    channel_->enter(mine);

    std::string problem;
    const Descriptor* all[kMaxRanks];
    for (int r = 0; r < world; ++r) {
        all[r] = &channel_->descriptor(r);
        if (all[r]->op == OpCode::rejected)
            problem += (problem.empty() ? "" : "; ") + std::string("rank ") + std::to_string(r) +
                       " was given bad arguments: " + all[r]->text;
    }
    if (!problem.empty())
        problem = std::string(channel_->op_name) + ": " + problem;
    else if (check_)
        problem = disagreement(all, world);
    if (problem.empty()) return;
    channel_->leave();
    throw Error(ErrorKind::mismatch, problem);
}

void Communicator::attach(const void* data, int64_t bytes) {
    channel_->settle();
    memcpy(attachment(rank, channel_->next_epoch()), data, bytes);
}

bool Communicator::all_ranks(const std::function<bool(const Descriptor&)>& predicate) const {
    for (int r = 0; r < world; ++r)
        if (!predicate(channel_->descriptor(r))) return false;
    return true;
}

std::optional<Heap::Block> Communicator::allocate(int64_t bytes) {
    const FreedBlocks* freed[kMaxRanks];
    for (int r = 0; r < world; ++r) freed[r] = &control(r)->freed[(channel_->next_epoch() - 1) & 1];
    heap_->reclaim(freed, world);
    return heap_->allocate(bytes);
}

void Communicator::barrier() {
    call(OpCode::barrier, [&] {
        enter(DescriptorBuilder(OpCode::barrier).d);
        channel_->leave();
    });
}

Heap::Block Communicator::empty(int64_t bytes) {
    return call(OpCode::empty, [&] {
        const int64_t high_water = heap_->high_water();
        enter(DescriptorBuilder(OpCode::empty).add(bytes).d, true);
        const auto block = allocate(bytes);
        channel_->leave();
        if (!block && heap_->full_of_blocks())
            throw Error(ErrorKind::heap_exhausted, "empty: the symmetric heap has " +
                                                       std::to_string(kMaxBlocks) +
                                                       " live tensors, the most that it can hold");
        if (!block)
            throw Error(ErrorKind::heap_exhausted,
                        "empty: " + format_bytes(bytes) + " don't fit into the symmetric heap: " +
                            format_bytes(heap_->allocated()) + " of " +
                            format_bytes(heap_->capacity()) +
                            " are in use; raise heap_bytes of the Communicator");
        if (block->offset + block->bytes <= high_water) return *block;

        // Fresh pages: take them now, and let all ranks know whether they could be had.
        const bool mine = heap_->segment().touch(kHeapOffset + block->offset, block->bytes);
        DescriptorBuilder touched(OpCode::touch);
        touched.d.operands[0] = mine;
        enter(touched.d);
        const bool everywhere = all_ranks([](const Descriptor& d) { return d.operands[0] != 0; });
        channel_->leave();
        if (everywhere) return *block;
        heap_->release(block->slot);
        throw Error(ErrorKind::heap_exhausted, "empty: the system has no memory left for " +
                                                   format_bytes(bytes) +
                                                   " of shared memory on each rank");
    });
}

void Communicator::reject(OpCode op, const std::string& text) {
    call(op, [&] {
        DescriptorBuilder rejected(OpCode::rejected);
        snprintf(rejected.d.text, sizeof rejected.d.text, "%s", text.c_str());
        channel_->post(rejected.d);
        channel_->leave();
    });
}

template <class F>
void Communicator::round_trips(int rounds, F&& f) {
    const int neighbour = rank ^ 1;
    if (neighbour >= world) return channel_->skip_chunks(rounds);
    // They take turns; the reduce phase is theirs, and equal on all ranks afterwards.
    int64_t start = now_ns();
    for (int i = 1; i <= rounds; ++i) {
        const uint32_t want = channel_->chunk + i;
        if (rank < neighbour) channel_->signal(kReduce, want);
        channel_->wait(neighbour, kReduce, want);
        if (rank > neighbour) channel_->signal(kReduce, want);
        const int64_t now = now_ns();
        f(now - start);
        start = now;
    }
    channel_->skip_chunks(rounds);
}

double Communicator::ping(int rounds) {
    return call(OpCode::ping, [&] {
        enter(DescriptorBuilder(OpCode::ping).d);
        int64_t total = 0;
        round_trips(rounds, [&](int64_t ns) { total += ns; });
        channel_->leave();
        return rounds > 0 ? static_cast<double>(total) / rounds : 0.0;
    });
}

void Communicator::probe(int64_t bytes) {
    constexpr int64_t kLarge = 512 << 10;
    constexpr uint32_t kEvery = 256;
    constexpr int kRounds = 16;
    constexpr int64_t kNearNs = 250;
    if (bytes < kLarge || oversubscribed_ || world == 1 || large_calls_++ % kEvery != 0) return;
    int64_t shortest = INT64_MAX;
    round_trips(kRounds, [&](int64_t ns) { shortest = min64(shortest, ns); });
    tuning_ = coconet::tuning(world, shortest < kNearNs, false);
}

}  // namespace coconet
