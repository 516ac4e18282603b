// Every collective: dtypes, places, world sizes, awkward sizes, counters about to wrap.
#include "ranks.h"

namespace coconet::native {

namespace {

// Around the sizes of a pack, a slice's alignment, a block's share; the last ones go through the
// staging areas or to the heaps, the others through attachments.
constexpr int64_t kSizes[] = {0, 1, 4, 63, 257, 1023, 6007};
// Much work for each rank; many ranks do it for few dtypes.
std::vector<DType> dtypes(const Communicator& comm) {
    if (kThorough && comm.world <= 4) return {std::begin(kReduceDTypes), std::end(kReduceDTypes)};
    return {kReduceDTypes[comm.world % kNumReduceDTypes]};
}

template <class F>
void for_each_dtype_and_place(F&& f) {
    for_each_world(world_sizes(), [&](Communicator& comm) {
        for (const DType dtype : dtypes(comm))
            for (const Place place : kPlaces) f(comm, dtype, place);
    });
}

}  // namespace

CASE(all_reduce) {
    for_each_dtype_and_place([](Communicator& comm, DType dtype, Place place) {
        uint32_t salt = 0;
        for (const int64_t size : kSizes)
            for (const bool in_place : {false, true})
                check_all_reduce(comm, {dtype, {size}, size % 2 == 0, place, place, salt++},
                                 in_place);
    });
}

CASE(all_reduce_of_many_chunks) {
    for_each_world(
        kThorough ? std::vector<int>{2, 3, 8} : std::vector<int>{2, 4}, [](Communicator& comm) {
            const int64_t size = (kThorough ? 40'003 : 20'003) / comm.world;
            uint32_t salt = 1;
            for (const Place place : kPlaces)
                for (const bool in_place : {false, true})
                    check_all_reduce(comm, {DType::f32, {size}, false, place, place, salt += 3},
                                     in_place);
            check_all_reduce(comm, {DType::bf16, {size}, false, Place::heap, Place::mixed, 5},
                             false);
        });
}

// Where one exchange ends and chunks begin, and where a block's part of both does.
CASE(sizes_around_limits) {
    for (const int blocks : {1, 3})
        for (const Kind kind : kKinds) {
            Options o = options();
            o.blocks = blocks;
            World(kind, 2, o).run([&](Communicator& comm) {
                const cuda::LaunchConfig& config = comm.config();
                const int64_t item = 4, grain = config.grain(item);
                const int64_t limits[] = {
                    grain, grain * blocks, config.attachment_bytes / item * blocks,
                    config.one_shot_bytes / item, config.chunk_bytes / item * blocks};
                uint32_t salt = 0;
                for (const int64_t limit : limits)
                    for (const int64_t size : {limit - 1, limit, limit + 1}) {
                        const Place place = kPlaces[salt % 3];
                        const Reduction r{DType::f32, {size}, false, place, place, salt++};
                        check_all_reduce(comm, r, false);
                        check_reduce_scatter(comm, r, 0, Split::tensor_split);
                        check_all_gather(comm, DType::f32, 4, 1, {size / 2, size - size / 2}, 1,
                                         place, place, salt);
                    }
            });
        }
}

// Whichever way the operands go, the result has the same bits; see also Reduction.
CASE(paths_agree) {
    for_each_world({3}, [](Communicator& comm) {
        for (const DType dtype : dtypes(comm))
            for (const int64_t size : {500, 5001}) {
                const auto sum_of = [&](Place place, bool in_place) {
                    return check_all_reduce(comm, {dtype, {size}, true, place, place, 7}, in_place);
                };
                const uint64_t sum = sum_of(Place::heap, false);
                for (const Place place : kPlaces)
                    for (const bool in_place : {false, true})
                        expect(sum_of(place, in_place) == sum, "another result in another place");
            }
    });
}

CASE(reduce_scatter) {
    for_each_dtype_and_place([](Communicator& comm, DType dtype, Place place) {
        uint32_t salt = 0;
        for (const Split split : {Split::tensor_split, Split::chunk, Split::rows}) {
            for (const int64_t size : {0, 1, 257, 6007})
                check_reduce_scatter(comm, {dtype, {size}, size % 2 == 0, place, place, salt++}, 0,
                                     split);
            check_reduce_scatter(comm, {dtype, {5, 7, 33}, false, place, Place::own, salt++}, 1,
                                 split);
            check_reduce_scatter(comm, {dtype, {2, 3, 1000}, true, place, Place::heap, salt++}, 2,
                                 split);
        }
    });
}

// Slices of many short rows.
CASE(reduce_scatter_of_narrow_rows) {
    for_each_world({2, 3, 4}, [](Communicator& comm) {
        uint32_t salt = 0;
        for (const Place place : kPlaces)
            for (const int64_t columns : {comm.world + 1, 40, 130})
                for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
                    const Reduction r{dtype, {7000 / columns, columns}, false, place, place,
                                      salt++};
                    check_reduce_scatter(comm, r, 1, Split::tensor_split);
                }
    });
}

CASE(reduce_scatter_of_many_chunks) {
    for_each_world({2, 3, 5}, [](Communicator& comm) {
        uint32_t salt = 0;
        for (const Place place : kPlaces)
            check_reduce_scatter(comm, {DType::f32, {30'001}, false, place, place, salt += 5}, 0,
                                 Split::chunk);
    });
}

CASE(all_gather) {
    for_each_world(world_sizes(), [](Communicator& comm) {
        const std::pair<DType, int64_t> types[] = {
            {DType::u8, 1}, {DType::i16, 2}, {DType::f32, 4}, {DType::i64, 8}, {DType::c128, 16}};
        uint32_t salt = 0;
        for (const auto& [dtype, bytes] : types)
            for (const Place place : kPlaces) {
                const auto gather = [&, dtype = dtype, bytes = bytes](int64_t outer, int64_t rows,
                                                                      int64_t uneven,
                                                                      int64_t inner) {
                    std::vector<int64_t> all;
                    for (int r = 0; r < comm.world; ++r) all.push_back(rows + uneven * r);
                    check_all_gather(comm, dtype, bytes, outer, all, inner, place,
                                     kPlaces[salt % 3], salt);
                    ++salt;
                };
                gather(1, 0, 0, 1);
                gather(1, 0, 1, 1);  // rank 0 has nothing
                gather(1, 63, 0, 1);
                gather(3, 5, 2, 7);
                gather(1, comm.world > 5 ? 200 : 1023, 50, 3);
            }
    });
}

CASE(all_gather_of_many_chunks) {
    for_each_world({2, 3, 5}, [](Communicator& comm) {
        std::vector<int64_t> rows;
        for (int r = 0; r < comm.world; ++r) rows.push_back(r == 1 ? 1 : 50'003);
        for (const Place place : kPlaces)
            check_all_gather(comm, DType::u8, 1, 1, rows, 2, place, Place::own, 1);
    });
}

// Other numbers of blocks and threads than the other cases have.
CASE(shapes_of_launches) {
    for (const Kind kind : kKinds)
        for (const auto& [blocks, threads] :
             {std::pair(1, 32), {3, 96}, {kThorough ? 4 : 1, 512}}) {
            Options o = options();
            o.blocks = blocks;
            o.threads = threads;
            World(kind, 2, o).run([](Communicator& comm) {
                uint32_t salt = 0;
                for (const Place place : kPlaces)
                    for (const int64_t size : {77, 9001}) {
                        const Reduction r{DType::bf16, {size}, false, place, place, salt++};
                        check_all_reduce(comm, r, false);
                        check_reduce_scatter(comm, r, 0, Split::tensor_split);
                        check_all_gather(comm, DType::f32, 4, 1, {size, 5}, 1, place, place, salt);
                    }
            });
        }
}

CASE(counters_wrap) {
    for (const Kind kind : kKinds)
        for (const uint32_t before : {1u, 2u, 7u, 20u})
            World(kind, 3, options(0u - before)).run([](Communicator& comm) {
                uint32_t salt = 0;
                for (const Place place : kPlaces)
                    for (int i = 0; i < 2; ++i) {
                        const Reduction large{DType::f32, {9000}, false, place, place, ++salt};
                        check_all_reduce(comm, large, i % 2 == 0);
                        check_reduce_scatter(comm, large, 0, Split::tensor_split);
                        check_all_gather(comm, DType::u8, 1, 1, {20'000, 0, 30'000}, 1, place,
                                         place, salt);
                        check_all_reduce(comm, {DType::f32, {100}, true, place, place, salt}, true);
                        comm.barrier(nullptr);
                    }
            });
}

}  // namespace coconet::native
