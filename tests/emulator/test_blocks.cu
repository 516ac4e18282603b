// Indices, barriers, shared memory, blocks that wait for each other.
#include "kernels.h"

namespace coconet::native {

namespace {

struct Out {
    uint32_t* out;
};

__global__ void indices(const __grid_constant__ Out p) {
    const uint32_t block = blockIdx.x + gridDim.x * blockIdx.y;
    p.out[block * blockDim.x + threadIdx.x] =
        threadIdx.x + 1000 * blockIdx.x + 100000 * blockIdx.y + 10000000 * gridDim.y;
}

__global__ void barriers(const __grid_constant__ Out p) {
    COCONET_SHARED(uint32_t[96], ring);
    COCONET_DYNAMIC_SHARED(uint32_t, copy);
    const uint32_t t = threadIdx.x, n = blockDim.x;
    ring[t] = t;
    for (uint32_t i = 0; i < 10; ++i) {
        __syncthreads();
        copy[t] = ring[(t + 1) % n];
        __syncthreads();
        ring[t] = copy[t];
    }
    // The last threads leave early; the others' barriers don't wait for them.
    if (t >= 70) return;
    uint32_t votes = 0;
    for (uint32_t i = 0; i < 8; ++i)
        votes = 2 * votes + (__syncthreads_or(i % 3 == 0 && t == 60 + i) != 0);
    p.out[t] = ring[t] + 1000 * votes;
}

template <int N>
COCONET_DEVICE uint32_t* buffer() {
    COCONET_SHARED(uint32_t[8], values);
    if (threadIdx.x == 0) values[0] = N + blockIdx.x;
    __syncthreads();
    return values;
}

__global__ void several_variables(const __grid_constant__ Out p) {
    const uint32_t* const a = buffer<100>();
    const uint32_t* const b = buffer<200>();
    p.out[blockIdx.x * blockDim.x + threadIdx.x] = 1000 * a[0] + b[0];
}

// Each round every block waits for all others.
struct Rounds {
    uint32_t* signals;  // by block
    uint32_t* values;   // by block
    uint32_t* sums;     // by thread
    uint32_t rounds;
};

__global__ void all_blocks_meet(const __grid_constant__ Rounds p) {
    const uint32_t blocks = gridDim.x;
    uint32_t sum = 0;
    for (uint32_t round = 0; round < p.rounds; ++round) {
        if (threadIdx.x == 0) store_peer(p.values + blockIdx.x, blockIdx.x + round);
        __syncthreads();
        if (threadIdx.x == 0) store_release(p.signals + blockIdx.x, 2 * round + 1);
        if (threadIdx.x < blocks)
            while (load_acquire(p.signals + threadIdx.x) < 2 * round + 1) pause();
        __syncthreads();
        for (uint32_t b = 0; b < blocks; ++b) sum += load_peer(p.values + b);
        __syncthreads();
        if (threadIdx.x == 0) store_release(p.signals + blockIdx.x, 2 * round + 2);
        if (threadIdx.x < blocks)
            while (load_acquire(p.signals + threadIdx.x) < 2 * round + 2) pause();
        __syncthreads();
    }
    p.sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

struct Counters {
    uint32_t* claimed;
    uint32_t* total;
    float* sum;
};

__global__ void atomics(const __grid_constant__ Counters p) {
    if (claim(p.claimed)) atomicAdd(p.total, 1000000u);
    atomicAdd(p.total, threadIdx.x);
    atomicAdd(p.sum, 0.5f);
}

struct Time {
    uint64_t* times;
};

__global__ void clocks(const __grid_constant__ Time p) {
    const uint64_t begin = nanoseconds();
    uint64_t end;
    do {
        pause();
        end = nanoseconds();
    } while (end < begin + 1'000'000);
    p.times[threadIdx.x] = end - begin;
}

struct Maths {
    float* out;
    float x;
};

__global__ void arithmetic(const __grid_constant__ Maths p) {
    p.out[0] = fma_rn(p.x, p.x, -1.0f);
    p.out[1] = sqrt_rn(p.x);
}

}  // namespace

CASE(indices_of_threads) {
    Memory<uint32_t> out(6 * 40);
    run(indices, {3, 2, 40, 0, false}, {out.data()});
    for (uint32_t i = 0; i < 240; ++i)
        expect(out[i] == i % 40 + 1000 * (i / 40 % 3) + 100000 * (i / 120) + 20000000,
               "an index is wrong");
}

CASE(more_blocks_than_are_resident) {
    Memory<uint32_t> out(300 * 64);
    run(indices, {300, 1, 64, 100 << 10, false}, {out.data()});
    for (uint32_t i = 0; i < 300 * 64; ++i)
        expect(out[i] == i % 64 + 1000 * (i / 64) + 10000000, "an index is wrong");
}

CASE(barriers_of_a_block) {
    Memory<uint32_t> out(96);
    run(barriers, blocks_of(1, 96, 96 * 4), {out.data()});
    for (uint32_t t = 0; t < 96; ++t)
        expect(out[t] == (t < 70 ? (t + 10) % 96 + 1000 * 0b10010010 : 0),
               "a value after barriers is wrong");
}

CASE(shared_variables_of_two_functions) {
    Memory<uint32_t> out(3 * 32);
    run(several_variables, blocks_of(3, 32), {out.data()});
    for (uint32_t i = 0; i < 96; ++i)
        expect(out[i] == 1000 * (100 + i / 32) + 200 + i / 32, "shared variables got mixed up");
}

CASE(blocks_wait_for_each_other) {
    for (const uint32_t blocks : {1u, 2u, 5u, 16u}) {
        const uint32_t rounds = 10, threads = 33;
        Memory<uint32_t> signals(blocks), values(blocks), sums(blocks * threads);
        run(all_blocks_meet, blocks_of(blocks, threads),
            {signals.data(), values.data(), sums.data(), rounds});
        const uint32_t wanted =
            rounds * blocks * (blocks - 1) / 2 + blocks * rounds * (rounds - 1) / 2;
        for (int64_t i = 0; i < sums.size(); ++i) expect(sums[i] == wanted, "a sum is wrong");
    }
}

CASE(atomic_additions) {
    Memory<uint32_t> claimed(1), total(1);
    Memory<float> sum(1);
    run(atomics, blocks_of(4, 64), {claimed.data(), total.data(), sum.data()});
    expect(claimed[0] == 1 && total[0] == 1000000 + 4 * 63 * 32, "a claim or a sum is wrong");
    expect(sum[0] == 128.0f, "the sum of floats is wrong");
}

CASE(clocks_run) {
    Memory<uint64_t> times(32);
    run(clocks, blocks_of(1, 32), {times.data()});
    for (int64_t i = 0; i < 32; ++i) expect(times[i] >= 1'000'000, "a wait was too short");
}

CASE(arithmetic_is_rounded_once) {
    Memory<float> out(2);
    const float x = 1.0f + 1.0f / 4096;
    run(arithmetic, blocks_of(1, 1), {out.data(), x});
    expect(out[0] == 2.0f / 4096 + 1.0f / 4096 / 4096, "fma_rn rounds more than once");
    expect(out[1] == __builtin_sqrtf(x), "sqrt_rn is wrong");
}

CASE(resident_blocks_of_a_shape) {
    const int small = resident_blocks(0, indices, 64, 0);
    expect(resident_blocks(0, indices, 1024, 0) < small, "larger blocks, but not fewer");
    expect(resident_blocks(0, indices, 64, 100 << 10) < small, "more shared memory, but not fewer");
}

CASE(launches_that_are_refused) {
    Memory<uint32_t> out(1);
    const auto refused = [&](LaunchShape shape) {
        return error_of([&] { run(indices, shape, {out.data()}); });
    };
    const std::string text = refused({1, 2, 2000, 0, false});
    expect_in("CUDA: a launch of 1 x 2 blocks of 2000 threads and 0 bytes", text);
    expect_in("failed: invalid configuration argument", text);
    expect_in("failed: invalid configuration argument", refused({0, 1, 32, 0, false}));
    expect_in("failed: invalid argument", refused({1, 1, 32, 1 << 20, false}));
    expect_in("failed: too many blocks in cooperative launch", refused({60000, 1, 32, 0, true}));
    run(indices, {1, 1, 1, 0, false}, {out.data()});  // no error stays behind
}

}  // namespace coconet::native
