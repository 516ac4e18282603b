// RS-Adam-AG: dtypes, places, missing gradients, tables of entries.
#include "adam.h"

namespace coconet::native {

namespace {

void expect_equal(const std::vector<uint64_t>& checksums) {
    for (const uint64_t checksum : checksums)
        expect(checksum == checksums[0], "the ranks' weights differ");
}

}  // namespace

CASE(rs_adam_ag) {
    for (const int world : {1, 2, 3, 4, 5, 8}) {
        const Ranks ranks = local_communicators(world, options());
        for (const DType dtype : kAdamDTypes)
            for (const Place place : kPlaces) {
                std::vector<uint64_t> checksums(world);
                run_ranks(ranks, [&](Communicator& comm) {
                    AdamCheck adam(ranks[comm.rank], dtype, {1, 1023, 0, 63, 2000}, place, 1);
                    adam.step(0, 1);
                    adam.step(0b1101 << world, 2);  // tensor 1: some ranks have no gradient
                    adam.step((uint64_t{1} << world) - 1, 3);  // tensor 0: no rank has
                    checksums[comm.rank] = adam.checksum();
                });
                expect_equal(checksums);
            }
    }
}

CASE(rs_adam_ag_of_many_chunks) {
    const Ranks ranks = local_communicators(3, options(0u - 9));
    for (const Place place : kPlaces) {
        std::vector<uint64_t> checksums(3);
        run_ranks(ranks, [&](Communicator& comm) {
            AdamCheck adam(ranks[comm.rank], DType::f32, {40'000, 7, 30'000}, place, 2);
            for (uint32_t step = 0; step < 3; ++step) adam.step(0, step);
            checksums[comm.rank] = adam.checksum();
        });
        expect_equal(checksums);
    }
}

CASE(rs_adam_ag_without_tensors) {
    const Ranks ranks = local_communicators(2, options());
    run_ranks(ranks, [&](Communicator& comm) {
        for (const std::vector<int64_t>& numels : {std::vector<int64_t>{}, {0, 0}})
            AdamCheck(ranks[comm.rank], DType::f32, numels, Place::heap, 0).step(0, 0);
    });
}

}  // namespace coconet::native
