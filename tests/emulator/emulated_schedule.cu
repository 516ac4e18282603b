// Schedules, what shared memory holds at first, late copies, graphs, launches from several threads.
#include <math.h>

#include <thread>

#include "emulator/emulator.h"
#include "kernels.h"

namespace coconet::native {

namespace {

struct Order {
    uint32_t* next;
    uint32_t* order;
};

__global__ void note_order(const __grid_constant__ Order p) {
    for (int i = 0; i < 4; ++i) {
        load_relaxed(p.next);
        p.order[atomicAdd(p.next, 1u)] = blockIdx.x * blockDim.x + threadIdx.x;
    }
}

std::vector<uint32_t> order() {
    Memory<uint32_t> next(1), order(4 * 128);
    run(note_order, blocks_of(2, 64), {next.data(), order.data()});
    return {order.data(), order.data() + order.size()};
}

struct Out {
    float* out;
};

__global__ void read_unwritten(const __grid_constant__ Out p) {
    COCONET_SHARED(float[2], fixed);
    COCONET_DYNAMIC_SHARED(float, dynamic);
    p.out[0] = fixed[0];
    p.out[1] = dynamic[3];
    __syncthreads();
    if (threadIdx.x == 0) fixed[0] = dynamic[3] = 1.0f;
}

__global__ void copy_too_late(const __grid_constant__ Out p) {
    COCONET_DYNAMIC_SHARED(float, shared);
    cp_async16(shared, p.out);
    cp_async_commit();
    cp_async16(shared + 4, p.out);
    cp_async_commit();
    p.out[4] = shared[0];
    cp_async_wait<1>();
    p.out[5] = shared[0];
    p.out[6] = shared[4];
    cp_async_wait<0>();
    p.out[7] = shared[4];
}

struct Add {
    uint32_t* word;
    uint32_t value;
};

__global__ void add(const __grid_constant__ Add p) { *p.word += p.value; }

struct Rank {
    uint32_t* signals;
    uint32_t rank, world;
};

// One launch for each rank.
__global__ void meet(const __grid_constant__ Rank p) {
    if (threadIdx.x == 0) store_release(p.signals + p.rank, 1);
    if (threadIdx.x < p.world)
        while (load_acquire(p.signals + threadIdx.x) == 0) pause();
    __syncthreads();
}

}  // namespace

CASE(a_seed_changes_the_schedule) {
    emulator::set_seed(0);
    const auto in_order = order();
    expect(in_order == order(), "without a seed the order changes");
    emulator::set_seed(seed);
    const auto first = order(), second = order();
    emulator::set_seed(0);
    expect(first != in_order, "a seed doesn't change the order");
    expect(first != second, "two launches with a seed have the same order");
    expect(in_order == order(), "without a seed again, the order changes");
}

CASE(shared_memory_is_poisoned) {
    Memory<float> out(2);
    for (int i = 0; i < 2; ++i) {
        run(read_unwritten, blocks_of(1, 1, 16), {out.data()});
        expect(isnan(out[0]) && isnan(out[1]), "shared memory has a value at first");
    }
}

CASE(copies_come_late) {
    Memory<float> out(8);
    out[0] = 1.0f;
    run(copy_too_late, blocks_of(1, 1, 32), {out.data()});
    expect(isnan(out[4]), "a copy was there before the wait");
    expect(out[5] == 1.0f, "the older copy isn't there after its wait");
    expect(isnan(out[6]), "the newer copy was there before its wait");
    expect(out[7] == 1.0f, "the newer copy isn't there after its wait");
}

CASE(graphs_are_replayed) {
    Memory<uint32_t> word(2);
    int key;
    const Stream stream = &key;
    Add params{word.data(), 1};
    emulator::begin_capture(stream);
    expect(capturing(stream) && !capturing(nullptr), "the wrong stream is captured");
    launch(add, blocks_of(1, 1), stream, params);
    params.value = 100;
    launch(add, blocks_of(1, 1), stream, params);
    copy_async(word.data() + 1, word.data(), sizeof(uint32_t), stream);
    zero_async(word.data(), sizeof(uint32_t), stream);
    expect_in("CUDA: ", error_of([&] { synchronize(stream); }));
    const emulator::Graph graph = emulator::end_capture(stream);
    expect(!capturing(stream), "the stream is still captured");
    expect(word[0] == 0, "a captured launch was executed");
    for (uint32_t i = 0; i < 3; ++i) {
        word[0] = i;
        graph.replay();
        expect(word[0] == 0 && word[1] == 101 + i, "a replayed graph gives something else");
        launch(add, blocks_of(1, 1), stream, params);
        expect(word[0] == 100, "a launch between replays gives something else");
    }
    expect_in("CUDA: ", error_of([&] { emulator::end_capture(stream); }));
}

CASE(launches_of_several_threads_meet) {
    for (int round = 0; round < 20; ++round) {
        const uint32_t world = 4;
        Memory<uint32_t> signals(world);
        std::vector<std::thread> threads;
        for (uint32_t rank = 0; rank < world; ++rank)
            threads.emplace_back(
                [&, rank] { run(meet, blocks_of(1, 40), {signals.data(), rank, world}); });
        for (auto& thread : threads) thread.join();
    }
}

}  // namespace coconet::native
