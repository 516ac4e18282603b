// What the emulator tells ThreadSanitizer and AddressSanitizer, if the program runs under one.
//
// Every CUDA thread is a "fiber" to ThreadSanitizer, with a history of its own. Switching between
// fibers orders nothing; acquire and release of a token do; they stand in barriers and at the begin
// and the end of a launch alone. So an access that a kernel doesn't order shows as a data race.
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
[[gnu::weak]] void AnnotateIgnoreWritesBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreWritesEnd(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreSyncBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreSyncEnd(const char* file, int line);
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

// Within its life, locks give ThreadSanitizer no order, and malloc and free are no accesses: memory
// comes to a launch as if it were new. No switch of fibers meanwhile.
class Unseen {
  public:
    Unseen() {
        if (!AnnotateIgnoreWritesBegin) return;
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
        AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    }
    ~Unseen() {
        if (!AnnotateIgnoreWritesBegin) return;
        AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    }
    Unseen(const Unseen&) = delete;
    Unseen& operator=(const Unseen&) = delete;
};

}  // namespace coconet::emulator
