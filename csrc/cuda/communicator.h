// What the ranks of a device communicator have in common, however they reach each other: the heap,
// and the ops up to their launch.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "common/free_list.h"
#include "cuda/backend.h"
#include "cuda/collectives.h"

namespace coconet::cuda {

// One rank's part of a call, up to its launch.
struct Work {
    Descriptor descriptor;
    Stream stream;
    const void* common;  // e.g. ReduceCall
    void* operands;      // of the rank, e.g. RankOperands
    Mail* mail;          // in operands
    // Launches for these works: of all ranks in order, or of one.
    void (*launch)(const Work* const* works, int count, const Segments& segments,
                   const LaunchConfig& config, Stream stream);
};

// A rank's memory of the device.
struct Segment {
    char* base;
    Geometry geometry;
    int64_t heap_bytes;
};

// Equal on all ranks if they make the same call.
uint64_t hash_of(const Descriptor& descriptor);

// Fills the pads of a new segment for counters that start elsewhere than at 0.
void start_counters(const Segment& segment, uint32_t first_epoch);

// What a kernel's report says; none: kind 0.
Error report_error(const Report& report, int world, double timeout_seconds);

class Rank : public Communicator, public std::enable_shared_from_this<Rank> {
  public:
    Rank(int rank, int world, const Options& options, const LaunchConfig& config,
         const Segment& segment);

    const LaunchConfig& config() const override { return config_; }
    int64_t heap_bytes() const override { return segment_.heap_bytes; }
    int64_t heap_allocated() const override { return allocated_.load(); }
    int64_t offset_of(const void* p, int64_t bytes) const override;
    void* allocate(int64_t bytes) override;
    void release(void* block, int64_t bytes) override;

    void all_reduce(const Operand& x, void* output, bool average, bool in_place,
                    Stream stream) override;
    void reduce_scatter(const Operand& x, void* output, int64_t dim, bool average, Split split,
                        const DimSlices& slices, Stream stream) override;
    void all_gather(const Operand& shard, void* output, int64_t dim, int64_t size, int64_t total,
                    Stream stream) override;
    std::unique_ptr<TensorList> tensor_list(const std::vector<int64_t>& numels,
                                            Stream stream) override;
    void rs_adam_ag(TensorList& list, DType dtype, const std::vector<void*>& weights,
                    const std::vector<const void*>& gradients, const AdamHyper& hyper,
                    const AdamState& state, Stream stream) override;

  protected:
    // What is put on the stream from now on begins after this communicator's calls.
    virtual void follow_calls(Stream stream) = 0;
    // Runs the call with the peers: launches it, or raises.
    virtual void submit(Work& work) = 0;
    // Launches the barrier's kernel with this descriptor; see barrier.cu.
    void submit_barrier(const Descriptor& descriptor, int64_t number, int64_t* numbers,
                        Stream stream);
    static Descriptor describe_rejected(OpCode op, const std::string& text);

    // Of comm.empty().
    Error no_room(int rank, int64_t bytes) const;

    char* heap() const { return segment_.base + segment_.geometry.heap; }
    const Options options_;
    const LaunchConfig config_;
    const Segment segment_;

  private:
    void collective(const Descriptor& descriptor, const Operand& x, void* output, Work& work,
                    RankOperands& operands);
    // Whether every rank's share of an input of these slices fits into its blocks' attachments.
    bool fits_attachments(int64_t bytes, int64_t longest_slice, int sections,
                          int64_t itemsize) const;

    std::mutex heap_mutex_;
    FreeList free_;
    std::atomic<int64_t> allocated_{0};
};

}  // namespace coconet::cuda
