// RS-Adam-AG under test: a list of tensors with its optimizer state and a float64 oracle.
#pragma once

#include "cpu/rs_adam_ag.h"
#include "native.h"

namespace coconet::native {

class AdamCheck {
  public:
    // Collective. salt: the weights at the start.
    AdamCheck(std::shared_ptr<Communicator> comm, DType dtype, std::vector<int64_t> numels,
              Place place, uint32_t salt);

    // One step, checked. absent: bit t * world + r: rank r has no gradient for tensor t.
    void step(uint64_t absent, uint32_t salt);
    // A call with another learning rate on some ranks.
    void disagree(double lr);
    // Of the weights' bits; equal on all ranks.
    uint64_t checksum() const;

  private:
    struct Oracle {
        std::vector<double> weight, exp_avg, exp_avg_sq;
    };
    void run(const AdamHyper& hyper, const std::vector<const void*>& gradients);

    const DType dtype_;
    const Place place_;
    TensorList list_;
    std::vector<std::unique_ptr<Tensor>> weights_;
    std::vector<float> exp_avg_, exp_avg_sq_, master_;
    std::vector<Oracle> oracle_;
    std::vector<int> steps_;
};

}  // namespace coconet::native
