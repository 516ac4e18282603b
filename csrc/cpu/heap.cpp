#include "cpu/heap.h"

#include <utility>

namespace coconet {

Heap::Heap(std::shared_ptr<Segment> segment, int64_t capacity)
    : segment_(std::move(segment)),
      capacity_(capacity),
      free_(capacity),
      freed_(new std::atomic<uint64_t>[kMaxBlocks / 64]()) {}

int64_t Heap::offset_of(const void* p, int64_t bytes) const {
    // As numbers: pointers into different objects have no difference.
    const auto offset =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(data()));
    return offset >= 0 && offset + bytes <= capacity_ ? offset : kPrivate;
}

std::optional<Heap::Block> Heap::allocate(int64_t bytes) {
    const int64_t size = round_up(max64(bytes, 1), kHeapAlign);
    if (full_of_blocks()) return std::nullopt;
    const std::optional<int64_t> offset = free_.take(size);
    if (!offset) return std::nullopt;
    int slot = static_cast<int>(blocks_.size());
    if (unused_slots_.empty()) {
        blocks_.emplace_back();
    } else {
        slot = unused_slots_.back();
        unused_slots_.pop_back();
    }
    blocks_[slot] = {slot, *offset, size};
    allocated_ += size;
    high_water_ = max64(high_water_, *offset + size);
    return blocks_[slot];
}

void Heap::release(int slot) {
    const Block block = std::exchange(blocks_[slot], Block{slot, 0, 0});
    unused_slots_.push_back(slot);
    allocated_ -= block.bytes;
    freed_[slot / 64].fetch_and(~(uint64_t{1} << slot % 64), std::memory_order_relaxed);
    free_.give_back(block.offset, block.bytes);
}

void Heap::mark_freed(int slot) {
    freed_[slot / 64].fetch_or(uint64_t{1} << slot % 64, std::memory_order_release);
}

void Heap::publish_freed(FreedBlocks* out) const {
    for (int w = 0; w < words(); ++w) out->bits[w] = freed_[w].load(std::memory_order_acquire);
}

void Heap::reclaim(const FreedBlocks* const* freed, int world) {
    for (int w = 0; w < words(); ++w) {
        uint64_t everywhere = ~uint64_t{0};
        for (int r = 0; r < world; ++r) everywhere &= freed[r]->bits[w];
        for (; everywhere; everywhere &= everywhere - 1)
            release(w * 64 + __builtin_ctzll(everywhere));
    }
}

}  // namespace coconet
