// Adam and AdamW on the own slice, in fp32 (Kingma & Ba 2015; Loshchilov & Hutter 2019), with the
// formulas of torch.optim:
//   g = scale * sum of gradients         + weight_decay * w     (L2: Adam)
//   w = w - lr * weight_decay * w                               (decoupled: AdamW)
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g^2
//   w = w - (lr / (1 - beta1^t)) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
// State is stored by position in the slice; a low-precision parameter has an fp32 master there.
#pragma once

#include "common/rs_op_ag.h"

namespace coconet {

struct AdamConstants {
    float grad_scale;  // 1 / world size for averaged gradients
    float l2;          // weight decay added to the gradient, or 0
    float decay;       // 1 - lr * decoupled weight decay
    float beta1, beta2;
    float one_minus_beta1, one_minus_beta2;
    float eps;
};

// Bias corrections depend on how often the tensor was stepped.
struct AdamStep {
    float step_size;       // lr / (1 - beta1^t)
    float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^t)
};

template <class Weight>
struct AdamOp {
    static constexpr bool kHasMaster = sizeof(Weight) < sizeof(float);
    // An fp32 weight was just loaded from its own copy: its line is cached.
    static constexpr bool kStreamOwn = kHasMaster;

    AdamConstants constants;
    const AdamStep* steps;   // per tensor
    Weight* const* weights;  // own copy, per tensor
    float* exp_avg;          // own slice
    float* exp_avg_sq;       // own slice
    float* master;           // own slice; unused for fp32 weights

    template <class Pack>
    struct Fetched {
        Pack w, m, v;
    };

    struct Bound {
        static constexpr bool kStreamOwn = AdamOp::kStreamOwn, kStateless = false;
        AdamConstants c;
        AdamStep step;
        float *weight, *exp_avg, *exp_avg_sq;

        template <class Machine, class Lanes>
        COCONET_HD Fetched<typename Machine::Pack> fetch(const Machine& machine, int64_t i,
                                                         Lanes lanes) const {
            return {machine.load(weight + i, lanes), machine.load(exp_avg + i, lanes),
                    machine.load(exp_avg_sq + i, lanes)};
        }

        template <class Machine, class Lanes, class Pack>
        COCONET_HD Pack apply(const Machine& machine, int64_t i, Lanes lanes,
                              const Fetched<Pack>& old, const Pack& sum) const {
            Pack w = old.w;
            Pack g = sum * c.grad_scale;
            if (c.l2 != 0) g = machine.fma(machine.splat(c.l2), w, g);
            const Pack m = machine.fma(machine.splat(c.beta1), old.m, g * c.one_minus_beta1);
            const Pack v = machine.fma(machine.splat(c.beta2), old.v, g * g * c.one_minus_beta2);
            const Pack denominator = machine.fma(
                machine.sqrt(v), machine.splat(step.inv_sqrt_bias2), machine.splat(c.eps));
            w = w * c.decay - (m * step.step_size) / denominator;
            machine.store(exp_avg + i, m, lanes);
            machine.store(exp_avg_sq + i, v, lanes);
            if constexpr (kHasMaster) machine.store(weight + i, w, lanes);
            return w;
        }
    };

    COCONET_HD Bound bind(const Run& run) const {
        float* weight;
        if constexpr (kHasMaster)
            weight = master + run.index;
        else
            weight = weights[run.tensor] + run.offset;
        return {constants, steps[run.tensor], weight, exp_avg + run.index, exp_avg_sq + run.index};
    }
};

}  // namespace coconet
