// RS-Adam-AG: reduce-scatter of the gradients, Adam on the own slice, all-gather of the weights, in
// one pass over a list of tensors.
#pragma once

#include <vector>

#include "common/calls.h"
#include "cpu/communicator.h"

namespace coconet {

// A list's layout, and where its tensors are on each rank.
class TensorList : public ListLayout {
  public:
    // Collective: takes room for the ranks' tables in the heap.
    TensorList(std::shared_ptr<Communicator> comm, std::vector<int64_t> numels);
    ~TensorList();
    TensorList(const TensorList&) = delete;
    TensorList& operator=(const TensorList&) = delete;

    const std::shared_ptr<Communicator> comm;
    std::vector<int64_t> steps;  // updates done, per tensor
    std::vector<AdamStep> constants;
    // Two tables of entries, by parity of the call.
    int64_t table(uint32_t epoch) const {
        return table_.offset + (epoch & 1) * static_cast<int64_t>(size() * sizeof(TensorEntry));
    }

  private:
    std::shared_ptr<Heap> heap_;
    Heap::Block table_;
};

// weights, gradients: own memory, per tensor; a gradient may be nullptr. State: the own slice.
void rs_adam_ag(TensorList& list, DType dtype, const std::vector<void*>& weights,
                const std::vector<const void*>& gradients, const AdamHyper& hyper, float* exp_avg,
                float* exp_avg_sq, float* master);

}  // namespace coconet
