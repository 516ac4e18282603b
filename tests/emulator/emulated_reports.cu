// What the emulator says when a kernel hangs or breaks a rule.
#include <string.h>

#include "emulated_child.h"
#include "emulator/emulator.h"
#include "kernels.h"

namespace coconet::native {

namespace {

struct Word {
    uint32_t* word;
};

constexpr int kBarrierLine = __LINE__ + 2;
__global__ void some_threads_at_barrier(const __grid_constant__ Word p) {
    if (threadIdx.x < 5) __syncthreads();
    if (threadIdx.x == 7) __syncwarp(0x88);
    if (threadIdx.x == 31 && blockIdx.y == 0) *p.word = 1;
}

// The other block ends last.
__global__ void one_block_hangs(const __grid_constant__ Word p) {
    if (blockIdx.x == 1)
        for (int i = 0; i < 10; ++i) load_relaxed(p.word);
    else if (threadIdx.x > 0)
        __syncthreads();
    else
        __syncwarp(3);
}

__global__ void wait_for_nothing(const __grid_constant__ Word p) {
    if (threadIdx.x == 3)
        while (load_acquire(p.word) == 0) pause();
    __syncthreads();
}

__global__ void other_masks(const __grid_constant__ Word p) {
    *p.word = __ballot_sync(threadIdx.x == 31 ? 0x80000001u | 2 : ~0u, 1);
}

__global__ void not_in_mask(const __grid_constant__ Word p) { *p.word = __ballot_sync(0xffffu, 1); }

__global__ void other_collective(const __grid_constant__ Word p) {
    if (threadIdx.x == 0)
        *p.word = __shfl_sync(~0u, 1u, 0);
    else
        *p.word = __ballot_sync(~0u, 1);
}

__global__ void shuffle_from_outside(const __grid_constant__ Word p) {
    if (threadIdx.x < 16) *p.word = __shfl_sync(0xffffu, 1u, 20);
}

__global__ void misaligned(const __grid_constant__ Word p) {
    store_peer(reinterpret_cast<uint4*>(p.word + 1), uint4{});
}

__attribute__((noinline)) uint32_t deep(const volatile uint32_t* p, uint32_t depth) {
    volatile char frame[1000] = {};
    frame[depth % 1000] = 1;
    return depth == 0 ? *p : deep(p, depth - 1) + static_cast<uint32_t>(frame[5]);
}

__global__ void endless_recursion(const __grid_constant__ Word p) { *p.word = deep(p.word, ~0u); }

}  // namespace

CASE(report_of_a_deadlock) {
    Memory<uint32_t> word(1);
    const std::string text =
        last_words([&] { run(some_threads_at_barrier, {1, 2, 32, 0, true}, {word.data()}); });
    const std::string line = std::to_string(kBarrierLine);
    expect_in("deadlock", text);
    expect_in("block (0, 0)", text);
    expect_in("block (0, 1)", text);
    expect_in("threads 0 to 4: waits in __syncthreads at emulated_reports.cu:" + line, text);
    expect_in("threads 5 to 6: ended", text);
    expect_in("thread 7: waits in __syncwarp at emulated_reports.cu:", text);
}

CASE(report_of_a_deadlock_in_one_block) {
    Memory<uint32_t> word(1);
    const std::string text =
        last_words([&] { run(one_block_hangs, blocks_of(2, 32), {word.data()}); });
    expect_in("thread 0: waits in __syncwarp at emulated_reports.cu:", text);
    expect_in("threads 1 to 31: waits in __syncthreads", text);
    expect_in("block (1, 0)\n    threads 0 to 31: ended", text);
}

CASE(report_of_a_spin_timeout) {
    Memory<uint32_t> word(1);
    const std::string text = last_words([&] {
        emulator::set_spin_timeout(0.2);
        run(wait_for_nothing, blocks_of(2, 32), {word.data()});
    });
    expect_in("spin timeout: nothing was stored to a signal for 200 ms", text);
    expect_in("block (1, 0)", text);
    expect_in("threads 4 to 31: waits in __syncthreads at emulated_reports.cu:", text);
    expect_in("thread 3: ready, last in load_acquire at emulated_reports.cu:", text);
}

CASE(report_of_masks_that_differ) {
    Memory<uint32_t> word(1);
    const std::string text = last_words([&] { run(other_masks, blocks_of(1, 32), {word.data()}); });
    expect_in("0x80000003", text);
    expect_in("0xffffffff", text);
}

CASE(report_of_a_lane_outside_its_mask) {
    Memory<uint32_t> word(1);
    expect_in("lane 16 calls __ballot_sync with the mask 0x0000ffff, which it isn't in",
              last_words([&] { run(not_in_mask, blocks_of(1, 32), {word.data()}); }));
}

CASE(report_of_different_collectives) {
    Memory<uint32_t> word(1);
    const std::string text =
        last_words([&] { run(other_collective, blocks_of(1, 32), {word.data()}); });
    expect_in("lanes that it names wait in __shfl_sync", text);
}

CASE(report_of_a_shuffle_from_outside) {
    Memory<uint32_t> word(1);
    expect_in("reads lane 20 in __shfl_sync, which takes no part in it",
              last_words([&] { run(shuffle_from_outside, blocks_of(1, 32), {word.data()}); }));
}

CASE(report_of_a_misaligned_access) {
    Memory<uint32_t> word(8);
    expect_in("store_peer of 16 bytes at the address",
              last_words([&] { run(misaligned, blocks_of(1, 1), {word.data()}); }));
}

CASE(stack_overflow_hits_a_guard_page) {
    Memory<uint32_t> word(1);
    last_words([&] { run(endless_recursion, blocks_of(1, 32), {word.data()}); });
}

}  // namespace coconet::native
