// A list of tensors on the device: its layout, step counts, and the tables that kernels read.
#pragma once

#include <memory>
#include <vector>

#include "cuda/communicator.h"
#include "cuda/rs_adam_ag.h"

namespace coconet::cuda {

class DeviceTensorList : public TensorList {
  public:
    // Raises MemoryError's kind when the heap has no room for the tables.
    DeviceTensorList(std::shared_ptr<Rank> rank, const std::vector<int64_t>& numels, Stream stream);
    ~DeviceTensorList() override;

    std::vector<int64_t> steps(Stream stream) const override;
    void set_steps(const std::vector<int64_t>& steps, Stream stream) override;

    // Brings the tensors' places to the device, unless they are there, and fills all of the result
    // but Adam's state.
    RankTensors upload(int64_t itemsize, const std::vector<void*>& weights,
                       const std::vector<const void*>& gradients, Stream stream);

  private:
    // Where the tensors of a call are, as kernels read it.
    struct Table {
        std::vector<char> content;
        char* place;
    };
    char* take(int64_t bytes);

    const std::shared_ptr<Rank> rank_;
    char* fixed_;  // starts, numels, steps, constants, resolved, plan
    int64_t fixed_bytes_, table_bytes_;
    // The one of eager calls, then one for each captured call: a replayed graph uploads it again.
    std::vector<std::unique_ptr<Table>> tables_;
};

}  // namespace coconet::cuda
