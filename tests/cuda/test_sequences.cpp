// Random sequences of calls. All ranks draw the same choices.
#include "adam.h"

namespace coconet::native {

namespace {

class Sequence {
  public:
    Sequence(Communicator& comm, uint32_t sequence_seed) : comm_(comm), random_(sequence_seed) {
        for (const Place place : kPlaces)
            adams_.push_back(std::make_unique<AdamCheck>(comm, kAdamDTypes[choose(3)],
                                                         std::vector<int64_t>{1500, 5, 700}, place,
                                                         sequence_seed, choose(kNumHypers)));
    }

    // Returns a checksum that is equal on all ranks.
    uint64_t run(int calls) {
        for (int i = 0; i < calls; ++i) call();
        uint64_t checksum = 0;
        for (auto& adam : adams_) checksum = checksum * 31 + adam->checksum();
        return checksum;
    }

  private:
    int choose(uint32_t n) { return static_cast<int>(below(random_, n)); }
    Place place() { return kPlaces[choose(3)]; }
    int64_t size() {
        const uint32_t limits[] = {2, 70, 1000, 9000};
        return choose(limits[choose(4)]);
    }
    Reduction reduction(std::vector<int64_t> sizes) {
        return {kReduceDTypes[choose(kNumReduceDTypes)],
                std::move(sizes),
                choose(2) == 0,
                place(),
                place(),
                below(random_, 1000)};
    }

    void call() {
        const int choice = choose(12);
        if (choice < 3) {
            check_all_reduce(comm_, reduction({size()}), choose(2) == 0);
        } else if (choice < 5) {
            const int64_t rows = size();
            check_reduce_scatter(comm_, reduction({2, rows}), choose(2),
                                 choose(2) ? Split::chunk : Split::tensor_split);
        } else if (choice < 7) {
            std::vector<int64_t> rows;
            for (int r = 0; r < comm_.world; ++r) rows.push_back(size());
            const int64_t outer = 1 + choose(2);
            check_all_gather(comm_, DType::f32, 4, outer, rows, 1, place(), place(),
                             below(random_, 1000));
        } else if (choice < 10) {
            adams_[choose(3)]->step(static_cast<Absent>(choose(3)), below(random_, 1000));
        } else if (choice < 11) {
            comm_.barrier(nullptr);
        } else {
            const int64_t bytes = 1 + choose(1000);
            comm_.release(comm_.empty(bytes, nullptr), bytes);
        }
    }

    Communicator& comm_;
    Random random_;
    std::vector<std::unique_ptr<AdamCheck>> adams_;
};

void run_sequences(Kind kind, int size, uint32_t first_epoch, int calls) {
    const World world(kind, size, options(first_epoch));
    std::vector<uint64_t> checksums(size);
    const uint32_t sequence_seed = seed * 100 + size;
    world.run([&](Communicator& comm) {
        checksums[comm.rank] = Sequence(comm, sequence_seed).run(calls);
    });
    for (const uint64_t checksum : checksums)
        expect(checksum == checksums[0], "the ranks' weights differ");
}

}  // namespace

CASE(sequences) {
    for (const Kind kind : kKinds)
        for (const int size : {1, 2, 3, 4, 5})
            if (size <= 4 || kThorough) run_sequences(kind, size, 0, kThorough ? 60 : 20);
}

CASE(sequences_across_the_wrap_of_the_counters) {
    for (const Kind kind : kKinds) run_sequences(kind, 3, 0u - 20, kThorough ? 80 : 30);
}

}  // namespace coconet::native
