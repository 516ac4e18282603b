// Communicators of the CUDA backend, and of the emulator in tests, as the binding layer uses them.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "cuda/backend.h"

namespace coconet {

class DeviceCommunicator : public std::enable_shared_from_this<DeviceCommunicator> {
  public:
    // device: where the tensors are; the CPU for the emulator.
    DeviceCommunicator(std::shared_ptr<cuda::Communicator> core, at::Device device)
        : core(std::move(core)), device(device) {}

    const std::shared_ptr<cuda::Communicator> core;
    const at::Device device;

    // The current one of the calling thread.
    cuda::Stream stream() const;
    // A tensor with its own storage in a block of the heap; dropping it frees the block.
    at::Tensor heap_tensor(void* block, at::IntArrayRef sizes, at::ScalarType dtype) const;
    // A result: in the heap if the input is and there is room.
    at::Tensor output_for(const at::Tensor& input, at::IntArrayRef sizes) const;
};

// Operands are contiguous.
at::Tensor all_reduce(const DeviceCommunicator& comm, const at::Tensor& x, bool average);
void all_reduce_(const DeviceCommunicator& comm, at::Tensor& x, bool average);
at::Tensor reduce_scatter(const DeviceCommunicator& comm, const at::Tensor& x, int64_t dim,
                          bool average, Split split, const DimSlices& slices);
// size: the expected total along dim, or -1. Fills begins[0..world].
at::Tensor all_gather(const DeviceCommunicator& comm, const at::Tensor& shard, int64_t dim,
                      int64_t size, int64_t* begins);

// A list of tensors and Adam's step counts, for either kind of communicator.
class DeviceTensors {
  public:
    DeviceTensors(std::shared_ptr<DeviceCommunicator> comm, const std::vector<int64_t>& numels)
        : comm(std::move(comm)),
          list(this->comm->core->tensor_list(numels, this->comm->stream())) {}

    const std::shared_ptr<DeviceCommunicator> comm;
    const std::unique_ptr<cuda::TensorList> list;
};

void bind_device(pybind11::module_& m);

}  // namespace coconet
