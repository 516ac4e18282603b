// The kernels of the CPU backend, compiled once per instruction set and chosen at run time.
// Plain structs only: these are seen by files compiled for different instruction sets.
#pragma once

#include "common/adam.h"
#include "common/layout.h"
#include "cpu/channel.h"

namespace coconet {

// The ranks' staging areas (see layout.h), and how much of a slot is used.
struct Stage {
    int64_t chunk_bytes;
    char* area[kMaxRanks];

    COCONET_HD char* slot(int rank, uint32_t chunk) const {
        return area[rank] + (chunk % kStageSlots) * kStageSlotBytes;
    }
};

// all_reduce and reduce_scatter of one tensor.
struct ReduceArgs {
    // direct and one-shot: every rank's input, and the outputs to write, the own one first
    const void* src[kMaxRanks];
    void* dst[kMaxRanks];
    int num_dst;
    // staged: the own operands, moved through the stage
    const void* input;
    void* output;
    Stage stage;

    DType dtype;
    double scale;
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

    DType dtype;
    AdamConstants constants;
    const AdamStep* steps;  // per tensor
    float *exp_avg, *exp_avg_sq, *master;
    bool stream;
};

struct Kernels {
    const char* isa;
    void (*copy)(void* dst, const void* src, int64_t bytes, bool stream);
    void (*all_reduce)(Channel&, const FlatSlices&, const ReduceArgs&);
    void (*all_reduce_staged)(Channel&, const FlatSlices&, const ReduceArgs&);
    void (*reduce_scatter)(Channel&, const DimSlices&, const ReduceArgs&);
    void (*reduce_scatter_staged)(Channel&, const DimSlices&, const ReduceArgs&);
    // The inputs came with the calls' descriptors: no rank waits for another any more.
    void (*reduce_one_shot)(Channel&, const DimSlices&, const ReduceArgs&);
    void (*rs_adam_ag)(Channel&, const AdamArgs&);
    void (*rs_adam_ag_staged)(Channel&, const AdamArgs&);
};

// The widest variant that this processor has, or the one that COCONET_ISA names.
const Kernels& kernels();

namespace avx512 {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace portable {
extern const Kernels kKernels;
}

}  // namespace coconet
