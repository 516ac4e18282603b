// What the emulator tells ThreadSanitizer and AddressSanitizer, if the program runs under one.
//
// Every CUDA thread is a "fiber" to ThreadSanitizer, with a history of its own. Switching between
// fibers orders nothing; acquire and release of a token do, and stand in barriers and at the begin
// and the end of a launch only. So an access that a kernel doesn't order shows as a data race.
//
// The emulator's own .cpp files must not be instrumented for ThreadSanitizer
// (-fno-sanitize=thread): what they share between fibers is ordered by the schedule, which
// ThreadSanitizer is not to see. Hence weak symbols, not macros of the compiler.
#pragma once

#include <cstddef>

extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* token);
[[gnu::weak]] void __tsan_release(void* token);
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** save, const void* stack, size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* saved, const void** stack, size_t* bytes);
}

namespace coconet::emulator {

using Token = char;  // its address is what counts

inline void acquire(Token& token) {
    if (__tsan_acquire) __tsan_acquire(&token);
}
inline void release(Token& token) {
    if (__tsan_release) __tsan_release(&token);
}

}  // namespace coconet::emulator
