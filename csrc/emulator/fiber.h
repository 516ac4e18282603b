// A fiber: a stack, and where on it to go on. Switching saves the registers that a called function
// must keep and takes up those of the other fiber (a few nanoseconds; ucontext where there is no
// assembly for the machine). Below each stack lies a page that can't be touched: an overflow faults
// instead of writing into another fiber's stack.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(COCONET_UCONTEXT)
#define COCONET_UCONTEXT
#endif
#if defined(COCONET_UCONTEXT)
#include <ucontext.h>
#endif

namespace coconet::emulator {

class Fiber {
  public:
    // The calling OS thread as it is.
    Fiber();
    // With a stack of its own. The first switch to it calls run, which must never return.
    explicit Fiber(void (*run)());
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // Called on this fiber; returns when some fiber switches back to it.
    void switch_to(Fiber& to);

  private:
    static void begin();
    void arrived();

    void (*const run_)() = nullptr;
    void* mapping_ = nullptr;  // guard page and stack
#if !defined(COCONET_UCONTEXT)
    void* stack_pointer_ = nullptr;
#else
    ucontext_t context_;
#endif
    Fiber* came_from_ = nullptr;
    // For the sanitizers.
    void* tsan_ = nullptr;
    void* asan_fake_stack_ = nullptr;
    const void* stack_ = nullptr;
    size_t stack_bytes_ = 0;
};

}  // namespace coconet::emulator
