// What the calls of the ops are made of, and their descriptors: the same on every backend. Host
// code.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "common/adam.h"
#include "common/descriptor.h"
#include "common/slices.h"

namespace coconet {

// A contiguous tensor.
struct Operand {
    void* data;
    DType dtype;
    int64_t itemsize;
    const int64_t* sizes;
    int64_t dims;

    int64_t numel() const { return product(0, dims); }
    int64_t bytes() const { return numel() * itemsize; }
    // Of the sizes of dimensions [from, to).
    int64_t product(int64_t from, int64_t to) const {
        int64_t n = 1;
        for (int64_t i = from; i < to; ++i) n *= sizes[i];
        return n;
    }
};

inline Descriptor describe_all_reduce(const Operand& x, bool average, bool in_place) {
    DescriptorBuilder b(OpCode::all_reduce);
    b.add(static_cast<int64_t>(x.dtype)).add(static_cast<int64_t>(average));
    b.add(static_cast<int64_t>(in_place)).add_shape(x.sizes, x.dims);
    return b.d;
}

inline Descriptor describe_reduce_scatter(const Operand& x, int64_t dim, bool average,
                                          Split split) {
    DescriptorBuilder b(OpCode::reduce_scatter);
    b.add(static_cast<int64_t>(x.dtype)).add(static_cast<int64_t>(average));
    b.add(static_cast<int64_t>(split)).add(dim).add_shape(x.sizes, x.dims);
    return b.d;
}

// size: the expected total along dim, or -1.
inline Descriptor describe_all_gather(const Operand& shard, int64_t dim, int64_t size) {
    std::vector<int64_t> rest(shard.sizes, shard.sizes + shard.dims);
    const int64_t rows = std::exchange(rest[dim], 1);
    DescriptorBuilder b(OpCode::all_gather);
    b.add(static_cast<int64_t>(shard.dtype)).add(shard.itemsize).add(dim).add(size);
    b.add(rows).add_shape(rest.data(), shard.dims);
    return b.d;
}

// x cut along dim at begins[0..world]; without begins as split says.
inline DimSlices dim_slices(const Operand& x, int64_t dim, const int64_t* begins, int world) {
    DimSlices slices{x.product(0, dim), x.sizes[dim], x.product(dim + 1, x.dims), {}};
    for (int r = 0; r <= world; ++r) slices.begins[r] = begins[r];
    return slices;
}
inline DimSlices dim_slices(const Operand& x, int64_t dim, Split split, int world) {
    int64_t begins[kMaxRanks + 1];
    for (int r = 0; r <= world; ++r) begins[r] = split_begin(x.sizes[dim], r, world, split);
    return dim_slices(x, dim, begins, world);
}

// How a list of tensors is cut into slices.
struct ListLayout {
    std::vector<int64_t> numels, starts;
    int64_t total = 0, slice;

    ListLayout(std::vector<int64_t> n, int world) : numels(std::move(n)) {
        for (const int64_t numel : numels) {
            starts.push_back(total);
            total += round_up(numel, kSliceAlign);
        }
        slice = aligned_slice(total, world);
    }
    int size() const { return static_cast<int>(numels.size()); }
    ListSlices slices() const { return {starts.data(), numels.data(), size(), total, slice}; }
};

struct AdamHyper {
    double lr, beta1, beta2, eps, weight_decay;
    bool adam_w_mode, bias_correction, average_grads;
};

inline Descriptor describe_rs_adam_ag(DType dtype, int tensors, const AdamHyper& h) {
    DescriptorBuilder b(OpCode::rs_adam_ag);
    b.add(static_cast<int64_t>(dtype)).add(static_cast<int64_t>(tensors));
    b.add(h.lr).add(h.beta1).add(h.beta2).add(h.eps).add(h.weight_decay);
    b.add(static_cast<int64_t>(h.adam_w_mode)).add(static_cast<int64_t>(h.bias_correction));
    b.add(static_cast<int64_t>(h.average_grads));
    return b.d;
}

inline AdamConstants adam_constants(const AdamHyper& h, int world) {
    AdamConstants c;
    c.grad_scale = h.average_grads ? 1.0f / static_cast<float>(world) : 1.0f;
    c.l2 = h.adam_w_mode ? 0.0f : static_cast<float>(h.weight_decay);
    c.decay = h.adam_w_mode ? static_cast<float>(1 - h.lr * h.weight_decay) : 1.0f;
    c.beta1 = static_cast<float>(h.beta1);
    c.beta2 = static_cast<float>(h.beta2);
    c.one_minus_beta1 = static_cast<float>(1 - h.beta1);
    c.one_minus_beta2 = static_cast<float>(1 - h.beta2);
    c.eps = static_cast<float>(h.eps);
    return c;
}

}  // namespace coconet
