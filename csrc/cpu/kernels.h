// The kernels of the CPU backend, compiled once per instruction set and chosen at run time.
// Plain structs only: these are seen by files compiled for different instruction sets.
#pragma once

#include "common/adam.h"
#include "common/layout.h"
#include "cpu/channel.h"

namespace coconet {

// The ranks' staging areas (see layout.h).
struct Stage {
    char* input[kMaxRanks];
    char* result[kMaxRanks];
};

// all_reduce and reduce_scatter of one tensor.
struct ReduceArgs {
    // in the heap: every rank's input, and the outputs to write, the own one first
    const void* src[kMaxRanks];
    void* dst[kMaxRanks];
    int num_dst;
    // not in the heap: the own operands, moved through the stage
    const void* input;
    void* output;
    Stage stage;

    float scale;
    bool stream;  // write past the cache
};

// RS-Adam-AG of a list of tensors.
struct AdamArgs {
    ListSlices slices;
    const TensorEntry* entries[kMaxRanks];  // every rank's list
    char* heaps[kMaxRanks];
    void* const* weights;          // own, per tensor
    const void* const* gradients;  // own, per tensor; nullptr: absent
    Stage stage;

    AdamConstants constants;
    const AdamStep* steps;  // per tensor
    float *exp_avg, *exp_avg_sq, *master;
    bool stream;
};

struct Kernels {
    const char* isa;
    void (*copy)(void* dst, const void* src, int64_t bytes, bool stream);
    // By dtype: f32, bf16, f16.
    void (*all_reduce[kNumComputeDTypes])(Channel&, const FlatSlices&, const ReduceArgs&);
    void (*all_reduce_staged[kNumComputeDTypes])(Channel&, const FlatSlices&, const ReduceArgs&);
    void (*reduce_scatter[kNumComputeDTypes])(Channel&, const DimSlices&, const ReduceArgs&);
    void (*reduce_scatter_staged[kNumComputeDTypes])(Channel&, const DimSlices&, const ReduceArgs&);
    void (*rs_adam_ag[kNumComputeDTypes])(Channel&, const AdamArgs&);
    void (*rs_adam_ag_staged[kNumComputeDTypes])(Channel&, const AdamArgs&);
};

// The variant for this processor, or the portable one where COCONET_ISA=portable asks for it.
const Kernels& kernels();

namespace avx2 {
extern const Kernels kKernels;
}
namespace portable {
extern const Kernels kKernels;
}

}  // namespace coconet
