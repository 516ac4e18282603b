// What the channel promises beside results: who may go on when, and counters that keep in step.
#include "adam.h"

namespace coconet::native {

namespace {

// Every block's counters: those that its peers have sent, and its own.
void expect_in_step(const World& world, const std::string& call) {
    for (int r = 0; r < world.size; ++r) {
        const auto& pad = *static_cast<const cuda::ControlPad*>(world.buffer(r));
        for (int b = 0; b < options().blocks; ++b)
            for (int peer = 0; peer < world.size; ++peer) {
                if (peer == r) continue;
                const auto& signals = pad.blocks[b].signals;
                const auto& [calls, chunks] = pad.progress[b];
                const uint32_t expected[kNumPhases] = {calls, chunks, chunks, calls};
                for (int phase = 0; phase < kNumPhases; ++phase)
                    if (signals[phase][peer] != expected[phase])
                        failed(call + " leaves block " + std::to_string(b) + " of rank " +
                               std::to_string(peer) + " at " +
                               std::to_string(signals[phase][peer]) + " in phase " +
                               kPhaseNames[phase] + ", not at " + std::to_string(expected[phase]));
            }
    }
}

}  // namespace

CASE(barriers_order_memory) {
    constexpr int kWorld = 3;
    for (const Kind kind : kKinds) {
        int numbers[kWorld] = {};
        World(kind, kWorld).run([&](Communicator& comm) {
            for (int i = 1; i <= 20; ++i) {
                numbers[comm.rank] = i;
                comm.barrier(nullptr);
                for (const int number : numbers) expect(number == i, "a rank left a barrier early");
                comm.barrier(nullptr);
            }
        });
    }
}

// A counter that some call doesn't move falls behind, and counts as reached once it is 2^31 behind.
CASE(no_counter_falls_behind) {
    const World world(Kind::peer, 3);
    const auto call = [&](const std::string& name, const std::function<void(Communicator&)>& body) {
        world.run(body);
        expect_in_step(world, name);
    };
    for (int i = 0; i < 2; ++i) {
        call("barrier", [](Communicator& comm) { comm.barrier(nullptr); });
        for (const Place place : kPlaces) {
            for (const int64_t numel : {100, 9000}) {
                const Reduction r{DType::f32, {numel}, false, place, place, 1};
                call("all_reduce", [&](Communicator& comm) { check_all_reduce(comm, r, true); });
                call("reduce_scatter",
                     [&](Communicator& comm) { check_reduce_scatter(comm, r, 0, Split::chunk); });
                call("all_gather", [&](Communicator& comm) {
                    check_all_gather(comm, DType::f32, 4, 1, {numel, 0, 1}, 1, place, place, 2);
                });
            }
            call("rs_adam_ag_", [&](Communicator& comm) {
                AdamCheck(comm, DType::f32, {9000, 20}, place, 0).step(Absent::none, 1);
            });
        }
    }
}

// Nor one in which the ranks disagree.
CASE(disagreements_are_counted) {
    const auto call = [](const std::string& name, const std::function<void(Communicator&)>& body) {
        const World world(Kind::peer, 3);
        world.run(body);
        expect_in_step(world, "a disagreement on " + name);
    };
    call("shapes", [](Communicator& comm) {
        const Tensor x(comm, 4, {5 + comm.rank}, Place::own, Shift::none);
        comm.all_reduce(x.operand(DType::f32), x.data(), false, true, nullptr);
    });
    call("rows", [](Communicator& comm) {
        const int64_t rows = 1 + comm.rank;
        const Tensor shard(comm, 4, {rows, 4}, Place::own, Shift::none);
        const Tensor y(comm, 4, {9, 4}, Place::own, Shift::none);
        comm.all_gather(shard.operand(DType::f32), y.data(), 0, -1, rows * comm.world, nullptr);
    });
    call("parameters", [](Communicator& comm) {
        AdamCheck adam(comm, DType::f32, {10, 10 + comm.rank / 2}, Place::own, 0);
        adam.fill(Absent::none, 1);
        adam.call(nullptr);
    });
}

}  // namespace coconet::native
