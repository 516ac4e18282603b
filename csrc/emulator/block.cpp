#include "emulator/block.h"

#include <mutex>
#include <new>

#include "emulator/warp.h"

namespace coconet::emulator {

Thread::Thread(Block& block, unsigned number)
    : block(block), number(number), fiber(&Block::thread_main) {}

Block::Block() = default;
Block::~Block() = default;

// --- the pool ------------------------------------------------------------------------------------

namespace {

std::mutex pool_mutex;
Block* pool = nullptr;  // a list

}  // namespace

Block* Block::take() {
    const Unseen unseen;
    const std::lock_guard<std::mutex> lock(pool_mutex);
    Block* const block = pool ? pool : new Block;
    pool = block->next_in_pool_;
    block->next_in_pool_ = nullptr;
    return block;
}

void Block::put(Block* block) {
    const Unseen unseen;
    const std::lock_guard<std::mutex> lock(pool_mutex);
    block->next_in_pool_ = pool;
    pool = block;
}

// --- begin and end -------------------------------------------------------------------------------

void Block::begin(Grid& of, unsigned number) {
    const auto& launched = of.shape;
    grid = &of;
    index = {number % launched.blocks_x, number / launched.blocks_x, 0};
    grid_shape = {launched.blocks_x, launched.blocks_y, 1};
    shape = {launched.threads, 1, 1};
    const Unseen unseen;
    while (threads_.size() < shape.x)
        threads_.push_back(std::make_unique<Thread>(*this, threads_.size()));
    while (warps_.size() * kWarp < shape.x) warps_.push_back(std::make_unique<Warp>());
    for (unsigned first = 0; first < shape.x; first += kWarp)
        warps_[first / kWarp]->begin(shape.x - first);
    live_ = shape.x;
    arrived_ = 0;
    any_[0] = any_[1] = false;
    dynamic_shared = new_shared(nullptr, launched.shared_bytes, 128);
    for (unsigned i = 0; i < shape.x; ++i) {
        threads_[i]->index = {i, 0, 0};
        threads_[i]->place = {};
        threads_[i]->copies.clear();
        threads_[i]->groups = 0;
        of.wake(*threads_[i]);
    }
}

void Block::end() {
    const Unseen unseen;
    for (const Shared& shared : shared_)
        ::operator delete(shared.memory, std::align_val_t{shared.align});
    shared_.clear();
}

// A fiber is a thread of one launch after the other.
void Block::thread_main() {
    Thread& self = *current;
    Block& block = self.block;
    for (;;) {
        Grid& grid = *block.grid;
        acquire(grid.begin);
        grid.call.run(grid.call.kernel, grid.call.params);
        release(grid.end);
        self.state = Thread::ended;
        --block.live_;
        grid.progress();
        block.warp().ended(block, self.lane());
        block.release_barrier();
        grid.leave(block.live_ == 0);
    }
}

// --- barrier -------------------------------------------------------------------------------------

bool Block::barrier(bool predicate, const Place& place) {
    const unsigned generation = generation_, side = generation % 2;
    any_[side] |= predicate;
    release(met_[side]);
    ++arrived_;
    release_barrier();
    if (generation_ == generation) grid->wait(place);
    acquire(met_[side]);
    return any_[side];
}

void Block::release_barrier() {
    if (arrived_ == 0 || arrived_ < live_) return;
    for (unsigned i = 0; i < shape.x; ++i)
        if (threads_[i]->state == Thread::waiting) grid->wake(*threads_[i]);
    arrived_ = 0;
    any_[++generation_ % 2] = false;
    grid->progress();
}

// --- shared memory -------------------------------------------------------------------------------

// Filled with bytes that are NaN as floats and large or negative as integers. Not by memset, which
// ThreadSanitizer would take for an access of the kernel.
void* Block::new_shared(const void* key, size_t bytes, size_t align) {
    if (bytes == 0) return nullptr;
    void* const p = ::operator new(bytes, std::align_val_t{align});
    for (size_t i = 0; i < bytes; ++i) static_cast<volatile unsigned char*>(p)[i] = 0xff;
    shared_.push_back({key, p, align});
    return p;
}

void* Block::shared_variable(const void* key, size_t bytes, size_t align) {
    const Unseen unseen;
    for (const Shared& shared : shared_)
        if (shared.key == key) return shared.memory;
    return new_shared(key, bytes, align);
}

// --- the current thread --------------------------------------------------------------------------

Warp& Block::warp() { return *warps_[current->number / kWarp]; }

Thread& Block::lane(unsigned lane) { return *threads_[current->number / kWarp * kWarp + lane]; }

// --- reports -------------------------------------------------------------------------------------

namespace {

std::string describe_thread(const Thread& thread) {
    if (thread.state == Thread::ended) return "ended";
    if (!thread.place.what) return "not yet waited";
    return std::string(thread.state == Thread::waiting ? "waits in " : "ready, last in ") +
           thread.place.what + " at " + thread.place.file + ":" + std::to_string(thread.place.line);
}

}  // namespace

std::string Block::describe() const {
    std::string text = "  block (" + std::to_string(index.x) + ", " + std::to_string(index.y) + ")";
    if (current && &current->block == this)
        text += ", reported by its thread " + std::to_string(current->number);
    text += "\n";
    for (unsigned first = 0, end; first < shape.x; first = end) {
        const std::string line = describe_thread(*threads_[first]);
        for (end = first + 1; end < shape.x && describe_thread(*threads_[end]) == line;) ++end;
        text += end - first == 1
                    ? "    thread " + std::to_string(first)
                    : "    threads " + std::to_string(first) + " to " + std::to_string(end - 1);
        text += ": " + line + "\n";
    }
    return text;
}

}  // namespace coconet::emulator
