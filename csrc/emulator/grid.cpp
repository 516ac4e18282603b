#include "emulator/grid.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "emulator/block.h"
#include "emulator/settings.h"

namespace coconet::emulator {

__thread Thread* current = nullptr;

namespace {

constexpr unsigned kSpins = 16;   // of each ready thread, on average, until it looks hopeless
constexpr unsigned kYields = 64;  // then sleep: what we wait for may need this core
constexpr long kSleepNs = 50'000;
constexpr unsigned kPerturbOneIn = 8;
const char* const kDeadlock = "deadlock: every thread that hasn't ended waits for another one";

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

// A state for random() that is far from that of the next seed or launch.
uint64_t first_random() {
    static std::atomic<uint64_t> launches{0};
    const uint64_t seed = settings().seed, launch = launches++;
    if (seed == 0) return 0;
    uint64_t x = seed * 0x9e3779b97f4a7c15u + launch;
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9u;
    return (x ^ (x >> 29)) | 1;
}

}  // namespace

Grid::Grid(const cuda::KernelCall& call, const cuda::LaunchShape& shape)
    : call(call), shape(shape), random_(first_random()) {}

Grid::~Grid() {
    for (Block* const block : blocks_) Block::put(block);
}

void Grid::run(unsigned resident) {
    const unsigned blocks = shape.blocks_x * shape.blocks_y;
    ready_.resize(static_cast<size_t>(resident) * shape.threads);
    release(begin);
    unsigned begun = 0;
    for (; begun < resident; ++begun) {
        blocks_.push_back(Block::take());
        blocks_.back()->begin(*this, begun);
    }
    for (unsigned ended = 0; ended < blocks; ++ended) {
        current = next();
        if (!current) fail(kDeadlock);
        host_.switch_to(current->fiber);  // until a block has ended
        ended_block_->end();
        if (begun < blocks) ended_block_->begin(*this, begun++);
    }
    current = nullptr;
    acquire(end);
}

uint64_t Grid::random() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return random_ >> 33;
}

Thread* Grid::next() {
    if (num_ready_ == 0) return nullptr;
    const auto size = static_cast<unsigned>(ready_.size());
    if (random_ != 0)
        std::swap(ready_[first_ready_], ready_[(first_ready_ + random() % num_ready_) % size]);
    Thread* const thread = ready_[first_ready_];
    first_ready_ = (first_ready_ + 1) % size;
    --num_ready_;
    return thread;
}

void Grid::switch_to_next() {
    Thread* const self = current;
    Thread* const thread = next();
    if (!thread) fail(kDeadlock);
    if (thread == self) return;
    current = thread;
    self->fiber.switch_to(thread->fiber);
}

void Grid::leave(bool block_ended) {
    if (!block_ended) return switch_to_next();
    ended_block_ = &current->block;
    current->fiber.switch_to(host_);
}

void Grid::wait(const Place& place) {
    current->place = place;
    current->state = Thread::waiting;
    switch_to_next();
}

void Grid::wake(Thread& thread) {
    thread.state = Thread::ready;
    ready_[(first_ready_ + num_ready_++) % ready_.size()] = &thread;
}

void Grid::progress() {
    spun_ = 0;
    progressed_ = true;
}

void Grid::spin(const Place& place) {
    if (place.what) current->place = place;
    if (++spun_ > kSpins * (num_ready_ + 1)) {
        spun_ = 0;
        rest();
    }
    wake(*current);
    switch_to_next();
}

void Grid::perturb() {
    if (random_ == 0 || random() % kPerturbOneIn != 0) return;
    wake(*current);
    switch_to_next();
}

// Nothing here makes progress: another launch or the host may need the core.
void Grid::rest() {
    const int64_t now = now_ns(), timeout = settings().spin_timeout_ns;
    if (progressed_) {
        progressed_ = false;
        rests_ = 0;
        last_progress_ns_ = now;
    } else if (timeout > 0 && now - last_progress_ns_ > timeout) {
        fail("spin timeout: nothing was stored to a signal for " +
             std::to_string(timeout / 1'000'000) + " ms, and every ready thread waits in a loop");
    }
    if (++rests_ < kYields) {
        sched_yield();
    } else {
        const timespec pause{0, kSleepNs};
        nanosleep(&pause, nullptr);
    }
}

void Grid::fail(const std::string& what) {
    static std::atomic<bool> failed{false};
    while (failed.exchange(true)) pause();  // another launch's report comes first
    std::string text = "coconet emulator: " + what + "\n";
    for (const Block* const block : blocks_) text += block->describe();
    fputs(text.c_str(), stderr);
    fflush(stderr);
    abort();
}

}  // namespace coconet::emulator
