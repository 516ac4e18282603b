// Long random sequences of calls, good and bad ones, with results that are kept and dropped while
// calls run. All ranks draw the same choices from `shared`, and some alone from `own`.
#include "adam.h"

namespace coconet::native {

namespace {

class Sequence {
  public:
    Sequence(std::shared_ptr<Communicator> comm, uint32_t sequence_seed)
        : comm_(*comm), shared_(sequence_seed), own_(sequence_seed * 64 + comm->rank) {
        for (const Place place : kPlaces)
            adams_.push_back(std::make_unique<AdamCheck>(
                comm, kAdamDTypes[below(shared_, kNumAdamDTypes)],
                std::vector<int64_t>{3000, 5, 700}, place, sequence_seed));
    }

    void run(int calls) {
        for (int i = 0; i < calls; ++i) {
            good();
            // A rank that rejects its arguments goes on at once; its next call meets peers that
            // may still be in the one before.
            if (below(shared_, 3) == 0) bad();
            drop_some();
        }
        for (const auto& kept : kept_) expect_untouched(kept);
        for (auto& adam : adams_) checksum = checksum * 31 + adam->checksum();
    }

    uint64_t checksum = 0;  // equal on all ranks

  private:
    struct Kept {
        std::unique_ptr<Tensor> tensor;
        uint64_t checksum;
    };

    DType dtype() { return kReduceDTypes[below(shared_, kNumReduceDTypes)]; }
    Place place() { return kPlaces[below(shared_, 3)]; }
    int64_t size() {
        const uint32_t limits[] = {2, 70, 1000, 12000};
        return below(shared_, limits[below(shared_, 4)]);
    }
    Reduction reduction(std::vector<int64_t> sizes) {
        return {dtype(), std::move(sizes), below(shared_, 2) == 0, place(), below(shared_, 1000)};
    }
    void keep(std::unique_ptr<Tensor> tensor) {
        if (below(own_, 2) == 0) return;
        const uint64_t sum = tensor->checksum();
        kept_.push_back({std::move(tensor), sum});
    }

    void good() {
        const uint32_t choice = below(shared_, 12);
        if (choice < 3) {
            keep(check_all_reduce(comm_, reduction({size()}), below(shared_, 2) == 0));
        } else if (choice < 5) {
            const int64_t rows = size();
            keep(check_reduce_scatter(comm_, reduction({2, rows}), below(shared_, 2),
                                      below(shared_, 2) ? Split::chunk : Split::tensor_split));
        } else if (choice < 7) {
            std::vector<int64_t> rows;
            for (int r = 0; r < comm_.world; ++r) rows.push_back(size());
            const int64_t outer = 1 + below(shared_, 2);
            keep(check_all_gather(comm_, DType::f32, 4, outer, rows, 1, place(),
                                  below(shared_, 1000)));
        } else if (choice < 10) {
            auto& adam = adams_[below(shared_, 3)];
            adam->step(below(shared_, 2) ? 0 : shared_(), below(shared_, 1000));
        } else if (choice < 11) {
            comm_.barrier();
        } else {
            keep(std::make_unique<Tensor>(comm_, 4, std::vector<int64_t>{size()}, Place::heap));
        }
    }

    void bad() {
        // Rejections in a row by the same ranks, then a call that all ranks make.
        const uint32_t rejecting = 1 + below(shared_, (1u << comm_.world) - 1);
        const bool rejects = rejecting >> comm_.rank & 1;
        const uint32_t times = 1 + below(shared_, 2);
        const uint32_t call = below(shared_, 4);
        for (uint32_t i = 0; i < times; ++i) {
            if (rejects) {
                comm_.reject(OpCode::all_reduce, "bad arguments");
                continue;
            }
            const std::string text = raised(ErrorKind::mismatch, [&] {
                if (call == 0) comm_.barrier();
                if (call == 1) comm_.empty(100);
                if (call == 2) adams_[0]->disagree(1);
                if (call == 3) {
                    float x[2] = {};
                    const int64_t sizes[] = {2};
                    all_reduce_(comm_, {x, DType::f32, 4, sizes, 1}, false);
                }
            });
            expect_in("was given bad arguments: bad arguments", text);
        }
        if (below(shared_, 3) == 0 && comm_.world > 1) {
            const std::string text =
                raised(ErrorKind::mismatch, [&] { adams_[1]->disagree(comm_.rank == 0 ? 1 : 2); });
            expect_in("disagree on lr", text);
        }
        if (below(shared_, 4) == 0)
            raised(ErrorKind::heap_exhausted, [&] { comm_.empty(int64_t{1} << 40); });
    }

    // Ranks drop tensors at times of their own, some on another thread.
    void drop_some() {
        while (kept_.size() > 12 || (!kept_.empty() && below(own_, 3) == 0)) {
            std::swap(kept_[below(own_, static_cast<uint32_t>(kept_.size()))], kept_.back());
            Kept kept = std::move(kept_.back());
            kept_.pop_back();
            if (threads_.size() < 20 && below(own_, 4) == 0)
                threads_.emplace_back([kept = std::move(kept)]() mutable {
                    expect_untouched(kept);
                    kept.tensor.reset();
                });
            else
                expect_untouched(kept);
        }
    }
    static void expect_untouched(const Kept& kept) {
        expect(kept.tensor->checksum() == kept.checksum, "a kept result was written to");
    }

    Communicator& comm_;
    Random shared_, own_;
    std::vector<std::unique_ptr<AdamCheck>> adams_;
    std::vector<Kept> kept_;
    Threads threads_;
};

void run_sequences(int world, uint32_t first_epoch, int calls) {
    const Ranks ranks = local_communicators(world, options(first_epoch));
    std::vector<uint64_t> checksums(world);
    const uint32_t sequence_seed = seed * 100 + world;
    run_ranks(ranks, [&](Communicator& comm) {
        Sequence sequence(ranks[comm.rank], sequence_seed);
        sequence.run(calls);
        checksums[comm.rank] = sequence.checksum;
    });
    for (const uint64_t checksum : checksums)
        expect(checksum == checksums[0], "the ranks' weights differ");
}

}  // namespace

CASE(sequences) {
    for (const int world : {1, 2, 3, 4, 5}) run_sequences(world, 0, 150);
}

CASE(sequences_across_the_wrap_of_the_counters) { run_sequences(3, 0u - 60, 150); }

// Nothing but the heap's own marks orders a thread's last use of a block before a peer's first.
CASE(blocks_freed_by_other_threads) {
    run_ranks(3, [](Communicator& comm) {
        Threads threads;
        for (int i = 0; i < 30; ++i) {
            auto y = check_all_reduce(comm, {DType::f32, {500}, false, Place::heap, 1}, false);
            threads.emplace_back([y = std::move(y)]() mutable { y.reset(); });
        }
    });
}

}  // namespace coconet::native
