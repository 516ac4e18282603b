#include "emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "common/errors.h"
#include "emulator/sanitizers.h"

#if !defined(COCONET_UCONTEXT)
// Saves the callee-saved registers on the stack and the stack pointer in *save, then goes on where
// `to` was saved.
extern "C" void coconet_emulator_switch(void** save, void* to);
asm(R"(
    .text
    .hidden coconet_emulator_switch
    .globl coconet_emulator_switch
    .type coconet_emulator_switch, @function
coconet_emulator_switch:
    subq $48, %rsp
    movq %rbx, 0(%rsp)
    movq %rbp, 8(%rsp)
    movq %r12, 16(%rsp)
    movq %r13, 24(%rsp)
    movq %r14, 32(%rsp)
    movq %r15, 40(%rsp)
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    movq 0(%rsp), %rbx
    movq 8(%rsp), %rbp
    movq 16(%rsp), %r12
    movq 24(%rsp), %r13
    movq 32(%rsp), %r14
    movq 40(%rsp), %r15
    addq $48, %rsp
    ret
    .size coconet_emulator_switch, . - coconet_emulator_switch
)");
#endif

namespace coconet::emulator {

namespace {

constexpr size_t kStackBytes = 256 << 10;  // address space; memory only as far as touched
constexpr unsigned kNoSync = 1;            // __tsan_switch_to_fiber_no_sync

__thread Fiber* entering = nullptr;

size_t page_bytes() {
    static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

void* map_stack() {
    const size_t bytes = page_bytes() + kStackBytes;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED && mprotect(p, page_bytes(), PROT_NONE) == 0) return p;
    if (p != MAP_FAILED) munmap(p, bytes);
    // Each takes two of vm.max_map_count.
    throw Error(ErrorKind::communicator,
                "emulator: no memory for the stacks of so many CUDA threads; use fewer threads");
}

}  // namespace

Fiber::Fiber() {
    if (__tsan_get_current_fiber) tsan_ = __tsan_get_current_fiber();
}

Fiber::Fiber(void (*run)()) : run_(run), mapping_(map_stack()) {
    char* const bottom = static_cast<char*>(mapping_) + page_bytes();
    stack_ = bottom;
    stack_bytes_ = kStackBytes;
#if !defined(COCONET_UCONTEXT)
    // As switch left it: six registers and where to return to. After the return the stack pointer
    // is 8 below a multiple of 16, as at the entry of any function.
    auto* top = reinterpret_cast<void**>(bottom + kStackBytes);
    top[-2] = reinterpret_cast<void*>(&Fiber::begin);
    stack_pointer_ = top - 8;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = bottom;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, &Fiber::begin, 0);
#endif
    if (__tsan_create_fiber) tsan_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
    if (mapping_) munmap(mapping_, page_bytes() + kStackBytes);
}

void Fiber::begin() {
    Fiber* const self = entering;
    self->arrived();
    self->run_();
    __builtin_trap();
}

void Fiber::arrived() {
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(asan_fake_stack_, &came_from_->stack_,
                                        &came_from_->stack_bytes_);
}

void Fiber::switch_to(Fiber& to) {
    to.came_from_ = this;
    entering = &to;
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(&asan_fake_stack_, to.stack_, to.stack_bytes_);
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.tsan_, kNoSync);
#if !defined(COCONET_UCONTEXT)
    coconet_emulator_switch(&stack_pointer_, to.stack_pointer_);
#else
    swapcontext(&context_, &to.context_);
#endif
    arrived();
}

}  // namespace coconet::emulator
