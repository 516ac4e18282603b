// Disagreements, bad arguments, lost peers, timeouts, full heaps: an error, no hang.
#include <atomic>
#include <chrono>
#include <thread>

#include "adam.h"

namespace coconet::native {

namespace {

// Calls with results that must stay untouched where the ranks disagree.
void sum(Communicator& comm, DType dtype = DType::f32, int64_t numel = 100, bool average = false,
         bool in_place = true) {
    const Tensor x(comm, itemsize(dtype), {numel}, Place::own, Shift::none);
    const Tensor y(comm, itemsize(dtype), {numel}, Place::own, Shift::none);
    comm.all_reduce(x.operand(dtype), in_place ? x.data() : y.data(), average, in_place, nullptr);
    x.expect_untouched();
    y.expect_untouched();
}

void scatter(Communicator& comm, int64_t dim, Split split) {
    const Tensor x(comm, 4, {6, 6}, Place::heap, Shift::none);
    const Tensor y(comm, 4, {36}, Place::heap, Shift::none);
    const Operand operand = x.operand(DType::f32);
    comm.reduce_scatter(operand, y.data(), dim, false, split,
                        dim_slices(operand, dim, split, comm.world), nullptr);
    y.expect_untouched();
}

void gather(Communicator& comm, DType dtype, int64_t dim, int64_t columns, int64_t size,
            int64_t rows = 4) {
    const Tensor shard(comm, 4, {rows, columns}, Place::own, Shift::none);
    const Tensor y(comm, 4, {64 * comm.world}, Place::own, Shift::none);
    comm.all_gather(shard.operand(dtype), y.data(), dim, size,
                    (dim == 0 ? rows : columns) * comm.world, nullptr);
    y.expect_untouched();
}

void update(Communicator& comm, double lr) {
    AdamCheck adam(comm, DType::f32, {300, 20}, Place::own, 0);
    const uint64_t before = adam.checksum();
    adam.disagree(lr);
    expect(adam.checksum() == before, "weights were written to");
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

using Call = std::function<void(Communicator&, bool odd)>;
// What the ranks disagree on, and the call of the odd one and of the others.
const std::pair<const char*, Call> kDisagreements[] = {
    {"the call", [](auto& c, bool odd) { odd ? c.barrier(nullptr) : sum(c); }},
    {"dtype", [](auto& c, bool odd) { sum(c, odd ? DType::bf16 : DType::f16); }},
    {"shape", [](auto& c, bool odd) { sum(c, DType::f32, odd ? 5 : 6); }},
    {"op", [](auto& c, bool odd) { sum(c, DType::f32, 9000, odd); }},
    {"in-place", [](auto& c, bool odd) { sum(c, DType::f32, 9000, false, odd); }},
    {"dim", [](auto& c, bool odd) { scatter(c, odd, Split::chunk); }},
    {"split", [](auto& c, bool odd) { scatter(c, 0, odd ? Split::chunk : Split::tensor_split); }},
    {"dtype", [](auto& c, bool odd) { gather(c, odd ? DType::f32 : DType::i32, 0, 4, -1); }},
    {"dim", [](auto& c, bool odd) { gather(c, DType::f32, odd, 4, -1); }},
    {"shape", [](auto& c, bool odd) { gather(c, DType::f32, 0, odd ? 3 : 4, -1); }},
    {"size", [](auto& c, bool odd) { gather(c, DType::f32, 0, 4, odd ? -1 : 12); }},
    {"lr", [](auto& c, bool odd) { update(c, odd ? 1 : 2); }},
};

// A call in which the ranks of a peer communicator disagree returns; the next one raises it.
std::string raised_by_the_next(Communicator& comm, const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {  // a barrier learns it at once
        expect(error.kind == ErrorKind::mismatch, error.what());
        return error.what();
    }
    return raised(ErrorKind::mismatch, [&] { comm.barrier(nullptr); });
}

}  // namespace

CASE(disagreements) {
    World(Kind::local, 3).run([](Communicator& comm) {
        for (const auto& [what, call] : kDisagreements)
            for (int odd = 0; odd < comm.world; ++odd) {
                const std::string text = raised(
                    ErrorKind::mismatch, [&, call = &call] { (*call)(comm, comm.rank == odd); });
                expect_in(std::string("disagree on ") + what, text);
                check_all_reduce(comm, {DType::f32, {100}, false, Place::own, Place::own, 1}, true);
            }
        expect_in("disagree on bytes",
                  raised(ErrorKind::mismatch, [&] { comm.empty(10 + comm.rank, nullptr); }));
        expect(comm.heap_allocated() == 0, "empty should have given back what it had");
        comm.barrier(nullptr);
    });
}

CASE(disagreements_of_peers) {
    for (const auto& [what, call] : kDisagreements)
        for (int odd = 0; odd < 3; ++odd)
            World(Kind::peer, 3).run([&, what = what, call = &call](Communicator& comm) {
                const std::string text =
                    raised_by_the_next(comm, [&] { (*call)(comm, comm.rank == odd); });
                expect_in(std::string("disagree on ") + what, text);
                expect(comm.closed(), "the communicator should be closed");
                expect_in("first cause", raised(ErrorKind::mismatch, [&] { sum(comm); }));
            });
}

CASE(calls_are_not_compared) {
    Options unchecked = options();
    unchecked.check = false;
    for (const Kind kind : kKinds)
        World(kind, 2, unchecked).run([](Communicator& comm) {
            // Each rank with a learning rate of its own, for its slice.
            AdamCheck(comm, DType::f32, {300, 20}, Place::own, 0).disagree(comm.rank);
            check_all_reduce(comm, {DType::f32, {100}, false, Place::own, Place::own, 1}, true);
        });
}

CASE(disagreements_about_parameters) {
    for (const Kind kind : kKinds)
        World(kind, 3).run([&](Communicator& comm) {
            AdamCheck other(comm, DType::f32, {10, 10 + comm.rank / 2}, Place::own, 0);
            const uint64_t before = other.checksum();
            other.fill(Absent::none, 1);
            other.call(nullptr);
            expect_in("elements of params[1]: 10 on ranks 0, 1; 11 on rank 2",
                      raised(ErrorKind::mismatch, [&] { comm.barrier(nullptr); }));
            expect(other.checksum() == before, "weights were written to");
            // What was launched behind that call has given up too.
            expect_in("first cause", raised(ErrorKind::mismatch, [&] { sum(comm); }));
        });
}

// One of them by chance expects as many rows as there are.
CASE(disagreements_about_rows) {
    for (const Kind kind : kKinds)
        for (const int64_t columns : {4, 2000})
            World(kind, 3).run([&](Communicator& comm) {
                const int64_t rows = 1 + comm.rank;
                const Tensor shard(comm, 4, {rows, columns}, Place::own, Shift::none);
                const Tensor y(comm, 4, {9, columns}, Place::own, Shift::none);
                comm.all_gather(shard.operand(DType::f32), y.data(), 0, -1, rows * comm.world,
                                nullptr);
                y.expect_untouched();
                expect_in("other numbers: 1 on rank 0; 2 on rank 1; 3 on rank 2",
                          raised(ErrorKind::mismatch, [&] { comm.barrier(nullptr); }));
            });
    for (const Kind kind : kKinds)
        World(kind, 3).run([](Communicator& comm) {
            const Tensor shard(comm, 4, {1 + comm.rank}, Place::own, Shift::none);
            int64_t begins[kMaxRanks + 1];
            expect_in("size is 7 but the shards of all ranks have 6 rows along dim 0",
                      raised(ErrorKind::mismatch, [&] {
                          comm.find_rows(shard.operand(DType::f32), 0, 7, begins, nullptr);
                      }));
        });
}

CASE(rejections) {
    World(Kind::local, 3).run([](Communicator& comm) {
        AdamCheck adam(comm, DType::f32, {300, 20}, Place::own, 0);
        for (int i = 0; i < 6; ++i) {
            if (i % comm.world == comm.rank)
                comm.reject(OpCode::barrier, "no such argument", nullptr);
            else
                expect_in("was given bad arguments: barrier: no such argument",
                          raised(ErrorKind::mismatch, [&] { comm.barrier(nullptr); }));
            adam.step(Absent::some, i);
        }
    });
    for (int rejecting = 0; rejecting < 3; ++rejecting)
        World(Kind::peer, 3).run([&](Communicator& comm) {
            const auto call = [&] {
                if (comm.rank == rejecting)
                    comm.reject(OpCode::all_reduce, "no such argument", nullptr);
                else
                    sum(comm);
            };
            expect_in("was given bad arguments: all_reduce: no such argument",
                      raised_by_the_next(comm, call));
        });
}

CASE(one_rank_closes) {
    for (int closing = 0; closing < 3; ++closing)
        World(Kind::local, 3).run([&](Communicator& comm) {
            check_all_reduce(comm, {DType::f32, {1000}, false, Place::heap, Place::heap, 1}, false);
            if (comm.rank == closing) {
                sleep_ms(20);  // the others wait for it
                comm.close();
                expect(comm.closed(), "the communicator should be closed");
                expect_in("close() was called",
                          raised(ErrorKind::communicator, [&] { comm.barrier(nullptr); }));
                return;
            }
            expect_in("rank " + std::to_string(closing) + " closed its communicator",
                      raised(ErrorKind::peer_lost, [&] { sum(comm); }));
            expect_in("closed its communicator",
                      raised(ErrorKind::peer_lost, [&] { comm.barrier(nullptr); }));
        });
    World(Kind::peer, 1).run([](Communicator& comm) {
        comm.close();
        expect(comm.closed(), "the communicator should be closed");
        expect_in("first cause: close() was called on rank 0",
                  raised(ErrorKind::communicator, [&] { sum(comm); }));
    });
}

CASE(one_rank_never_comes) {
    Options impatient = options();
    impatient.timeout_seconds = 0.2;
    for (const Kind kind : kKinds) {
        std::atomic<int> gone{0};
        World(kind, 3, impatient).run([&](Communicator& comm) {
            if (comm.rank == 1) {
                while (gone < 2) sleep_ms(5);
                return;
            }
            const struct Going {
                std::atomic<int>& gone;
                ~Going() { ++gone; }
            } going{gone};
            // A launch returns; the next call says what it met.
            if (kind == Kind::peer) sum(comm);
            const std::string text = raised(ErrorKind::timeout, [&] { sum(comm); });
            expect_in("all_reduce on rank ", text);
            expect_in(": waited 0.2 s for rank 1 in phase enter", text);
            if (kind == Kind::peer) expect_in(": expected 1, seen 0 (block ", text);
            expect(comm.closed(), "the communicator should be closed");
            expect_in("first cause", raised(ErrorKind::timeout, [&] { comm.barrier(nullptr); }));
        });
    }
}

// It makes its calls, but of fewer blocks than its peers.
CASE(one_rank_stops_inside_a_call) {
    Options impatient = options();
    impatient.timeout_seconds = 0.2;
    Options fewer = impatient;
    fewer.blocks = 1;
    const cuda::Backend& backend = cuda::backend();
    const int64_t bytes = backend.buffer_bytes(2, impatient);
    const std::vector<void*> buffers = {cuda::allocate(0, bytes), cuda::allocate(0, bytes)};
    {
        const auto rank0 = backend.peer({0, buffers, bytes}, impatient);
        const auto rank1 = backend.peer({1, buffers, bytes}, fewer);
        std::thread other([&] { rank1->reject(OpCode::none, "", nullptr); });
        rank0->reject(OpCode::none, "", nullptr);
        other.join();
        const std::string text = raised(ErrorKind::timeout, [&] { rank0->barrier(nullptr); });
        expect_in("for rank 1 in phase enter: expected 1, seen 0 (block 1)", text);
    }
    for (void* const buffer : buffers) cuda::release(0, buffer);
}

CASE(the_heap_is_full) {
    for_each_world({2}, [](Communicator& comm) {
        const auto refused = [&] {
            return raised(ErrorKind::heap_exhausted, [&] { comm.empty(700 << 10, nullptr); });
        };
        void* const own = comm.rank == 1 ? comm.allocate(500 << 10) : nullptr;
        expect_in("716800 bytes don't fit into the heap of rank 1, which has 1048576", refused());
        if (own != nullptr) comm.release(own, 500 << 10);
        void* const block = comm.empty(700 << 10, nullptr);
        refused();
        check_all_reduce(comm, {DType::f32, {9000}, false, Place::heap, Place::heap, 1}, false);
        expect_in("no room for the tables of 9999 tensors", raised(ErrorKind::heap_exhausted, [&] {
                      comm.tensor_list(std::vector<int64_t>(9999, 1), nullptr);
                  }));
        comm.release(block, 700 << 10);
        expect(comm.heap_allocated() == 0, "some of the heap was not given back");
        comm.release(comm.empty(1 << 20, nullptr), 1 << 20);
    });
}

CASE(streams_of_local_ranks) {
    World(Kind::local, 2).run([](Communicator& comm) {
        char x[4] = {};
        const int64_t numel = 1;
        auto* const stream = reinterpret_cast<Stream>(intptr_t{comm.rank + 1});
        expect_in("call on different streams", raised(ErrorKind::communicator, [&] {
                      comm.all_reduce({x, DType::f32, 4, &numel, 1}, x, false, true, stream);
                  }));
    });
}

// Answered at any time, from any thread.
CASE(questions_from_other_threads) {
    for_each_world({2}, [](Communicator& comm) {
        std::atomic<bool> done{false};
        std::thread asking([&] {
            while (!done) {
                (void)comm.closed();
                (void)comm.heap_allocated();
                void* const block = comm.allocate(100);
                if (block != nullptr) comm.release(block, 100);
                std::this_thread::yield();
            }
        });
        const struct Joining {
            std::atomic<bool>& done;
            std::thread& thread;
            ~Joining() {
                done = true;
                thread.join();
            }
        } joining{done, asking};
        for (int i = 0; i < 5; ++i)
            check_all_reduce(comm, {DType::f32, {3000}, false, Place::heap, Place::heap, 1}, false);
        comm.close();
    });
}

CASE(wrong_world_sizes) {
    const cuda::Backend& backend = cuda::backend();
    for (const int size : {0, 17}) {
        expect_in("it must be between 1 and 16",
                  raised(ErrorKind::communicator, [&] { backend.local(size, options()); }));
        std::vector<void*> buffers(size);
        expect_in("it must be between 1 and 16", raised(ErrorKind::communicator, [&] {
                      backend.peer({0, buffers, 0}, options());
                  }));
    }
    expect_in("are needed", raised(ErrorKind::communicator, [&] {
                  backend.peer({0, std::vector<void*>(2), 1 << 20}, options());
              }));
}

}  // namespace coconet::native
