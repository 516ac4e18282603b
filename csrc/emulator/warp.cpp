#include "emulator/warp.h"

#include <stdio.h>
#include <string.h>

#include <string>

namespace coconet::emulator {

namespace {

std::string hex(unsigned mask) {
    char text[16];
    snprintf(text, sizeof text, "0x%08x", mask);
    return text;
}

// Not memcpy, which ThreadSanitizer would take for accesses of the kernel.
void copy(void* to, const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i)
        static_cast<volatile unsigned char*>(to)[i] =
            static_cast<const volatile unsigned char*>(from)[i];
}

template <class F>
void for_bits(unsigned bits, F&& f) {
    for (; bits != 0; bits &= bits - 1) f(static_cast<unsigned>(__builtin_ctz(bits)));
}

}  // namespace

void Warp::begin(unsigned lanes) {
    live_ = lanes < kWarp ? (1u << lanes) - 1 : ~0u;
    used_ = 0;
}

void Warp::ended(Block& block, unsigned lane) {
    live_ &= ~(1u << lane);
    for_bits(used_, [&](unsigned i) {
        if (!meetings_[i].leaving) complete_if_full(block, meetings_[i]);
    });
}

void Warp::complete_if_full(Block& block, Meeting& meeting) {
    if (meeting.arrived != (meeting.mask & live_)) return;
    for_bits(meeting.arrived, [&](unsigned lane) {
        if (&block.lane(lane) != current) block.grid->wake(block.lane(lane));
    });
    meeting.leaving = meeting.present = meeting.arrived;
    meeting.arrived = 0;
    block.grid->progress();
}

// The one that waits for this lane; a new one if there is none.
Warp::Meeting& Warp::find_or_begin(unsigned mask, const Place& place) {
    Grid& grid = *current->block.grid;
    const unsigned lane = current->lane();
    const auto call = [&] {
        return "lane " + std::to_string(lane) + " calls " + place.what + " with the mask " +
               hex(mask);
    };
    if (!(mask >> lane & 1)) grid.fail(call() + ", which it isn't in");
    Meeting* found = nullptr;
    for_bits(used_, [&](unsigned i) {
        Meeting& other = meetings_[i];
        // Lanes that wait for this one, and it for them, must mean the same.
        if (!(other.mask >> lane & 1) || !(other.arrived & mask)) return;
        if (other.mask != mask || (other.what != place.what && strcmp(other.what, place.what) != 0))
            grid.fail(call() + ", but lanes that it names wait in " + other.what +
                      " with the mask " + hex(other.mask));
        found = &other;
    });
    if (found) return *found;
    const auto free = static_cast<unsigned>(__builtin_ctz(~used_));
    used_ |= 1u << free;
    Meeting& meeting = meetings_[free];
    meeting.mask = mask;
    meeting.what = place.what;
    meeting.arrived = meeting.leaving = meeting.votes = 0;
    return meeting;
}

template <class Deposit>
Warp::Meeting& Warp::meet(unsigned mask, const Place& place, Deposit&& deposit) {
    Block& block = current->block;
    const unsigned lane = current->lane();
    Meeting& meeting = find_or_begin(mask, place);
    deposit(meeting, lane);
    meeting.arrived |= 1u << lane;
    complete_if_full(block, meeting);
    if (!meeting.leaving) block.grid->wait(place);
    return meeting;
}

void Warp::left(Meeting& meeting) {
    meeting.leaving &= ~(1u << current->lane());
    if (!meeting.leaving) used_ &= ~(1u << (&meeting - meetings_));
}

void Warp::sync(unsigned mask, const Place& place) {
    Meeting& meeting =
        meet(mask, place, [](Meeting& meeting, unsigned) { release(meeting.token); });
    acquire(meeting.token);
    left(meeting);
}

unsigned Warp::ballot(unsigned mask, bool predicate, const Place& place) {
    Meeting& meeting = meet(mask, place, [&](Meeting& meeting, unsigned lane) {
        meeting.votes |= static_cast<unsigned>(predicate) << lane;
    });
    const unsigned votes = meeting.votes;
    left(meeting);
    return votes;
}

void Warp::shuffle(unsigned mask, void* value, size_t bytes, unsigned source, const Place& place) {
    Meeting& meeting = meet(mask, place, [&](Meeting& meeting, unsigned lane) {
        copy(meeting.slots[lane].bytes, value, bytes);
    });
    if (!(meeting.present >> source & 1))
        current->block.grid->fail("lane " + std::to_string(current->lane()) + " reads lane " +
                                  std::to_string(source) + " in " + place.what +
                                  ", which takes no part in it");
    copy(value, meeting.slots[source].bytes, bytes);
    left(meeting);
}

}  // namespace coconet::emulator
