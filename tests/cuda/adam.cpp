#include "adam.h"

#include <math.h>

#include <algorithm>

namespace coconet::native {

namespace {

// lr, beta1, beta2, eps, weight decay; decoupled, bias correction, average.
constexpr AdamHyper kHypers[kNumHypers] = {
    {0.01, 0.9, 0.99, 1e-6, 0.1, true, true, true},
    {0.01, 0.8, 0.999, 1e-6, 0.1, false, true, true},
    {0.02, 0.9, 0.99, 1e-3, 0.0, true, false, false},
    {0.01, 0.9, 0.95, 1e-6, 0.05, false, false, true},
};

// Steps of 1/16: exact in every dtype, and so are their sums.
double gradient(int rank, int64_t t, int64_t i, uint32_t salt) {
    return static_cast<double>((i * 5 + rank * 3 + t + salt) % 13 - 6) / 16;
}

}  // namespace

AdamCheck::AdamCheck(Communicator& comm, DType dtype, std::vector<int64_t> numels, Place place,
                     uint32_t salt, int hyper)
    : comm_(comm),
      dtype_(dtype),
      hyper_(kHypers[hyper]),
      numels_(std::move(numels)),
      list_(comm.tensor_list(numels_, nullptr)) {
    const ListSlices slices = list_->slices();
    const bool has_master = dtype != DType::f32;
    for (int i = 0; i < (has_master ? 3 : 2); ++i) {
        state_.push_back(std::make_unique<Tensor>(comm, 4, std::vector<int64_t>{slices.slice},
                                                  Place::own, Shift::none));
        std::fill_n(state_[i]->data<float>(), slices.slice, 0.0f);
    }
    for (size_t t = 0; t < numels_.size(); ++t) {
        const int64_t n = numels_[t];
        for (auto* list : {&weights_, &gradients_})
            list->push_back(std::make_unique<Tensor>(comm, itemsize(dtype), std::vector<int64_t>{n},
                                                     place, shift_of(salt + t)));
        oracle_.push_back({std::vector<double>(n), std::vector<double>(n), std::vector<double>(n)});
        with_type(dtype, [&](auto type) {
            using T = decltype(type);
            if constexpr (!std::is_integral_v<T>)
                for (int64_t i = 0; i < n; ++i) {
                    const float w = static_cast<float>((i + t + salt) % 9) / 4 - 1;
                    weights_[t]->template data<T>()[i] = rounded<T>(w);
                    oracle_[t].weight[i] = w;
                }
        });
    }
    if (has_master)
        slices.for_runs(comm.rank, 0, slices.size(comm.rank), [&](const Run& run) {
            for (int64_t i = 0; i < run.length; ++i)
                state_[2]->data<float>()[run.index + i] =
                    static_cast<float>(oracle_[run.tensor].weight[run.offset + i]);
        });
}

bool AdamCheck::has(int tensor, int rank) const {
    if (absent_ == Absent::none) return true;
    if (absent_ == Absent::some_everywhere && tensor % 3 == 0) return false;
    return (tensor * 7 + rank * 3 + salt_) % 4 != 0;
}

void AdamCheck::fill(Absent absent, uint32_t salt) {
    absent_ = absent;
    salt_ = salt;
    for (size_t t = 0; t < numels_.size(); ++t)
        with_type(dtype_, [&](auto type) {
            using T = decltype(type);
            if constexpr (!std::is_integral_v<T>)
                for (int64_t i = 0; i < numels_[t]; ++i)
                    gradients_[t]->template data<T>()[i] =
                        rounded<T>(static_cast<SumOf<T>>(gradient(comm_.rank, t, i, salt)));
        });
}

void AdamCheck::run(const AdamHyper& hyper, Stream stream) {
    std::vector<void*> weights;
    std::vector<const void*> gradients;
    for (size_t t = 0; t < numels_.size(); ++t) {
        weights.push_back(weights_[t]->data());
        gradients.push_back(has(static_cast<int>(t), comm_.rank) ? gradients_[t]->data() : nullptr);
    }
    comm_.rs_adam_ag(*list_, dtype_, weights, gradients, hyper,
                     {state_[0]->data<float>(), state_[1]->data<float>(),
                      state_.size() > 2 ? state_[2]->data<float>() : nullptr},
                     stream);
}

void AdamCheck::call(Stream stream) { run(hyper_, stream); }

void AdamCheck::disagree(double lr) {
    AdamHyper hyper = hyper_;
    hyper.lr = lr;
    run(hyper, nullptr);
}

void AdamCheck::check() {
    const AdamHyper& h = hyper_;
    const double rounding = dtype_ == DType::f32 ? 1e-5 : dtype_ == DType::f16 ? 1e-3 : 8e-3;
    for (size_t t = 0; t < numels_.size(); ++t) {
        Oracle& oracle = oracle_[t];
        std::vector<int> ranks;
        for (int r = 0; r < comm_.world; ++r)
            if (has(static_cast<int>(t), r)) ranks.push_back(r);
        oracle.steps += !ranks.empty();
        const auto steps = static_cast<double>(oracle.steps);
        const double bias1 = h.bias_correction ? 1 - pow(h.beta1, steps) : 1;
        const double bias2 = h.bias_correction ? 1 - pow(h.beta2, steps) : 1;
        for (int64_t i = 0; i < numels_[t]; ++i) {
            double& w = oracle.weight[i];
            double& m = oracle.exp_avg[i];
            double& v = oracle.exp_avg_sq[i];
            if (!ranks.empty()) {
                double g = 0;
                for (const int r : ranks) g += gradient(r, t, i, salt_);
                if (h.average_grads) g /= comm_.world;
                if (h.adam_w_mode)
                    w -= h.lr * h.weight_decay * w;
                else
                    g += h.weight_decay * w;
                m = h.beta1 * m + (1 - h.beta1) * g;
                v = h.beta2 * v + (1 - h.beta2) * g * g;
                w -= h.lr / bias1 * m / (sqrt(v / bias2) + h.eps);
            }
            const double found = with_type(dtype_, [&](auto type) -> double {
                return widen(weights_[t]->template data<decltype(type)>()[i]);
            });
            if (!(fabs(found - w) <= rounding * (fabs(w) + 0.1)))
                failed("rs_adam_ag_: element " + std::to_string(i) + " of tensor " +
                       std::to_string(t) + " is " + std::to_string(found) + ", not " +
                       std::to_string(w));
        }
        weights_[t]->expect_margins();
        gradients_[t]->expect_margins();
    }
    const std::vector<int64_t> steps = list_->steps(nullptr);
    for (size_t t = 0; t < numels_.size(); ++t)
        expect(steps[t] == oracle_[t].steps, "rs_adam_ag_: another number of steps");
}

uint64_t AdamCheck::checksum() const {
    uint64_t sum = 0;
    for (const auto& w : weights_) sum = sum * 31 + w->checksum();
    return sum;
}

}  // namespace coconet::native
