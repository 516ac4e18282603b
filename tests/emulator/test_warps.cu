// Shuffles, votes, barriers of a warp.
#include "kernels.h"

namespace coconet::native {

namespace {

struct Out {
    int* out;
};

// What each lane gets: seven values.
__global__ void shuffles(const __grid_constant__ Out p) {
    const int lane = static_cast<int>(threadIdx.x), value = 100 + lane;
    int* const out = p.out + 7 * lane;
    out[0] = __shfl_sync(~0u, value, 5);
    out[1] = __shfl_sync(~0u, value, lane + 1);
    out[2] = __shfl_sync(~0u, value, 3, 8);
    out[3] = __shfl_xor_sync(~0u, value, 16);
    out[4] = __shfl_down_sync(~0u, value, 4);
    out[5] = __shfl_down_sync(~0u, value, 3, 8);
    out[6] = __shfl_up_sync(~0u, value, 2);
}

__global__ void doubles(const __grid_constant__ Out p) {
    double x = 1 << threadIdx.x % 31;
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    p.out[threadIdx.x] = x == 2147483648.0;
}

__global__ void votes(const __grid_constant__ Out p) {
    const unsigned lane = threadIdx.x;
    int* const out = p.out + 6 * lane;
    out[0] = static_cast<int>(__ballot_sync(~0u, lane % 3 == 0));
    out[1] = __any_sync(~0u, lane == 7);
    out[2] = __any_sync(~0u, lane == 32);
    out[3] = __all_sync(~0u, lane < 32);
    out[4] = __all_sync(~0u, lane != 7);
    // Halves vote on their own, the upper one more often.
    const unsigned mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    for (unsigned i = 0; i < lane / 16; ++i) __ballot_sync(mask, 1);
    out[5] = static_cast<int>(__ballot_sync(mask, lane % 2));
}

// Masks with the same lowest lane, one after the other, while slow lanes still read.
__global__ void nested_masks(const __grid_constant__ Out p) {
    const int lane = static_cast<int>(threadIdx.x);
    int sum = 0;
    for (int i = 0; i < 20; ++i) {
        sum += __shfl_sync(~0u, lane + i, i % 32);
        if (lane < 16) sum += __shfl_sync(0xffffu, lane * i, i % 16);
    }
    p.out[lane] = sum;
}

// Half of the lanes end while the others wait for them.
__global__ void ended_lanes(const __grid_constant__ Out p) {
    if (threadIdx.x % 2) {
        pause();
        return;
    }
    p.out[threadIdx.x] = static_cast<int>(__ballot_sync(~0u, 1));
}

__global__ void warp_barrier(const __grid_constant__ Out p) {
    COCONET_SHARED(int[64], values);
    const unsigned warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    int sum = 0;
    for (unsigned i = 1; i < 32; ++i) {
        values[threadIdx.x] = static_cast<int>(threadIdx.x * i);
        __syncwarp();
        sum += values[warp + (lane + i) % 32];
        __syncwarp();
    }
    p.out[threadIdx.x] = sum;
}

}  // namespace

CASE(shuffles_of_a_warp) {
    Memory<int> out(7 * 32);
    run(shuffles, blocks_of(1, 32), {out.data()});
    std::vector<int> wanted;
    for (int lane = 0; lane < 32; ++lane) {
        for (const int from :
             {5, (lane + 1) % 32, lane / 8 * 8 + 3, lane ^ 16, lane + 4 < 32 ? lane + 4 : lane,
              lane % 8 + 3 < 8 ? lane + 3 : lane, lane < 2 ? lane : lane - 2})
            wanted.push_back(100 + from);
    }
    expect_equal(out, wanted, "shuffles");
}

CASE(shuffles_of_wide_types) {
    Memory<int> out(32);
    run(doubles, blocks_of(1, 32), {out.data()});
    expect_equal(out, std::vector<int>(32, 1), "sum of doubles");
}

CASE(votes_of_a_warp) {
    Memory<int> out(6 * 32);
    run(votes, blocks_of(1, 32), {out.data()});
    std::vector<int> wanted;
    for (int lane = 0; lane < 32; ++lane)
        for (const int64_t value :
             {0x49249249ll, 1ll, 0ll, 1ll, 0ll, lane < 16 ? 0xaaaall : 0xaaaa0000ll})
            wanted.push_back(static_cast<int>(value));
    expect_equal(out, wanted, "votes");
}

CASE(masks_with_the_same_lowest_lane) {
    Memory<int> out(32);
    run(nested_masks, blocks_of(1, 32), {out.data()});
    std::vector<int> wanted(32);
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 20; ++i) wanted[lane] += i + i + (lane < 16 ? i % 16 * i : 0);
    expect_equal(out, wanted, "shuffles");
}

CASE(lanes_that_have_ended) {
    Memory<int> out(64);
    run(ended_lanes, blocks_of(1, 64), {out.data()});
    for (int i = 0; i < 64; ++i)
        expect(out[i] == (i % 2 ? 0 : 0x55555555), "a vote of half of the lanes");
}

CASE(barriers_of_warps) {
    Memory<int> out(64);
    run(warp_barrier, blocks_of(1, 64), {out.data()});
    std::vector<int> wanted(64);
    for (int t = 0; t < 64; ++t)
        for (int i = 1; i < 32; ++i) wanted[t] += (t / 32 * 32 + (t % 32 + i) % 32) * i;
    expect_equal(out, wanted, "sums");
}

}  // namespace coconet::native
