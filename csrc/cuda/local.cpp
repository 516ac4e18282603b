#include "cuda/local.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <optional>
#include <utility>

#include "cuda/communicator.h"

namespace coconet::cuda {

namespace {

using Clock = std::chrono::steady_clock;

// The memory of all ranks, and where their threads meet.
class Group {
  public:
    Group(int world, const Options& options)
        : world(world),
          options(options),
          config(
              launch_config(device_info(options.device), world, options.blocks, options.threads)),
          calls_(world),
          closed_(world) {
        const DeviceGuard guard(options.device);
        segments_.world = world;
        segments_.geometry = geometry(config.blocks, config.attachment_bytes, config.chunk_bytes);
        segments_.timeout_ns = static_cast<uint64_t>(options.timeout_seconds * 1e9);
        try {
            segments_.report = static_cast<Report*>(allocate_host_visible(sizeof(Report)));
            for (int r = 0; r < world; ++r) {
                segments_.base[r] = static_cast<char*>(
                    cuda::allocate(options.device, segments_.geometry.heap + options.heap_bytes));
                start_counters(segment(r), options.first_epoch);
            }
        } catch (...) {
            free_memory();
            throw;
        }
    }
    ~Group() { free_memory(); }

    const int world;
    const Options options;
    const LaunchConfig config;

    Segment segment(int rank) const {
        return {segments_.base[rank], segments_.geometry, options.heap_bytes};
    }

    // Returns when all ranks have called it and `run` has run for all, on one of their threads;
    // raises on every rank what run raises, or why a rank doesn't come.
    template <class Run>
    void meet(int rank, const char* op, void* call, const Run& run) {
        std::unique_lock<std::mutex> lock(mutex_);
        check_open(rank, op);
        calls_[rank] = call;
        const uint64_t meeting = meeting_;
        if (++arrived_ == world) {
            std::optional<Error> problem;
            try {
                run(calls_.data());
            } catch (const Error& error) {
                problem = error;
            } catch (const std::exception& error) {
                problem = Error(ErrorKind::communicator, error.what());
            }
            result_ = problem;
            arrived_ = 0;
            ++meeting_;
            for (void*& each : calls_) each = nullptr;
            met_.notify_all();
            if (problem) throw Error(*problem);
            return;
        }
        const auto deadline =
            Clock::now() + std::chrono::duration_cast<Clock::duration>(
                               std::chrono::duration<double>(options.timeout_seconds));
        while (meeting_ == meeting) {
            if (cause_) throw Error(cause_->kind, std::string(op) + ": " + cause_->what());
            if (met_.wait_until(lock, deadline) == std::cv_status::no_timeout) continue;
            if (meeting_ != meeting) break;
            fail(timeout(rank, op));
        }
        // The next meeting can't end before this rank has come to it.
        if (result_) throw Error(*result_);
    }

    void close(int rank) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (cause_) return;
        closed_[rank] = true;
        // Ranks that wait for it.
        if (arrived_ > 0 && calls_[rank] == nullptr)
            cause_.emplace(ErrorKind::peer_lost,
                           "rank " + std::to_string(rank) + " closed its communicator");
        met_.notify_all();
    }
    bool closed(int rank) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return closed_[rank] || cause_;
    }

    // On one of the threads that meet: raises what the last kernels have reported, for good: those
    // behind them have given up too.
    void check_report() {
        const Report& report = *segments_.report;
        if (load_flag(&report.kind) == 0) return;
        fail(report_error(report, world, options.timeout_seconds));
    }

    // Before what a rank puts on a stream by itself.
    void follow_calls(Stream stream) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (stream != last_stream_ && !capturing(stream)) order(last_stream_, stream);
    }

    void launch(const Work* const* works) {
        for (int r = 1; r < world; ++r)
            if (works[r]->stream != works[0]->stream)
                throw Error(ErrorKind::communicator,
                            std::string(op_name(works[0]->descriptor.op)) +
                                ": the ranks of a local communicator call on different streams");
        const DeviceGuard guard(options.device);
        const Stream stream = works[0]->stream;
        if (!capturing(stream)) {
            if (stream != last_stream_) order(last_stream_, stream);
            last_stream_ = stream;
        }
        segments_.op = static_cast<int32_t>(works[0]->descriptor.op);
        works[0]->launch(works, world, segments_, config, stream);
    }

  private:
    static uint32_t load_flag(const uint32_t* flag) {
        return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    }

    void check_open(int rank, const char* op) {
        if (closed_[rank])
            throw Error(ErrorKind::communicator,
                        std::string(op) +
                            ": the communicator is closed; first cause: close() was "
                            "called on rank " +
                            std::to_string(rank));
        if (cause_)
            throw Error(
                cause_->kind,
                std::string(op) + ": the communicator is closed; first cause: " + cause_->what());
        for (int r = 0; r < world; ++r)
            if (closed_[r])
                fail(Error(ErrorKind::peer_lost,
                           std::string(op) + " on rank " + std::to_string(rank) + ": rank " +
                               std::to_string(r) + " closed its communicator"));
    }

    [[noreturn]] void fail(const Error& error) {
        cause_.emplace(error);
        met_.notify_all();
        throw Error(error);
    }

    Error timeout(int rank, const char* op) const {
        std::string missing;
        for (int r = 0; r < world; ++r)
            if (calls_[r] == nullptr) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
        char seconds[32];
        snprintf(seconds, sizeof seconds, "%.1f", options.timeout_seconds);
        return Error(ErrorKind::timeout, std::string(op) + " on rank " + std::to_string(rank) +
                                             ": waited " + seconds + " s for rank " + missing +
                                             " in phase enter. The rank is stuck or never made "
                                             "this call");
    }

    void free_memory() {
        for (char* base : segments_.base)
            if (base != nullptr) cuda::release(options.device, base);
        if (segments_.report != nullptr) release_host_visible(segments_.report);
    }

    Segments segments_{};
    Stream last_stream_ = nullptr;
    mutable std::mutex mutex_;
    std::condition_variable met_;
    std::vector<void*> calls_;  // of the ranks that have come
    int arrived_ = 0;
    uint64_t meeting_ = 0;
    std::optional<Error> result_;  // of the last meeting
    std::optional<Error> cause_;   // why the communicator is closed for good
    std::vector<bool> closed_;     // by rank
};

class LocalRank : public Rank {
  public:
    LocalRank(int rank, std::shared_ptr<Group> group)
        : Rank(rank, group->world, group->options, group->config, group->segment(rank)),
          group_(std::move(group)) {}
    ~LocalRank() override { group_->close(rank); }

    bool closed() const override { return group_->closed(rank); }
    void close() override { group_->close(rank); }

    void barrier(Stream stream) override {
        agree(DescriptorBuilder(OpCode::barrier).d, stream, nullptr, [&](const Work* const* works) {
            const DeviceGuard guard(device);
            for (int r = 0; r < world; ++r) synchronize(works[r]->stream);
            group_->check_report();
        });
    }

    void* empty(int64_t bytes, Stream stream) override {
        struct Request {
            int64_t bytes;
            void* block;
        } mine{bytes, allocate(bytes)};
        DescriptorBuilder builder(OpCode::empty);
        builder.add(bytes);
        const auto give_back = [&] {
            if (mine.block != nullptr) release(mine.block, bytes);
        };
        try {
            agree(builder.d, stream, &mine, [&](const Work* const* works) {
                for (int r = 0; r < world; ++r)
                    if (static_cast<const Request*>(works[r]->common)->block == nullptr)
                        throw no_room(r, bytes);
            });
        } catch (...) {
            give_back();
            throw;
        }
        return mine.block;
    }

    void find_rows(const Operand& shard, int64_t dim, int64_t size, int64_t* begins,
                   Stream stream) override {
        struct Request {
            int64_t rows;
            int64_t* begins;
        } mine{shard.sizes[dim], begins};
        agree(describe_all_gather(shard, dim, size), stream, &mine, [&](const Work* const* works) {
            int64_t begin[kMaxRanks + 1] = {};
            for (int r = 0; r < world; ++r)
                begin[r + 1] = begin[r] + static_cast<const Request*>(works[r]->common)->rows;
            if (size >= 0 && size != begin[world])
                throw Error(ErrorKind::mismatch, "all_gather: size is " + std::to_string(size) +
                                                     " but the shards of all ranks have " +
                                                     std::to_string(begin[world]) +
                                                     " rows along dim " + std::to_string(dim));
            for (int r = 0; r < world; ++r)
                std::copy(begin, begin + world + 1,
                          static_cast<const Request*>(works[r]->common)->begins);
        });
    }

    void reject(OpCode op, const std::string& text, Stream stream) override {
        Work work{describe_rejected(op, text), stream, nullptr, nullptr, nullptr, nullptr};
        try {
            submit(work);
        } catch (const Error&) {
            // The caller raises what is wrong; its peers get it as a mismatch.
        }
    }

  protected:
    void follow_calls(Stream stream) override { group_->follow_calls(stream); }
    void submit(Work& work) override {
        meet(work, [&](const Work* const* works) { group_->launch(works); });
    }

  private:
    template <class Run>
    void meet(Work& work, const Run& run) {
        const std::lock_guard<std::mutex> turn(turn_);
        group_->meet(rank, op_name(work.descriptor.op), &work, [&](void* const* calls) {
            const Work* works[kMaxRanks];
            const Descriptor* descriptors[kMaxRanks];
            std::string rejected;
            for (int r = 0; r < world; ++r) {
                works[r] = static_cast<const Work*>(calls[r]);
                descriptors[r] = &works[r]->descriptor;
                if (descriptors[r]->op == OpCode::rejected)
                    rejected += (rejected.empty() ? "rank " : "; rank ") + std::to_string(r) +
                                " was given bad arguments: " + descriptors[r]->text;
            }
            const std::string problem = !rejected.empty() ? rejected
                                        : options_.check  ? disagreement(descriptors, world)
                                                          : "";
            if (!problem.empty()) throw Error(ErrorKind::mismatch, problem);
            group_->check_report();
            run(works);
        });
    }
    // A meeting on the host alone; each rank's `request` is at works[rank]->common.
    template <class Run>
    void agree(const Descriptor& descriptor, Stream stream, const void* request, const Run& run) {
        Work work{descriptor, stream, request, nullptr, nullptr, nullptr};
        meet(work, run);
    }

    const std::shared_ptr<Group> group_;
    std::mutex turn_;  // held by the thread that meets the peers
};

}  // namespace

std::vector<std::shared_ptr<Communicator>> local_communicators(int world, const Options& options) {
    if (world < 1 || world > kMaxRanks)
        throw Error(ErrorKind::communicator,
                    "Communicator: the world size is " + std::to_string(world) +
                        "; it must be between 1 and " + std::to_string(kMaxRanks));
    const auto group = std::make_shared<Group>(world, options);
    std::vector<std::shared_ptr<Communicator>> ranks;
    for (int r = 0; r < world; ++r) ranks.push_back(std::make_shared<LocalRank>(r, group));
    return ranks;
}

}  // namespace coconet::cuda
