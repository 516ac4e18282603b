// RS-Adam-AG: dtypes, places, missing gradients, tables of entries.
#include "adam.h"

namespace coconet::native {

namespace {

void expect_equal(const std::vector<uint64_t>& checksums) {
    for (const uint64_t checksum : checksums)
        expect(checksum == checksums[0], "the ranks' weights differ");
}

// The weights' checksum after some steps; equal on all ranks.
uint64_t train(const World& world, DType dtype, const std::vector<int64_t>& numels, Place place,
               uint32_t salt, int hyper) {
    std::vector<uint64_t> checksums(world.size);
    world.run([&](Communicator& comm) {
        AdamCheck adam(comm, dtype, numels, place, salt, hyper);
        adam.step(Absent::none, salt);
        adam.step(Absent::some, salt + 1);
        adam.step(Absent::some_everywhere, salt + 2);
        checksums[comm.rank] = adam.checksum();
    });
    expect_equal(checksums);
    return checksums[0];
}

const std::vector<int64_t> kNumels = {1, 1023, 0, 63, 700};

}  // namespace

CASE(rs_adam_ag) {
    for (const Kind kind : kKinds)
        for (const int size : world_sizes()) {
            const World world(kind, size);
            for (const DType dtype : kAdamDTypes) {
                if (size > 4 && dtype != kAdamDTypes[size % 3]) continue;
                for (const Place place : kPlaces) train(world, dtype, kNumels, place, size, 0);
            }
        }
}

CASE(rs_adam_ag_variants) {
    const World world(Kind::local, 2);
    for (const DType dtype : kAdamDTypes)
        for (int hyper = 0; hyper < kNumHypers; ++hyper)
            train(world, dtype, kNumels, kPlaces[hyper % 3], 9, hyper);
}

CASE(rs_adam_ag_of_many_chunks) {
    for (const Kind kind : kKinds) {
        const World world(kind, 3, options(0u - 9));
        for (const DType dtype : {DType::f32, DType::bf16}) {
            const std::vector<int64_t> numels = {9'000, 7, 12'000};
            const uint64_t sum = train(world, dtype, numels, Place::heap, 2, 0);
            for (const Place place : {Place::own, Place::mixed})
                expect(train(world, dtype, numels, place, 2, 0) == sum,
                       "another result in another place");
        }
    }
}

CASE(rs_adam_ag_of_many_tensors) {
    std::vector<int64_t> numels;
    for (int t = 0; t < 150; ++t) numels.push_back(t % 7 == 0 ? 0 : t % 31);
    for (const Kind kind : kKinds) {
        const World world(kind, 2);
        for (const Place place : kPlaces) train(world, DType::bf16, numels, place, 1, 1);
    }
}

CASE(rs_adam_ag_without_tensors) {
    for_each_world({1, 2}, [](Communicator& comm) {
        for (const std::vector<int64_t>& numels : {std::vector<int64_t>{}, {0, 0}})
            for (int step = 0; step < 3; ++step)
                AdamCheck(comm, DType::f32, numels, Place::heap, 0).step(Absent::none, 0);
    });
}

CASE(steps_are_set) {
    for_each_world({2}, [](Communicator& comm) {
        AdamCheck adam(comm, DType::f32, {100, 3}, Place::heap, 0);
        adam.list().set_steps({5, int64_t{1} << 40}, nullptr);
        adam.fill(Absent::none, 1);
        adam.call(nullptr);
        expect(adam.list().steps(nullptr) == std::vector<int64_t>{6, (int64_t{1} << 40) + 1},
               "the steps that were set should have been counted on");
    });
}

}  // namespace coconet::native
