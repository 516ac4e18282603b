// Calls captured in a graph and replayed, any number of times and between eager ones.
#include "adam.h"
#include "emulator/emulator.h"

namespace coconet::native {

namespace {

// The operands of all ranks, which live on their threads no longer than a run of the world.
template <class T>
using ByRank = std::vector<std::unique_ptr<T>>;

// What body calls on every rank, as a graph for each stream.
std::vector<emulator::Graph> captured(const World& world,
                                      const std::function<void(Communicator&)>& body) {
    const int streams = world.kind == Kind::local ? 1 : world.size;
    for (int r = 0; r < streams; ++r) emulator::begin_capture(world.stream(r));
    try {
        world.run(body);
    } catch (...) {
        for (int r = 0; r < streams; ++r) emulator::end_capture(world.stream(r));
        throw;
    }
    std::vector<emulator::Graph> graphs;
    for (int r = 0; r < streams; ++r) graphs.push_back(emulator::end_capture(world.stream(r)));
    return graphs;
}

void replay(const World& world, const std::vector<emulator::Graph>& graphs) {
    if (world.kind == Kind::local) return graphs[0].replay();
    world.run([&](Communicator& comm) { graphs[comm.rank].replay(); });
}

// Other calls of every kind.
void eager(Communicator& comm, uint32_t salt) {
    const Place place = kPlaces[salt % 3];
    check_all_reduce(comm, {DType::bf16, {5001}, false, place, place, salt}, false);
    check_all_reduce(comm, {DType::f32, {100}, false, place, place, salt}, true);
    check_all_gather(comm, DType::i16, 2, 1, std::vector<int64_t>(comm.world, 3000), 1, place,
                     place, salt);
}

}  // namespace

CASE(graphs_of_all_reduce) {
    for (const Kind kind : kKinds)
        for (const int size : {1, 2, 4}) {
            const World world(kind, size, options(0u - 5));
            for (const Place place : kPlaces)
                for (const int64_t numel : {200, 6001}) {
                    ByRank<AllReduce> calls(size);
                    const Reduction r{DType::f32, {numel}, false, place, place, 1};
                    const auto graphs = captured(world, [&](Communicator& comm) {
                        auto& call = calls[comm.rank];
                        call = std::make_unique<AllReduce>(comm, r, numel < 1000);
                        call->call(world.stream(comm.rank));
                    });
                    for (uint32_t i = 0; i < 5; ++i) {
                        world.run([&](Communicator& comm) {
                            if (i % 2 == 1) eager(comm, i);
                            calls[comm.rank]->fill(i);
                        });
                        replay(world, graphs);
                        world.run([&](Communicator& comm) { calls[comm.rank]->check(); });
                    }
                }
        }
}

CASE(graphs_of_rs_adam_ag) {
    for (const Kind kind : kKinds)
        for (const Place place : kPlaces) {
            constexpr int kWorld = 3;
            const World world(kind, kWorld);
            ByRank<AdamCheck> adams(kWorld), others(kWorld);
            world.run([&](Communicator& comm) {
                const std::vector<int64_t> numels = {1, 1023, 0, 2000};
                adams[comm.rank] = std::make_unique<AdamCheck>(comm, DType::bf16, numels, place, 1);
                others[comm.rank] = std::make_unique<AdamCheck>(comm, DType::f32, numels, place, 2);
                adams[comm.rank]->step(Absent::some, 1);
                // What the replays find: the same gradients are absent.
                adams[comm.rank]->fill(Absent::some, 4);
                others[comm.rank]->fill(Absent::none, 2);
            });
            // Two of one list in a graph, and another in between.
            const auto graphs = captured(world, [&](Communicator& comm) {
                const Stream stream = world.stream(comm.rank);
                adams[comm.rank]->call(stream);
                others[comm.rank]->call(stream);
            });
            for (uint32_t i = 0; i < 6; ++i) {
                world.run([&](Communicator& comm) {
                    if (i % 3 == 1) {
                        adams[comm.rank]->step(Absent::some_everywhere, i);
                        eager(comm, i);
                    }
                    adams[comm.rank]->fill(Absent::some, 4 * i);
                });
                replay(world, graphs);
                world.run([&](Communicator& comm) {
                    adams[comm.rank]->check();
                    others[comm.rank]->check();
                });
            }
        }
}

CASE(graphs_of_many_calls) {
    for (const Kind kind : kKinds) {
        const World world(kind, 2);
        constexpr int kCalls = 7;
        std::vector<ByRank<AllReduce>> calls(kCalls);
        for (auto& by_rank : calls) by_rank.resize(2);
        const auto graphs = captured(world, [&](Communicator& comm) {
            for (int c = 0; c < kCalls; ++c) {
                const Place place = kPlaces[c % 3];
                const Reduction r{kReduceDTypes[c % 6], {c % 2 ? 5000 : 90}, true, place, place, 1};
                calls[c][comm.rank] = std::make_unique<AllReduce>(comm, r, false);
                calls[c][comm.rank]->call(world.stream(comm.rank));
            }
        });
        for (int i = 0; i < 10; ++i) replay(world, graphs);
        world.run([&](Communicator& comm) {
            for (auto& by_rank : calls) by_rank[comm.rank]->check();
        });
    }
}

}  // namespace coconet::native
