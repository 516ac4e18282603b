#include "cuda/peer.h"

#include <algorithm>
#include <array>
#include <optional>

#include "cuda/communicator.h"

namespace coconet::cuda {

namespace {

LaunchConfig config_for(const Options& options) {
    return launch_config(device_info(options.device), 1, options.blocks, options.threads);
}

Geometry geometry_of(const LaunchConfig& config) {
    return geometry(config.blocks, config.attachment_bytes, config.chunk_bytes);
}

class PeerRank : public Rank {
  public:
    PeerRank(const PeerBuffers& buffers, const Options& options, const LaunchConfig& config)
        : Rank(buffers.rank, static_cast<int>(buffers.base.size()), options, config,
               {static_cast<char*>(buffers.base[buffers.rank]), geometry_of(config),
                options.heap_bytes}),
          owner_(buffers.owner) {
        segments_.world = world;
        segments_.rank = rank;
        segments_.check = options.check;
        segments_.geometry = geometry_of(config);
        segments_.timeout_ns = static_cast<uint64_t>(options.timeout_seconds * 1e9);
        for (int r = 0; r < world; ++r) segments_.base[r] = static_cast<char*>(buffers.base[r]);
        const DeviceGuard guard(device);
        start_counters(segment_, options.first_epoch);
        report_ = static_cast<Report*>(
            allocate_host_visible(sizeof(Report) + sizeof numbers_[0] * kMaxRanks));
        segments_.report = report_;
        numbers_ = reinterpret_cast<int64_t*>(report_ + 1);
    }
    ~PeerRank() override { release_host_visible(report_); }

    bool closed() const override { return closed_; }
    void close() override {
        if (!cause_)
            cause_.emplace(ErrorKind::communicator,
                           "close() was called on rank " + std::to_string(rank));
        closed_ = true;
    }

    void barrier(Stream stream) override {
        exchange(DescriptorBuilder(OpCode::barrier).d, 0, stream);
    }

    void reject(OpCode op, const std::string& text, Stream stream) override {
        submit_barrier(describe_rejected(op, text), 0, nullptr, stream);
    }

    void* empty(int64_t bytes, Stream stream) override {
        void* block = allocate(bytes);
        try {
            DescriptorBuilder builder(OpCode::empty);
            builder.add(bytes);
            const Numbers has_room = exchange(builder.d, block != nullptr, stream);
            for (int r = 0; r < world; ++r)
                if (!has_room[r]) throw no_room(r, bytes);
        } catch (...) {
            if (block != nullptr) release(block, bytes);
            throw;
        }
        return block;
    }

    // Without a size the shards are taken for equal; the all-gather's kernel finds out if not.
    void find_rows(const Operand& shard, int64_t dim, int64_t size, int64_t* begins,
                   Stream stream) override {
        const int64_t rows = shard.sizes[dim];
        Numbers all;
        all.fill(rows);
        if (size >= 0) all = exchange(describe_all_gather(shard, dim, size), rows, stream);
        begins[0] = 0;
        for (int r = 0; r < world; ++r) begins[r + 1] = begins[r] + all[r];
        if (size >= 0 && begins[world] != size)
            throw Error(ErrorKind::mismatch, "all_gather: size is " + std::to_string(size) +
                                                 " but the shards of all ranks have " +
                                                 std::to_string(begins[world]) +
                                                 " rows along dim " + std::to_string(dim));
    }

  protected:
    void follow_calls(Stream stream) override {
        const std::lock_guard<std::recursive_mutex> turn(turn_);
        if (stream != last_stream_ && !capturing(stream)) order(last_stream_, stream);
    }
    void submit(Work& work) override {
        const std::lock_guard<std::recursive_mutex> turn(turn_);
        const std::string op = op_name(work.descriptor.op);
        if (closed_)
            throw Error(cause_->kind,
                        op + ": the communicator is closed; first cause: " + cause_->what());
        check_report();
        const DeviceGuard guard(device);
        follow_calls(work.stream);
        if (!capturing(work.stream)) last_stream_ = work.stream;
        work.mail->hash = hash_of(work.descriptor);
        segments_.op = static_cast<int32_t>(work.descriptor.op);
        const Work* one = &work;
        work.launch(&one, 1, segments_, config_, work.stream);
    }

  private:
    using Numbers = std::array<int64_t, kMaxRanks>;  // by rank

    void check_report() {
        if (__atomic_load_n(&report_->kind, __ATOMIC_ACQUIRE) == 0) return;
        cause_.emplace(report_error(*report_, world, options_.timeout_seconds));
        closed_ = true;
        throw Error(*cause_);
    }

    // Every rank's number; waits for the stream.
    Numbers exchange(const Descriptor& descriptor, int64_t number, Stream stream) {
        const std::lock_guard<std::recursive_mutex> turn(turn_);
        submit_barrier(descriptor, number, numbers_, stream);
        synchronize(stream);
        check_report();
        Numbers all{};
        std::copy(numbers_, numbers_ + world, all.begin());
        return all;
    }

    const std::shared_ptr<void> owner_;
    Segments segments_{};
    Report* report_;
    int64_t* numbers_;  // host-visible, by rank
    Stream last_stream_ = nullptr;
    std::recursive_mutex turn_;  // held by the thread that calls
    std::atomic<bool> closed_{false};
    std::optional<Error> cause_;
};

}  // namespace

std::shared_ptr<Communicator> peer_communicator(const PeerBuffers& buffers,
                                                const Options& options) {
    const LaunchConfig config = config_for(options);
    const auto world = static_cast<int>(buffers.base.size());
    if (world < 1 || world > kMaxRanks)
        throw Error(ErrorKind::communicator,
                    "Communicator: the world size is " + std::to_string(world) +
                        "; it must be between 1 and " + std::to_string(kMaxRanks));
    const int64_t needed = geometry_of(config).heap + options.heap_bytes;
    if (buffers.bytes < needed)
        throw Error(ErrorKind::communicator, "Communicator: the peer buffers have " +
                                                 std::to_string(buffers.bytes) + " bytes; " +
                                                 std::to_string(needed) + " are needed");
    return std::make_shared<PeerRank>(buffers, options, config);
}

int64_t peer_buffer_bytes(int, const Options& options) {
    return geometry_of(config_for(options)).heap + options.heap_bytes;
}

}  // namespace coconet::cuda
