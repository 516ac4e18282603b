// How the elements of an operand are cut into one slice per rank, and how a slice lies in memory.
//
// A Slices type gives
//   1. size(rank)                      elements of that rank's slice,
//   2. for_runs(rank, from, to, f)     calls f(Run) for each contiguous run of elements
//                                      [from, to) of that slice, in order.
#pragma once

#include "common/base.h"

namespace coconet {

struct Run {
    int32_t tensor;  // which tensor of a list; 0 for a single tensor
    int64_t offset;  // first element within that tensor
    int64_t index;   // first element within the slice
    int64_t length;  // elements
};

// Slice borders and tensors of a list are multiples of this many elements: no two ranks share a
// cache line, and packs of any width stay aligned to the tensor's start.
constexpr int64_t kSliceAlign = 64;

COCONET_HD constexpr int64_t aligned_slice(int64_t numel, int world) {
    return round_up(ceil_div(numel, world), kSliceAlign);
}

// all_reduce: the flat range of one tensor.
struct FlatSlices {
    int64_t numel, slice;

    COCONET_HD FlatSlices(int64_t n, int world) : numel(n), slice(aligned_slice(n, world)) {}
    COCONET_HD int64_t begin(int rank) const { return min64(rank * slice, numel); }
    COCONET_HD int64_t size(int rank) const { return begin(rank + 1) - begin(rank); }
    template <class F>
    COCONET_HD void for_runs(int rank, int64_t from, int64_t to, F&& f) const {
        if (from < to) f(Run{0, begin(rank) + from, from, to - from});
    }
};

// How a dimension of n rows is cut: torch.tensor_split spreads the remainder over the first ranks,
// torch.chunk gives every rank but the last ones the rounded-up share; rows: by the caller.
enum class Split : int32_t { tensor_split, chunk, rows };

COCONET_HD int64_t split_begin(int64_t n, int rank, int world, Split split) {
    if (split == Split::chunk) return min64(rank * ceil_div(n, world), n);
    return rank * (n / world) + min64(rank, n % world);
}

// One dimension cut at begins[0..world]: tensor viewed as [outer, dim, inner]; a slice is
// [outer, begins[rank + 1] - begins[rank], inner].
struct DimSlices {
    int64_t outer, dim, inner;
    int64_t begins[kMaxRanks + 1];

    COCONET_HD int64_t rows(int rank) const { return begins[rank + 1] - begins[rank]; }
    COCONET_HD int64_t size(int rank) const { return outer * rows(rank) * inner; }
    template <class F>
    COCONET_HD void for_runs(int rank, int64_t from, int64_t to, F&& f) const {
        const int64_t length = rows(rank) * inner;
        const int64_t start = begins[rank] * inner;
        if (from >= to) return;
        auto [block, column] = divide(from, length);
        COCONET_NO_UNROLL
        while (from < to) {
            const int64_t n = min64(length - column, to - from);
            f(Run{0, block * dim * inner + start + column, from, n});
            from += n;
            ++block;
            column = 0;
        }
    }
};

// A list of tensors laid end to end, each start rounded up to kSliceAlign, cut evenly.
// starts has one entry per tensor; the padding between tensors belongs to no run.
struct ListSlices {
    const int64_t* starts;
    const int64_t* numels;
    int32_t num_tensors;
    int64_t total, slice;

    COCONET_HD int64_t begin(int rank) const { return min64(rank * slice, total); }
    COCONET_HD int64_t size(int rank) const { return begin(rank + 1) - begin(rank); }
    template <class F>
    COCONET_HD void for_runs(int rank, int64_t from, int64_t to, F&& f) const {
        const int64_t base = begin(rank);
        from += base;
        to += base;
        COCONET_NO_UNROLL
        for (int32_t t = find(from); t < num_tensors && starts[t] < to; ++t) {
            const int64_t first = max64(from, starts[t]);
            const int64_t last = min64(to, starts[t] + numels[t]);
            if (first < last) f(Run{t, first - starts[t], first - base, last - first});
        }
    }

  private:
    // The last tensor that starts at or before this element.
    COCONET_HD int32_t find(int64_t element) const {
        int32_t low = 0, high = num_tensors;
        while (high - low > 1) {
            const int32_t middle = (low + high) / 2;
            (starts[middle] <= element ? low : high) = middle;
        }
        return low;
    }
};

}  // namespace coconet
