#include "emulator/warp.h"

#include <stdio.h>

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

}  // namespace

void Warp::begin(unsigned lanes) {
    live_ = lanes < kWarp ? (1u << lanes) - 1 : ~0u;
    for (Meeting& meeting : meetings_) meeting.arrived = meeting.leaving = 0;
}

void Warp::ended(Block& block, unsigned lane) {
    live_ &= ~(1u << lane);
    for (Meeting& meeting : meetings_)
        if (meeting.arrived) complete_if_full(block, meeting);
}

void Warp::complete_if_full(Block& block, Meeting& meeting) {
    if (meeting.arrived != (meeting.mask & live_)) return;
    for (unsigned lane = 0; lane < kWarp; ++lane)
        if ((meeting.arrived >> lane & 1) && &block.lane(lane) != current)
            block.wake(block.lane(lane));
    meeting.leaving = meeting.present = meeting.arrived;
    meeting.arrived = 0;
    block.progress();
}

template <class Deposit>
Warp::Meeting& Warp::meet(unsigned mask, const Place& place, Deposit&& deposit) {
    Block& block = current->block;
    const unsigned lane = current->lane();
    current->place = place;
    if (!(mask >> lane & 1))
        block.fail("lane " + std::to_string(lane) + " calls " + place.what + " with the mask " +
                   hex(mask) + ", which it isn't in");
    Meeting& meeting = meetings_[__builtin_ctz(mask)];
    while (meeting.leaving) block.spin(place);
    if (meeting.arrived == 0) {
        meeting.mask = mask;
        meeting.what = place.what;
        meeting.votes = 0;
    } else if (meeting.mask != mask || std::string(meeting.what) != place.what) {
        block.fail("lane " + std::to_string(lane) + " calls " + place.what + " with the mask " +
                   hex(mask) + ", but others of its warp wait in " + meeting.what +
                   " with the mask " + hex(meeting.mask));
    }
    deposit(meeting, lane);
    meeting.arrived |= 1u << lane;
    complete_if_full(block, meeting);
    if (!meeting.leaving) block.wait(place);
    return meeting;
}

void Warp::sync(unsigned mask, const Place& place) {
    Meeting& meeting =
        meet(mask, place, [](Meeting& meeting, unsigned) { release(meeting.token); });
    acquire(meeting.token);
    meeting.leaving &= ~(1u << current->lane());
}

unsigned Warp::ballot(unsigned mask, bool predicate, const Place& place) {
    Meeting& meeting = meet(mask, place, [&](Meeting& meeting, unsigned lane) {
        meeting.votes |= static_cast<unsigned>(predicate) << lane;
    });
    meeting.leaving &= ~(1u << current->lane());
    return meeting.votes;
}

void Warp::shuffle(unsigned mask, void* value, size_t bytes, unsigned source, const Place& place) {
    Meeting& meeting = meet(mask, place, [&](Meeting& meeting, unsigned lane) {
        copy(meeting.slots[lane].bytes, value, bytes);
    });
    if (!(meeting.present >> source & 1))
        current->block.fail("lane " + std::to_string(current->lane()) + " reads lane " +
                            std::to_string(source) + " in " + place.what +
                            ", which takes no part in it");
    copy(value, meeting.slots[source].bytes, bytes);
    meeting.leaving &= ~(1u << current->lane());
}

}  // namespace coconet::emulator
