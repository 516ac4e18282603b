// RS-Adam-AG under test: a list of tensors with its optimizer state and a float64 oracle.
#pragma once

#include "ranks.h"

namespace coconet::native {

// Which ranks have no gradient for which tensors.
enum class Absent { none, some, some_everywhere };

class AdamCheck {
  public:
    // hyper: an entry of the table in adam.cpp. salt: the weights at the start, and the shift of
    // the tensors' starts.
    AdamCheck(Communicator& comm, DType dtype, std::vector<int64_t> numels, Place place,
              uint32_t salt, int hyper = 0);

    // One step, checked.
    void step(Absent absent, uint32_t salt) {
        fill(absent, salt);
        call(nullptr);
        check();
    }
    // Its parts: new gradients; the call; what it has done.
    void fill(Absent absent, uint32_t salt);
    void call(Stream stream);
    void check();
    // A call with another learning rate.
    void disagree(double lr);
    // Of the weights' bits; equal on all ranks.
    uint64_t checksum() const;
    cuda::TensorList& list() { return *list_; }

  private:
    struct Oracle {
        std::vector<double> weight, exp_avg, exp_avg_sq;
        int64_t steps = 0;
    };
    bool has(int tensor, int rank) const;
    void run(const AdamHyper& hyper, Stream stream);

    Communicator& comm_;
    const DType dtype_;
    const AdamHyper hyper_;
    const std::vector<int64_t> numels_;
    std::unique_ptr<cuda::TensorList> list_;
    std::vector<std::unique_ptr<Tensor>> weights_, gradients_;
    std::vector<std::unique_ptr<Tensor>> state_;  // exp_avg, exp_avg_sq, master
    std::vector<Oracle> oracle_;
    Absent absent_ = Absent::none;
    uint32_t salt_ = 0;
};

constexpr int kNumHypers = 4;

}  // namespace coconet::native
