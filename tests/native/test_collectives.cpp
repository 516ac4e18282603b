// Every collective: dtypes, places, world sizes, awkward sizes, counters about to wrap.
#include <string.h>

#include "native.h"

namespace coconet::native {

namespace {

constexpr int kWorlds[] = {1, 2, 3, 4, 5, 8};
constexpr int64_t kSizes[] = {0, 1, 63, 1023, 6007};
constexpr int64_t kLarge = 100003;

template <class F>
void for_each_dtype_and_place(int world, F&& f) {
    run_ranks(world, [&](Communicator& comm) {
        for (const DType dtype : kReduceDTypes)
            for (const Place place : kPlaces) f(comm, dtype, place);
    });
}

}  // namespace

CASE(all_reduce) {
    for (const int world : kWorlds)
        for_each_dtype_and_place(world, [](Communicator& comm, DType dtype, Place place) {
            for (const int64_t size : kSizes)
                for (const bool in_place : {false, true})
                    check_all_reduce(comm, {dtype, {size}, size % 2 == 0, place, 3}, in_place);
        });
}

CASE(all_reduce_of_many_chunks) {
    for (const int world : {2, 3, 8})
        run_ranks(world, [](Communicator& comm) {
            for (const Place place : kPlaces)
                check_all_reduce(comm, {DType::f32, {kLarge}, false, place, 1}, false);
        });
}

// Large enough to be written past the cache.
CASE(streamed_results) {
    CommunicatorOptions roomy = options();
    roomy.heap_bytes = 128 << 20;
    run_ranks(local_communicators(2, roomy), [](Communicator& comm) {
        const int64_t numel = tuning(2, true, false).staged_stream_bytes / 4 + 999;
        for (const Place place : {Place::heap, Place::own}) {
            const Reduction r{DType::f32, {numel}, false, place, 2};
            check_all_reduce(comm, r, false);
            check_reduce_scatter(comm, r, 0, Split::tensor_split);
        }
        check_all_gather(comm, DType::f32, 4, 1, {300'000, 200'000}, 1, Place::heap, 3);
    });
}

CASE(reduce_scatter) {
    for (const int world : kWorlds)
        for_each_dtype_and_place(world, [](Communicator& comm, DType dtype, Place place) {
            for (const Split split : {Split::tensor_split, Split::chunk}) {
                for (const int64_t size : kSizes)
                    check_reduce_scatter(comm, {dtype, {size}, size % 2 == 0, place, 5}, 0, split);
                check_reduce_scatter(comm, {dtype, {5, 7, 33}, false, place, 6}, 1, split);
                check_reduce_scatter(comm, {dtype, {2, 3, 1000}, true, place, 7}, 2, split);
            }
        });
}

CASE(all_gather) {
    for (const int world : kWorlds)
        run_ranks(world, [](Communicator& comm) {
            const std::pair<DType, int64_t> types[] = {
                {DType::u8, 1},  {DType::boolean, 1}, {DType::i16, 2}, {DType::bf16, 2},
                {DType::i32, 4}, {DType::f64, 8},     {DType::i64, 8}, {DType::c128, 16}};
            for (const auto& [dtype, bytes] : types)
                for (const Place place : kPlaces) {
                    const auto gather = [&, dtype = dtype, bytes = bytes](
                                            int64_t outer, int64_t rows, int64_t uneven,
                                            int64_t inner) {
                        std::vector<int64_t> all;
                        for (int r = 0; r < comm.world; ++r) all.push_back(rows + uneven * r);
                        check_all_gather(comm, dtype, bytes, outer, all, inner, place,
                                         static_cast<uint32_t>(rows));
                    };
                    gather(1, 0, 0, 1);
                    gather(1, 0, 1, 1);  // rank 0 has nothing
                    gather(1, 63, 0, 1);
                    gather(3, 5, 2, 7);
                    gather(1, 1023, 100, 3);
                }
        });
}

CASE(all_gather_of_many_chunks) {
    for (const int world : {2, 3, 5})
        run_ranks(world, [](Communicator& comm) {
            std::vector<int64_t> rows;
            for (int r = 0; r < comm.world; ++r) rows.push_back(r == 1 ? 1 : kLarge);
            for (const Place place : kPlaces)
                check_all_gather(comm, DType::u8, 1, 1, rows, 2, place, 1);
        });
}

CASE(counters_wrap) {
    for (const uint32_t before : {1u, 2u, 7u, 40u})
        run_ranks(local_communicators(3, options(0u - before)), [](Communicator& comm) {
            for (const Place place : kPlaces)
                for (int i = 0; i < 4; ++i) {
                    check_all_reduce(comm, {DType::f32, {20'000}, false, place, 1}, i % 2 == 0);
                    check_reduce_scatter(comm, {DType::bf16, {20'000}, false, place, 2}, 0,
                                         Split::tensor_split);
                    check_all_gather(comm, DType::u8, 1, 1, {50'000, 0, 40'000}, 1, place, 3);
                    comm.barrier();
                }
        });
}

CASE(ping_and_staged_calls_share_counters) {
    for (const int world : {1, 2, 4})
        run_ranks(world, [](Communicator& comm) {
            for (const int rounds : {0, 1, 9}) {
                comm.ping(rounds);
                check_all_reduce(comm, {DType::f32, {9000}, false, Place::own, 4}, true);
                comm.ping(rounds);
                check_all_gather(comm, DType::u8, 1, 1, std::vector<int64_t>(comm.world, 40'000), 1,
                                 Place::own, 4);
            }
        });
}

}  // namespace coconet::native
