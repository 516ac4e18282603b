// The CUDA backend as the binding layer sees it. No CUDA header, and calls go through virtual
// functions alone: the same interface serves the backend of this build (backend(), or the stub of
// no_cuda.cpp) and the emulator's, which tests load at run time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/calls.h"
#include "common/errors.h"
#include "cuda/launch_config.h"
#include "cuda/runtime.h"

namespace coconet::cuda {

struct Options {
    int device = 0;
    int64_t heap_bytes = 0;
    double timeout_seconds = 60;
    bool check = true;            // compare what the ranks call
    uint32_t first_epoch = 0;     // where the counters start
    int blocks = 0, threads = 0;  // of LaunchConfig; 0: chosen for the device
};

// How a list of tensors is cut into slices, and Adam's step counts of it on the device.
class TensorList : public ListLayout {
  public:
    using ListLayout::ListLayout;
    virtual ~TensorList() = default;
    // Updates done, per tensor. Waits for the stream.
    virtual std::vector<int64_t> steps(Stream stream) const = 0;
    virtual void set_steps(const std::vector<int64_t>& steps, Stream stream) = 0;
};

struct AdamState {
    float *exp_avg, *exp_avg_sq, *master;  // the own slice; master: unused for fp32 weights
};

// One rank's end of a communicator. Calls of several threads take turns. Operands are contiguous
// tensors on the device. Calls return once their kernels are launched; what a kernel reports, the
// next call raises.
class Communicator {
  public:
    Communicator(int rank, int world, int device) : rank(rank), world(world), device(device) {}
    virtual ~Communicator() = default;
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    const int rank, world, device;

    virtual const LaunchConfig& config() const = 0;
    virtual bool closed() const = 0;
    virtual void close() = 0;
    // Tells the peers that this rank's arguments are bad.
    virtual void reject(OpCode op, const std::string& text, Stream stream) = 0;
    // Returns when every rank has called it and what it has launched before is done.
    virtual void barrier(Stream stream) = 0;

    virtual int64_t heap_bytes() const = 0;
    virtual int64_t heap_allocated() const = 0;
    // Offset of [p, p + bytes), or kPrivate when it isn't in this rank's heap.
    virtual int64_t offset_of(const void* p, int64_t bytes) const = 0;
    // A block of the heap; nullptr when it has no room. A call of this rank alone.
    virtual void* allocate(int64_t bytes) = 0;
    virtual void release(void* block, int64_t bytes) = 0;  // from any thread
    // The same by all ranks; an error on every rank when one of them has no room.
    virtual void* empty(int64_t bytes, Stream stream) = 0;

    virtual void all_reduce(const Operand& x, void* output, bool average, bool in_place,
                            Stream stream) = 0;
    virtual void reduce_scatter(const Operand& x, void* output, int64_t dim, bool average,
                                Split split, const DimSlices& slices, Stream stream) = 0;
    // Fills begins[0..world]: the first row of each rank's shard, and the total. size: the total
    // where it is known, or -1.
    virtual void find_rows(const Operand& shard, int64_t dim, int64_t size, int64_t* begins,
                           Stream stream) = 0;
    virtual void all_gather(const Operand& shard, void* output, int64_t dim, int64_t size,
                            int64_t total, Stream stream) = 0;
    virtual std::unique_ptr<TensorList> tensor_list(const std::vector<int64_t>& numels,
                                                    Stream stream) = 0;
    virtual void rs_adam_ag(TensorList& list, DType dtype, const std::vector<void*>& weights,
                            const std::vector<const void*>& gradients, const AdamHyper& hyper,
                            const AdamState& state, Stream stream) = 0;
};

// One buffer per rank, of which this process reaches all, zeroed. They live as long as the owner.
struct PeerBuffers {
    int rank;
    std::vector<void*> base;
    int64_t bytes;
    std::shared_ptr<void> owner{};
};

class Backend {
  public:
    virtual ~Backend() = default;
    // The toolkit that built it, as "13.0", and nvcc's names of what it holds code for, with commas
    // between them; empty in a build without CUDA.
    virtual std::string version() const = 0;
    virtual std::string targets() const = 0;
    // Why there is none, when it is 0.
    virtual int device_count(std::string* why) const = 0;
    virtual DeviceInfo device_info(int device) const = 0;
    // world ranks on one device, by rank, each for a thread of its own; they meet on the host, and
    // the last one launches for all.
    virtual std::vector<std::shared_ptr<Communicator>> local(int world, const Options&) const = 0;
    // This process's rank.
    virtual std::shared_ptr<Communicator> peer(const PeerBuffers& buffers,
                                               const Options&) const = 0;
    // Of a peer communicator with this heap.
    virtual int64_t buffer_bytes(int world, const Options&) const = 0;
};

const Backend& backend();

}  // namespace coconet::cuda
