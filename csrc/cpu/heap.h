// Blocks of the symmetric heap.
//
// Every rank runs the same allocations and releases in the same order, so a block has the same
// offset and slot number on all of them. Ranks drop their tensors at different times: a rank marks
// the block as freed, and the block is reused only after a collective call in which all ranks had
// marked it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/free_list.h"
#include "common/layout.h"
#include "cpu/segment.h"

namespace coconet {

class Heap {
  public:
    struct Block {
        int slot;
        int64_t offset;  // from the start of the heap
        int64_t bytes;
    };

    Heap(std::shared_ptr<Segment> segment, int64_t capacity);

    char* data() const { return segment_->data() + kHeapOffset; }
    int64_t capacity() const { return capacity_; }
    int64_t allocated() const { return allocated_; }
    Segment& segment() const { return *segment_; }
    // Offset of [p, p + bytes), or kPrivate when it isn't in the heap.
    int64_t offset_of(const void* p, int64_t bytes) const;

    // The same on every rank.
    std::optional<Block> allocate(int64_t bytes);
    void release(int slot);
    // Releases what every rank has marked; freed has one record per rank.
    void reclaim(const FreedBlocks* const* freed, int world);
    // No further block, however small, can be had.
    bool full_of_blocks() const { return unused_slots_.empty() && blocks_.size() == kMaxBlocks; }
    // End of the part of the heap that was ever in use.
    int64_t high_water() const { return high_water_; }

    // This rank's own; may be called from any thread. What the thread did with the block is done
    // before a peer gets it: mark_freed releases, publish_freed acquires.
    void mark_freed(int slot);
    void publish_freed(FreedBlocks* out) const;

  private:
    int words() const { return static_cast<int>(ceil_div(blocks_.size(), 64)); }

    std::shared_ptr<Segment> segment_;
    int64_t capacity_;
    std::atomic<int64_t> allocated_{0};  // any thread may ask
    int64_t high_water_ = 0;
    FreeList free_;
    std::vector<Block> blocks_;  // by slot; bytes == 0: unused slot
    std::vector<int> unused_slots_;
    std::unique_ptr<std::atomic<uint64_t>[]> freed_;
};

}  // namespace coconet
