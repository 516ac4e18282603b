// Which parts of a heap are free: first fit, neighbours merged. Host code; not for several threads.
#pragma once

#include <iterator>
#include <map>
#include <optional>

#include "common/base.h"

namespace coconet {

class FreeList {
  public:
    explicit FreeList(int64_t capacity) { free_[0] = capacity; }

    // The offset of that many bytes; nothing when there is no room.
    std::optional<int64_t> take(int64_t bytes) {
        for (auto it = free_.begin(); it != free_.end(); ++it) {
            const auto [offset, room] = *it;
            if (room < bytes) continue;
            free_.erase(it);
            if (room > bytes) free_[offset + bytes] = room - bytes;
            return offset;
        }
        return std::nullopt;
    }
    void give_back(int64_t offset, int64_t bytes) {
        auto it = free_.emplace(offset, bytes).first;
        const auto next = std::next(it);
        if (next != free_.end() && it->first + it->second == next->first) {
            it->second += next->second;
            free_.erase(next);
        }
        if (it == free_.begin()) return;
        const auto previous = std::prev(it);
        if (previous->first + previous->second == it->first) {
            previous->second += it->second;
            free_.erase(it);
        }
    }

  private:
    std::map<int64_t, int64_t> free_;  // offset -> bytes
};

}  // namespace coconet
