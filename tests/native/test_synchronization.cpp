// What the transport promises beside results: who may go on when, who sees which memory.
#include <sys/resource.h>

#include <atomic>
#include <chrono>

#include "adam.h"

namespace coconet::native {

namespace {

const ControlBlock& control(const Communicator& comm, int rank) {
    return *reinterpret_cast<const ControlBlock*>(comm.heap_of(rank) - kHeapOffset);
}
uint32_t counter(const Communicator& comm, int rank, Phase phase) {
    return control(comm, rank).signals[phase].value.load();
}

// How often this thread has gone to sleep.
long sleeps() {
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

}  // namespace

CASE(barriers_order_memory) {
    constexpr int kWorld = 3;
    int numbers[kWorld] = {};
    run_ranks(kWorld, [&](Communicator& comm) {
        for (int i = 1; i <= 100; ++i) {
            numbers[comm.rank] = i;
            comm.barrier();
            for (const int number : numbers) expect(number == i, "a rank left a barrier early");
            comm.barrier();
        }
    });
}

// A counter that some call doesn't move falls behind, and counts as reached once it is 2^31 behind.
CASE(no_counter_falls_behind) {
    const Ranks ranks = local_communicators(3, options());
    run_ranks(ranks, [&](Communicator& comm) {
        const auto expect_in_step = [&](const std::string& call) {
            const Phase pairs[][2] = {{kEnter, kExit}, {kPublish, kReduce}};
            for (const auto& [one, other] : pairs)
                if (counter(comm, comm.rank, one) != counter(comm, comm.rank, other))
                    failed(call + " leaves " + kPhaseNames[one] + " and " + kPhaseNames[other] +
                           " with different counts");
            expect(counter(comm, comm.rank, kReduce) == comm.channel().chunk,
                   "a chunk isn't counted");
        };
        AdamCheck adam(ranks[comm.rank], DType::f32, {9000, 20}, Place::own, 0);
        AdamCheck other(ranks[comm.rank], DType::f32, {10 + comm.rank}, Place::own, 0);
        for (int i = 0; i < 3; ++i) {
            comm.barrier();
            expect_in_step("barrier");
            comm.ping(3);
            expect_in_step("ping");
            Tensor(comm, 4, {100}, Place::heap);
            expect_in_step("empty");
            adam.step(0, 1);
            expect_in_step("rs_adam_ag_");
            for (const int64_t numel : {100, 20'000})
                for (const Place place : kPlaces) {
                    const Reduction r{DType::f32, {numel}, false, place, 1};
                    check_all_reduce(comm, r, i % 2 == 0);
                    expect_in_step("all_reduce");
                    check_reduce_scatter(comm, r, 0, Split::chunk);
                    expect_in_step("reduce_scatter");
                    check_all_gather(comm, DType::f32, 4, 1, {numel, 0, 1}, 1, place, 2);
                    expect_in_step("all_gather");
                }
            if (comm.rank == i)
                comm.reject(OpCode::barrier, "no such argument");
            else
                raised(ErrorKind::mismatch, [&] { comm.barrier(); });
            expect_in_step("a rejected call");
            raised(ErrorKind::mismatch, [&] { other.disagree(0); });
            expect_in_step("a disagreement on parameters");
            float row = 0, output[9];
            const int64_t sizes[] = {1};
            int64_t begins[kMaxRanks + 1];
            raised(ErrorKind::mismatch, [&] {
                all_gather(
                    comm, {&row, DType::f32, 4, sizes, 1}, 0, 9, [&](int64_t) { return output; },
                    begins);
            });
            expect_in_step("a disagreement on the size");
            raised(ErrorKind::heap_exhausted, [&] { comm.empty(int64_t{1} << 40); });
            expect_in_step("empty without room");
        }
    });
}

CASE(a_ping_waits_for_the_neighbour) {
    run_ranks(2, [](Communicator& comm) {
        for (int i = 0; i < 200; ++i) {
            comm.ping(2);
            expect(reached(counter(comm, 1 - comm.rank, kReduce), comm.channel().chunk),
                   "a ping ended before the neighbour had answered");
        }
    });
}

// Calls of one rank run one after another, whichever thread makes them.
CASE(calls_from_two_threads) {
    run_ranks(2, [](Communicator& comm) {
        const auto barriers = [&comm] {
            for (int i = 0; i < 100; ++i) comm.barrier();
        };
        Threads threads;
        threads.emplace_back(barriers);
        barriers();
    });
}

// The call that runs comes to its end before the memory that it uses is dropped.
CASE(closing_waits_for_the_call_that_runs) {
    std::atomic<bool> closing{false}, arrived{false};
    run_ranks(2, [&](Communicator& comm) {
        if (comm.rank == 1) {
            while (!closing.load()) std::this_thread::yield();
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            arrived.store(true);
            comm.barrier();
            return;
        }
        std::atomic<bool> early{false};
        {
            Threads threads;
            threads.emplace_back([&] {
                while (counter(comm, 0, kEnter) == 0) std::this_thread::yield();
                closing.store(true);
                comm.close();
                early.store(!arrived.load());
            });
            comm.barrier();
        }
        expect(!early.load(), "a communicator was closed while a call ran");
        expect_in("close() was called", raised(ErrorKind::communicator, [&] { comm.barrier(); }));
    });
}

// Else it would take the core from the rank that it waits for.
CASE(a_long_wait_sleeps) {
    run_ranks(2, [](Communicator& comm) {
        comm.barrier();
        if (comm.rank == 0) std::this_thread::sleep_for(std::chrono::seconds(1));
        const long before = sleeps();
        comm.barrier();
        expect(comm.rank == 0 || sleeps() - before > 3, "a rank that waits long should sleep");
    });
}

}  // namespace coconet::native
