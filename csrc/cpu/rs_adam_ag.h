// RS-Adam-AG: reduce-scatter of the gradients, Adam on the own slice, all-gather of the weights, in
// one pass over a list of tensors.
#pragma once

#include <vector>

#include "common/adam.h"
#include "cpu/communicator.h"

namespace coconet {

// How a list of tensors is cut into slices, and where its tensors are on each rank.
class TensorList {
  public:
    // Collective: takes room for the ranks' tables in the heap.
    TensorList(std::shared_ptr<Communicator> comm, std::vector<int64_t> numels);
    ~TensorList();
    TensorList(const TensorList&) = delete;
    TensorList& operator=(const TensorList&) = delete;

    int size() const { return static_cast<int>(numels.size()); }
    ListSlices slices() const { return {starts.data(), numels.data(), size(), total, slice}; }

    const std::shared_ptr<Communicator> comm;
    const std::vector<int64_t> numels;
    std::vector<int64_t> starts;
    int64_t total, slice;
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

struct AdamHyper {
    double lr, beta1, beta2, eps, weight_decay;
    bool adam_w_mode, bias_correction, average_grads;
};

// weights, gradients: own memory, per tensor; a gradient may be nullptr. State: the own slice.
void rs_adam_ag(TensorList& list, DType dtype, const std::vector<void*>& weights,
                const std::vector<const void*>& gradients, const AdamHyper& hyper, float* exp_avg,
                float* exp_avg_sq, float* master);

}  // namespace coconet
