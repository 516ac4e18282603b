// Accesses of each width, and asynchronous copies to shared memory.
#include "kernels.h"

namespace coconet::native {

namespace {

template <class T>
struct Move {
    T* to;
    const T* from;
};

template <class T>
__global__ void move(const __grid_constant__ Move<T> p) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    store_peer(p.to + i, load_peer(p.from + i));
}

template <class T>
void check_width() {
    Memory<unsigned char> from(96 * sizeof(T)), to(97 * sizeof(T));
    for (int64_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7 + 3);
    run(move<T>, blocks_of(3, 32),
        {reinterpret_cast<T*>(to.data()), reinterpret_cast<const T*>(from.data())});
    for (int64_t i = 0; i < to.size(); ++i)
        expect(to[i] == (i < from.size() ? from[i] : 0), "a byte is wrong");
}

struct Pair {
    float a, b;
};

struct Pipeline {
    const float* from;
    float* to;
    int stages;
};

// Four stages in flight, one barrier for each.
__global__ void pipeline(const __grid_constant__ Pipeline p) {
    constexpr int kDepth = 4;
    COCONET_DYNAMIC_SHARED(float, ring);
    const int t = static_cast<int>(threadIdx.x), width = static_cast<int>(blockDim.x) * 4;
    const auto fetch = [&](int stage) {
        if (stage < p.stages)
            cp_async16(ring + stage % kDepth * width + 4 * t, p.from + stage * width + 4 * t);
        cp_async_commit();
    };
    for (int stage = 0; stage < kDepth - 1; ++stage) fetch(stage);
    for (int stage = 0; stage < p.stages; ++stage) {
        cp_async_wait<kDepth - 2>();
        __syncthreads();
        fetch(stage + kDepth - 1);
        for (int i = t; i < width; i += static_cast<int>(blockDim.x))
            p.to[stage * width + i] = ring[stage % kDepth * width + width - 1 - i];
    }
}

}  // namespace

CASE(accesses_of_each_width) {
    check_width<uint8_t>();
    check_width<uint16_t>();
    check_width<float>();
    check_width<double>();
    check_width<Pair>();
    check_width<uint4>();
}

CASE(pipeline_of_copies) {
    const int stages = 11, threads = 64, width = threads * 4;
    Memory<float> from(stages * width), to(stages * width);
    for (int i = 0; i < stages * width; ++i) from[i] = static_cast<float>(i);
    run(pipeline, blocks_of(1, threads, 4 * width * sizeof(float)),
        {from.data(), to.data(), stages});
    std::vector<float> wanted;
    for (int i = 0; i < stages * width; ++i)
        wanted.push_back(static_cast<float>(i / width * width + width - 1 - i % width));
    expect_equal(to, wanted, "the pipeline");
}

}  // namespace coconet::native
