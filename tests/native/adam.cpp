#include "adam.h"

#include <math.h>

namespace coconet::native {

namespace {

constexpr AdamHyper kHyper{0.01, 0.9, 0.99, 1e-6, 0.1, true, true, true};

// Steps of 1/16: exact in every dtype, and so are their sums.
float gradient(int rank, int64_t t, int64_t i, uint32_t salt) {
    return static_cast<float>((i * 5 + rank * 3 + t + salt) % 13 - 6) / 16;
}

}  // namespace

AdamCheck::AdamCheck(std::shared_ptr<Communicator> comm, DType dtype, std::vector<int64_t> numels,
                     Place place, uint32_t salt)
    : dtype_(dtype), place_(place), list_(comm, std::move(numels)), steps_(list_.size(), 0) {
    const ListSlices slices = list_.slices();
    exp_avg_.resize(slices.slice);
    exp_avg_sq_.resize(slices.slice);
    if (dtype != DType::f32) master_.resize(slices.slice);
    for (int t = 0; t < list_.size(); ++t) {
        const int64_t n = list_.numels[t];
        weights_.push_back(
            std::make_unique<Tensor>(*comm, itemsize(dtype), std::vector<int64_t>{n}, place));
        oracle_.push_back({std::vector<double>(n), std::vector<double>(n), std::vector<double>(n)});
        for (int64_t i = 0; i < n; ++i) {
            const float w = static_cast<float>((i + t + salt) % 9) / 4 - 1;
            put(dtype, weights_[t]->data(), i, w);
            oracle_[t].weight[i] = w;
        }
    }
    if (!master_.empty())
        slices.for_runs(comm->rank, 0, slices.size(comm->rank), [&](const Run& run) {
            for (int64_t i = 0; i < run.length; ++i)
                master_[run.index + i] = get(dtype, weights_[run.tensor]->data(), run.offset + i);
        });
}

void AdamCheck::run(const AdamHyper& hyper, const std::vector<const void*>& gradients) {
    std::vector<void*> weights;
    for (const auto& w : weights_) weights.push_back(w->data());
    rs_adam_ag(list_, dtype_, weights, gradients, hyper, exp_avg_.data(), exp_avg_sq_.data(),
               master_.empty() ? nullptr : master_.data());
}

void AdamCheck::step(uint64_t absent, uint32_t salt) {
    Communicator& comm = *list_.comm;
    const auto has = [&](int t, int rank) { return !(absent >> (t * comm.world + rank) & 1); };
    std::vector<std::unique_ptr<Tensor>> gradients;
    std::vector<const void*> pointers;
    for (int t = 0; t < list_.size(); ++t) {
        const int64_t n = list_.numels[t];
        gradients.push_back(
            std::make_unique<Tensor>(comm, itemsize(dtype_), std::vector<int64_t>{n}, place_));
        for (int64_t i = 0; i < n; ++i)
            put(dtype_, gradients[t]->data(), i, gradient(comm.rank, t, i, salt));
        pointers.push_back(has(t, comm.rank) ? gradients[t]->data() : nullptr);
    }
    run(kHyper, pointers);

    const AdamHyper& h = kHyper;
    const double rounding = dtype_ == DType::f32 ? 1e-5 : dtype_ == DType::f16 ? 1e-3 : 8e-3;
    for (int t = 0; t < list_.size(); ++t) {
        bool stepped = false;
        for (int r = 0; r < comm.world; ++r) stepped = stepped || has(t, r);
        steps_[t] += stepped;
        const double bias1 = 1 - pow(h.beta1, steps_[t]), bias2 = 1 - pow(h.beta2, steps_[t]);
        for (int64_t i = 0; i < list_.numels[t]; ++i) {
            double& w = oracle_[t].weight[i];
            double& m = oracle_[t].exp_avg[i];
            double& v = oracle_[t].exp_avg_sq[i];
            if (stepped) {
                double g = 0;
                for (int r = 0; r < comm.world; ++r)
                    if (has(t, r)) g += gradient(r, t, i, salt);
                g /= comm.world;
                w -= h.lr * h.weight_decay * w;
                m = h.beta1 * m + (1 - h.beta1) * g;
                v = h.beta2 * v + (1 - h.beta2) * g * g;
                w -= h.lr / bias1 * m / (sqrt(v / bias2) + h.eps);
            }
            const double found = get(dtype_, weights_[t]->data(), i);
            if (!(fabs(found - w) <= rounding * (fabs(w) + 0.1)))
                failed("rs_adam_ag_: element " + std::to_string(i) + " of tensor " +
                       std::to_string(t) + " is " + std::to_string(found) + ", not " +
                       std::to_string(w));
        }
    }
}

void AdamCheck::disagree(double lr) {
    AdamHyper hyper = kHyper;
    hyper.lr = lr;
    run(hyper, std::vector<const void*>(list_.size(), nullptr));
}

uint64_t AdamCheck::checksum() const {
    uint64_t sum = 0;
    for (const auto& w : weights_) sum = sum * 31 + w->checksum();
    return sum;
}

}  // namespace coconet::native
