// Warp collectives: the lanes of a mask meet, exchange values, and go on when the last has read
// what it came for. Lanes that have ended count as arrived, as on a GPU.
//
// Checked: the caller is in its mask; all lanes give the same mask to the same primitive; a shuffle
// reads a lane that takes part. Shuffles and votes order no memory, __syncwarp does.
#pragma once

#include <cstddef>

#include "emulator/block.h"

namespace coconet::emulator {

class Warp {
  public:
    void begin(unsigned lanes);
    void ended(Block& block, unsigned lane);

    // For the current thread.
    void sync(unsigned mask, const Place& place);
    unsigned ballot(unsigned mask, bool predicate, const Place& place);
    // Replaces the value (16 bytes at most) by that of the lane `source`.
    void shuffle(unsigned mask, void* value, size_t bytes, unsigned source, const Place& place);

  private:
    struct Slot {
        alignas(16) unsigned char bytes[16];
    };
    // Lanes that meet once. From the first that arrives to the last that leaves.
    struct Meeting {
        unsigned mask = 0;
        const char* what = nullptr;
        unsigned arrived = 0;  // lanes that wait for the rest
        unsigned leaving = 0;  // lanes that have yet to read
        unsigned present = 0;  // lanes that took part
        unsigned votes = 0;
        Slot slots[kWarp];
        Token token{};
    };

    template <class Deposit>
    Meeting& meet(unsigned mask, const Place& place, Deposit&& deposit);
    Meeting& find_or_begin(unsigned mask, const Place& place);
    void complete_if_full(Block& block, Meeting& meeting);
    void left(Meeting& meeting);

    unsigned live_ = 0;
    unsigned used_ = 0;        // meetings
    Meeting meetings_[kWarp];  // a lane is in one at a time
};

}  // namespace coconet::emulator
