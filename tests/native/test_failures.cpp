// Disagreements, rejected calls, lost peers, timeouts, interrupts: an error on every rank, no hang.
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "adam.h"

namespace coconet::native {

namespace {

void sum(Communicator& comm, DType dtype = DType::f32, int64_t numel = 100, bool average = false,
         bool in_place = true) {
    std::vector<char> memory(numel * 4), output(numel * 4);
    const Operand x{memory.data(), dtype, itemsize(dtype), &numel, 1};
    if (in_place)
        all_reduce_(comm, x, average);
    else
        all_reduce(comm, x, average, [&](int64_t) { return output.data(); });
}

void scatter(Communicator& comm, int64_t dim, Split split) {
    std::vector<float> memory(36), output(36);
    const int64_t sizes[] = {6, 6};
    const Operand x{memory.data(), DType::f32, 4, sizes, 2};
    reduce_scatter(comm, x, dim, false, split, dim_slices(x, dim, split, comm.world),
                   [&](int64_t) { return output.data(); });
}

void gather(Communicator& comm, DType dtype, int64_t dim, int64_t columns, int64_t size) {
    std::vector<char> memory(64 * 4), output(64 * 4 * comm.world);
    const int64_t sizes[] = {4, columns};
    int64_t begins[kMaxRanks + 1];
    all_gather(
        comm, {memory.data(), dtype, 4, sizes, 2}, dim, size,
        [&](int64_t) { return output.data(); }, begins);
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

thread_local bool interrupted = false;

}  // namespace

CASE(disagreements) {
    using Call = std::function<void(Communicator&, bool odd)>;
    const std::pair<const char*, Call> calls[] = {
        {"the call", [](auto& c, bool odd) { odd ? c.barrier() : sum(c); }},
        {"the call", [](auto& c, bool odd) { odd ? c.barrier() : (void)c.ping(1); }},
        {"dtype", [](auto& c, bool odd) { sum(c, odd ? DType::bf16 : DType::f16); }},
        {"shape", [](auto& c, bool odd) { sum(c, DType::f32, odd ? 5 : 6); }},
        {"op", [](auto& c, bool odd) { sum(c, DType::f32, 5, odd); }},
        {"in-place", [](auto& c, bool odd) { sum(c, DType::f32, 5, false, odd); }},
        {"bytes", [](auto& c, bool odd) { c.empty(odd ? 10 : 20); }},
        {"dim", [](auto& c, bool odd) { scatter(c, odd, Split::chunk); }},
        {"split",
         [](auto& c, bool odd) { scatter(c, 0, odd ? Split::chunk : Split::tensor_split); }},
        {"dtype", [](auto& c, bool odd) { gather(c, odd ? DType::f32 : DType::i32, 0, 4, -1); }},
        {"dim", [](auto& c, bool odd) { gather(c, DType::f32, odd, 4, -1); }},
        {"shape", [](auto& c, bool odd) { gather(c, DType::f32, 0, odd ? 3 : 4, -1); }},
        {"size", [](auto& c, bool odd) { gather(c, DType::f32, 0, 4, odd ? -1 : 12); }},
    };
    run_ranks(3, [&](Communicator& comm) {
        for (const auto& [what, call] : calls)
            for (int odd = 0; odd < comm.world; ++odd) {
                const std::string text = raised(
                    ErrorKind::mismatch, [&, call = &call] { (*call)(comm, comm.rank == odd); });
                expect_in(std::string("disagree on ") + what, text);
                check_all_reduce(comm, {DType::f32, {100}, false, Place::own, 1}, true);
            }
        expect_in("size is 13",
                  raised(ErrorKind::mismatch, [&] { gather(comm, DType::f32, 0, 4, 13); }));
        comm.barrier();
    });
}

CASE(disagreements_about_parameters) {
    const Ranks ranks = local_communicators(2, options());
    run_ranks(ranks, [&](Communicator& comm) {
        const int rank = comm.rank;
        AdamCheck same(ranks[rank], DType::f32, {10, 10}, Place::own, 0);
        AdamCheck other(ranks[rank], DType::f32, {10, 10 + rank}, Place::own, 0);
        expect_in("disagree on lr", raised(ErrorKind::mismatch, [&] { same.disagree(rank); }));
        expect_in("elements of params[1]: 10 on rank 0; 11 on rank 1",
                  raised(ErrorKind::mismatch, [&] { other.disagree(0); }));
        expect_in("disagree on bytes", raised(ErrorKind::mismatch, [&] {  // of the table of entries
                      TensorList(ranks[rank], std::vector<int64_t>(10 + rank, 10));
                  }));
        same.step(0, 1);
    });
}

// The rank that rejects is ahead of its peers by a call, which still read what it published for the
// call before.
CASE(rejections_between_calls) {
    for (const int world : {2, 4}) {
        const Ranks ranks = local_communicators(world, options());
        run_ranks(ranks, [&](Communicator& comm) {
            AdamCheck adam(ranks[comm.rank], DType::f32, {300, 20}, Place::own, 0);
            const auto reject = [&](int i) {
                if (i % comm.world == comm.rank)
                    comm.reject(OpCode::barrier, "no such argument");
                else
                    expect_in("no such argument",
                              raised(ErrorKind::mismatch, [&] { comm.barrier(); }));
            };
            for (int i = 0; i < 60; ++i) {
                adam.step(0, i);
                reject(i);
                adam.step(0, i);
                reject(i);
                reject(i);
                Tensor(comm, 4, {100}, Place::heap);
                reject(i);
                Tensor(comm, 4, {100}, Place::heap);
                // Small enough to be attached.
                check_all_reduce(comm, {DType::f32, {300}, false, Place::own, 1}, false);
                reject(i);
                check_all_reduce(comm, {DType::f32, {300}, false, Place::own, 2}, false);
            }
        });
    }
}

CASE(one_rank_closes) {
    for (int closing = 0; closing < 3; ++closing)
        run_ranks(3, [&](Communicator& comm) {
            check_all_reduce(comm, {DType::f32, {1000}, false, Place::heap, 1}, false);
            if (comm.rank == closing) {
                comm.close();
                expect_in("close() was called",
                          raised(ErrorKind::communicator, [&] { comm.barrier(); }));
                return;
            }
            const std::string text = raised(ErrorKind::peer_lost, [&] { sum(comm); });
            expect_in("rank " + std::to_string(closing) + " closed its communicator", text);
            expect(comm.closed(), "the communicator should be closed");
            expect_in("first cause", raised(ErrorKind::peer_lost, [&] { sum(comm); }));
        });
}

CASE(a_tensor_outlives_its_communicator) {
    Ranks ranks = local_communicators(2, options());
    std::vector<std::shared_ptr<Heap>> heaps;
    std::vector<Heap::Block> blocks(2);
    for (const auto& comm : ranks) heaps.push_back(comm->heap());
    run_ranks(ranks, [&](Communicator& comm) { blocks[comm.rank] = comm.empty(1000); });
    ranks.clear();
    for (int r = 0; r < 2; ++r) {
        heaps[r]->data()[blocks[r].offset] = 1;
        heaps[r]->mark_freed(blocks[r].slot);
    }
}

CASE(one_rank_comes_too_late) {
    CommunicatorOptions impatient = options();
    impatient.timeout_seconds = 0.2;
    const Ranks ranks = local_communicators(3, impatient);
    std::atomic<int> gone{0};
    run_ranks(ranks, [&](Communicator& comm) {
        std::string text;
        if (comm.rank == 1) {
            while (gone.load() < 2) sleep_ms(5);
            text = raised(ErrorKind::timeout, [&] { sum(comm); });
        } else {
            text = raised(ErrorKind::timeout, [&] { sum(comm); });
            ++gone;
        }
        expect_in("waited 0.2 s for rank 1 in phase enter", text);
    });
}

CASE(one_rank_fails_inside_a_call) {
    run_ranks(3, [&](Communicator& comm) {
        int64_t numel = 50'000;
        std::vector<float> x(numel), y(numel);
        const auto call = [&] {
            all_reduce(comm, {x.data(), DType::f32, 4, &numel, 1}, false, [&](int64_t) {
                if (comm.rank == 2) throw std::bad_alloc();
                return y.data();
            });
        };
        if (comm.rank == 2) {
            try {
                call();
            } catch (const std::bad_alloc&) {
                expect(comm.closed(), "the communicator should be closed");
                return;
            }
            failed("an exception was expected");
        }
        expect_in("rank 2 failed inside the call", raised(ErrorKind::peer_lost, call));
    });
}

CASE(one_rank_is_interrupted) {
    interrupt_requested = [] { return interrupted; };
    std::atomic<bool> gone{false};
    run_ranks(3, [&](Communicator& comm) {
        if (comm.rank == 0) {
            interrupted = true;
            raised(ErrorKind::interrupted, [&] { comm.barrier(); });
            gone.store(true);
            return;
        }
        while (!gone.load()) sleep_ms(5);
        // Although rank 0 did its part of this one: it has given up.
        expect_in("interrupted while waiting",
                  raised(ErrorKind::peer_lost, [&] { comm.barrier(); }));
    });
    interrupt_requested = nullptr;
}

CASE(the_heap_is_full) {
    run_ranks(2, [](Communicator& comm) {
        std::vector<std::unique_ptr<Tensor>> held;
        std::string text;
        while (text.empty()) try {
                held.push_back(
                    std::make_unique<Tensor>(comm, 1, std::vector<int64_t>{1 << 20}, Place::heap));
            } catch (const Error& error) {
                expect(error.kind == ErrorKind::heap_exhausted, error.what());
                text = error.what();
            }
        expect_in("don't fit into the symmetric heap", text);
        // Results that find no room go elsewhere.
        const int64_t numel = held.back()->numel() / 4;
        held.resize(held.size() - 1);
        comm.barrier();
        check_all_reduce(comm, {DType::f32, {numel - 4}, false, Place::heap, 1}, false);
        held.clear();
        comm.empty(4 << 20);
    });
}

// What a rank's other threads may ask at any time.
CASE(questions_from_other_threads) {
    run_ranks(2, [](Communicator& comm) {
        Threads threads;
        std::atomic<int> negative{0};
        threads.emplace_back([&] {
            while (!comm.closed()) {
                negative += comm.heap()->allocated() < 0;
                std::this_thread::yield();
            }
        });
        const struct Closing {
            Communicator& comm;
            ~Closing() { comm.close(); }
        } closing{comm};
        for (int i = 0; i < 20; ++i)
            check_all_reduce(comm, {DType::f32, {3000}, false, Place::heap, 1}, false);
        comm.barrier();
        expect(negative == 0, "the heap's use can't be negative");
    });
}

// Segments and pidfds change hands over sockets, as between processes.
CASE(rendezvous_over_sockets) {
    for (const bool pidfds : {true, false}) {
        constexpr int kWorld = 3;
        const CommunicatorOptions o = options();
        std::vector<std::unique_ptr<Rendezvous>> meetings;
        std::vector<std::string> addresses;
        for (int r = 0; r < kWorld; ++r) {
            meetings.push_back(std::make_unique<Rendezvous>(o.heap_bytes));
            addresses.push_back(meetings[r]->address());
        }
        if (pidfds && !meetings[0]->has_pidfd()) continue;
        Ranks ranks(kWorld);
        std::vector<std::thread> threads;
        for (int r = 0; r < kWorld; ++r)
            threads.emplace_back([&, r] {
                CommunicatorOptions mine = o;
                mine.rank = r;
                ranks[r] = std::make_shared<Communicator>(
                    mine, meetings[r]->connect(r, addresses, pidfds, 20.0));
            });
        for (auto& thread : threads) thread.join();
        run_ranks(ranks, [](Communicator& comm) {
            for (const Place place : kPlaces)
                check_all_reduce(comm, {DType::f32, {5000}, false, place, 1}, false);
        });
    }
}

// A rank 1 that nobody has heard of, or that connects and says nothing, until the test is over or
// the wait for it should long have ended.
CASE(a_rendezvous_ends_without_the_peer) {
    for (const bool silent : {false, true}) {
        Rendezvous meeting(options().heap_bytes), peer(options().heap_bytes);
        const std::vector<std::string> addresses{meeting.address(), peer.address()};
        std::atomic<bool> ended{false}, late{false};
        Threads threads;
        threads.emplace_back([&] {
            const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
            sockaddr_un address{};
            address.sun_family = AF_UNIX;
            addresses[0].copy(address.sun_path + 1, sizeof address.sun_path - 1);
            const auto size = offsetof(sockaddr_un, sun_path) + 1 + addresses[0].size();
            if (silent)
                connect(fd, reinterpret_cast<sockaddr*>(&address), static_cast<socklen_t>(size));
            for (int i = 0; i < 4000 && !ended.load(); ++i) sleep_ms(5);
            late = !ended.load();
            close(fd);
            if (late) peer.connect(1, addresses, false, 20.0);
        });
        std::string text;
        try {
            meeting.connect(0, addresses, false, 0.2);
        } catch (const std::runtime_error& error) {
            text = error.what();
        }
        ended.store(true);
        expect_in("1 peers did not connect in time", text);
        expect(!late, "a rendezvous waited for longer than it was told to");
    }
}

CASE(world_sizes) {
    for (const int world : {0, kMaxRanks + 1})
        expect_in("it must be between 1 and 64",
                  raised(ErrorKind::communicator, [&] { local_communicators(world, options()); }));
}

}  // namespace coconet::native
