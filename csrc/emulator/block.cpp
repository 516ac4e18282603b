#include "emulator/block.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <new>
#include <string>

#include "emulator/settings.h"
#include "emulator/warp.h"

namespace coconet::emulator {

__thread Thread* current = nullptr;

namespace {

constexpr std::align_val_t kSharedAlign{128};
constexpr unsigned kYields = 64;  // then sleep: the other blocks have no core of their own
constexpr long kSleepNs = 50'000;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 32);
}

}  // namespace

Thread::Thread(Block& block, unsigned number)
    : block(block), number(number), fiber(&Block::thread_main) {}

Block::Block() = default;

Block::~Block() { ::operator delete(dynamic_shared, kSharedAlign); }

void Block::run(Launch& launch, unsigned number) {
    launch_ = &launch;
    index = {number % launch.shape.blocks_x, number / launch.shape.blocks_x, 0};
    grid = {launch.shape.blocks_x, launch.shape.blocks_y, 1};
    shape = {launch.shape.threads, 1, 1};
    ++runs;
    prepare_shared();
    const unsigned n = launch.shape.threads;
    while (threads_.size() < n)
        threads_.push_back(std::make_unique<Thread>(*this, threads_.size()));
    while (warps_.size() * kWarp < n) warps_.push_back(std::make_unique<Warp>());
    for (unsigned w = 0; w * kWarp < n; ++w)
        warps_[w]->begin(n - w * kWarp < kWarp ? n - w * kWarp : kWarp);

    const uint64_t seed = settings().seed;
    random_ = seed == 0 ? 0 : mixed(mixed(seed) + launch.number * 1024ull + number) | 1;
    live_ = n;
    arrived_ = spun_ = rests_ = 0;
    any_[0] = any_[1] = false;
    progressed_ = true;
    for (unsigned i = 0; i < n; ++i) {
        threads_[i]->index = {i, 0, 0};
        threads_[i]->place = {};
        wake(*threads_[i]);
    }
    // The host's own fiber stands between: caller -> host -> threads -> host -> caller.
    acquire(launch.begin);
    release(begin_);
    current = next();
    host_.switch_to(current->fiber);
    current = nullptr;
    acquire(end_);
    release(launch.end);
}

// Each fiber is a thread of one block after the other.
void Block::thread_main() {
    for (;;) {
        Thread& self = *current;
        Block& block = self.block;
        acquire(block.begin_);
        block.launch_->call.run(block.launch_->call.kernel, block.launch_->call.params);
        release(block.end_);
        self.state = Thread::ended;
        self.copies.clear();
        self.groups = 0;
        --block.live_;
        block.progress();
        block.warp().ended(block, self.lane());
        block.release_barrier();
        if (block.live_ > 0)
            block.switch_to_next(self);
        else
            self.fiber.switch_to(block.host_);
    }
}

Thread* Block::next() {
    if (num_ready_ == 0) return nullptr;
    if (random_ != 0) {
        random_ = random_ * 6364136223846793005u + 1442695040888963407u;
        const unsigned k = (first_ready_ + (random_ >> 33) % num_ready_) % kMaxThreads;
        Thread* const chosen = ready_[k];
        ready_[k] = ready_[first_ready_];
        ready_[first_ready_] = chosen;
    }
    Thread* const thread = ready_[first_ready_];
    first_ready_ = (first_ready_ + 1) % kMaxThreads;
    --num_ready_;
    return thread;
}

void Block::switch_to_next(Thread& self) {
    Thread* const thread = next();
    if (!thread) fail("deadlock: every thread of the block waits for another one");
    if (thread == &self) return;
    current = thread;
    self.fiber.switch_to(thread->fiber);
}

void Block::wait(const Place& place) {
    Thread& self = *current;
    self.place = place;
    self.state = Thread::waiting;
    switch_to_next(self);
}

void Block::wake(Thread& thread) {
    thread.state = Thread::ready;
    ready_[(first_ready_ + num_ready_++) % kMaxThreads] = &thread;
}

bool Block::barrier(bool predicate, const Place& place) {
    const unsigned side = generation_ % 2, generation = generation_;
    any_[side] |= predicate;
    release(met_[side]);
    ++arrived_;
    release_barrier();
    if (generation_ == generation) wait(place);
    acquire(met_[side]);
    return any_[side];
}

void Block::release_barrier() {
    if (arrived_ == 0 || arrived_ < live_) return;
    for (const auto& thread : threads_)
        if (thread->state == Thread::waiting) wake(*thread);
    arrived_ = 0;
    any_[++generation_ % 2] = false;
    progress();
}

void Block::spin(const Place& place) {
    Thread& self = *current;
    self.place = place;
    if (++spun_ > num_ready_) {
        spun_ = 0;
        rest();
    }
    wake(self);
    switch_to_next(self);
}

void Block::progress() {
    spun_ = 0;
    progressed_ = true;
}

void Block::rest() {
    const int64_t now = now_ns(), timeout = settings().spin_timeout_ns;
    if (progressed_) {
        progressed_ = false;
        rests_ = 0;
        last_progress_ns_ = now;
    } else if (timeout > 0 && now - last_progress_ns_ > timeout) {
        fail("nothing has changed for " + std::to_string(timeout * 1e-9) + " s in a loop that waits");
    }
    if (++rests_ < kYields) {
        sched_yield();
    } else {
        const timespec pause{0, kSleepNs};
        nanosleep(&pause, nullptr);
    }
}

Warp& Block::warp() { return *warps_[current->number / kWarp]; }

Thread& Block::lane(unsigned lane) {
    return *threads_[current->number / kWarp * kWarp + lane];
}

void Block::prepare_shared() {
    const size_t bytes = launch_->shape.shared_bytes;
    if (bytes != shared_bytes_) {
        ::operator delete(dynamic_shared, kSharedAlign);
        dynamic_shared = bytes > 0 ? ::operator new(bytes, kSharedAlign) : nullptr;
        shared_bytes_ = bytes;
    }
    poison(dynamic_shared, bytes);
}

void poison(void* p, size_t bytes) {
    auto* const at = static_cast<volatile unsigned char*>(p);
    for (size_t i = 0; i < bytes; ++i) at[i] = 0xff;
}

void poison_once(void* p, size_t bytes, uint32_t& run) {
    if (run == current->block.runs) return;
    run = current->block.runs;
    poison(p, bytes);
}

// --- reports -------------------------------------------------------------------------------------

namespace {

std::string describe(const Place& place) {
    return place.what ? std::string(place.what) + " at " + place.file + ":" +
                            std::to_string(place.line)
                      : "not begun, or not yet waited";
}

}  // namespace

// Other blocks go on meanwhile: theirs is a snapshot.
std::string Block::describe() const {
    std::string text =
        "  block (" + std::to_string(index.x) + ", " + std::to_string(index.y) + ")\n";
    const char* const states[] = {"ready, last in ", "waits in ", "ended"};
    for (unsigned from = 0, to; from < shape.x; from = to) {
        const auto line = [&](unsigned i) {
            const Thread& thread = *threads_[i];
            return states[thread.state] +
                   (thread.state == Thread::ended ? "" : emulator::describe(thread.place));
        };
        for (to = from + 1; to < shape.x && line(to) == line(from);) ++to;
        text += "    thread" + (to - from > 1 ? "s " + std::to_string(from) + " to " +
                                                    std::to_string(to - 1)
                                              : " " + std::to_string(from));
        text += ": " + line(from) + "\n";
    }
    return text;
}

void Block::fail(const std::string& what) {
    static std::atomic<bool> failed{false};
    while (failed.exchange(true)) pause();  // another block's report comes first
    std::string text = "coconet emulator: " + what + ", found by block (" +
                       std::to_string(index.x) + ", " + std::to_string(index.y) + ") thread " +
                       std::to_string(current->number) + "\n";
    for (const auto& block : launch_->on)
        if (block) text += block.load()->describe();
    fputs(text.c_str(), stderr);
    fflush(stderr);
    abort();
}

}  // namespace coconet::emulator
