// The kernel table for one instruction set. Included by kernels_*.cpp inside their target pragma.
#pragma once

#include "cpu/machine.h"
#include "cpu/staged.h"

namespace coconet::COCONET_ISA {

namespace {

template <class T>
struct AllReduceIo {
    using In = T;
    using Out = T;
    const ReduceArgs& args;
    int world;
    bool stream;

    COCONET_HD int sources(const Run& run, const T** src) const {
        for (int r = 0; r < world; ++r) src[r] = static_cast<const T*>(args.src[r]) + run.offset;
        return world;
    }
    COCONET_HD int destinations(const Run& run, T** dst) const {
        for (int d = 0; d < args.num_dst; ++d) dst[d] = static_cast<T*>(args.dst[d]) + run.offset;
        return args.num_dst;
    }
};

// The output is the slice alone.
template <class T>
struct ReduceScatterIo : AllReduceIo<T> {
    COCONET_HD int destinations(const Run& run, T** dst) const {
        dst[0] = static_cast<T*>(this->args.dst[0]) + run.index;
        return 1;
    }
};

template <class T, bool Gather>
struct StagedReduceIo {
    using In = T;
    using Out = T;
    static constexpr bool kGather = Gather;
    const ReduceArgs& args;

    COCONET_HD bool contributes(int, int32_t) const { return true; }
    COCONET_HD bool anyone(int32_t) const { return true; }
    COCONET_HD const T* input(const Run& run) const {
        return static_cast<const T*>(args.input) + run.offset;
    }
    COCONET_HD T* output(const Run& run) const {
        return static_cast<T*>(args.output) + (Gather ? run.offset : run.index);
    }
};

template <class T>
struct AdamIo {
    using In = T;
    using Out = T;
    const AdamArgs& args;
    int rank, world;
    bool stream;

    COCONET_HD int sources(const Run& run, const T** src) const {
        int n = 0;
        for (int r = 0; r < world; ++r) {
            const int64_t at = args.entries[r][run.tensor].gradient;
            if (at != kAbsent) src[n++] = reinterpret_cast<T*>(args.heaps[r] + at) + run.offset;
        }
        return n;
    }
    COCONET_HD int destinations(const Run& run, T** dst) const {
        int n = 0;
        dst[n++] = static_cast<T*>(args.weights[run.tensor]) + run.offset;
        for (int r = 0; r < world; ++r) {
            const int64_t at = args.entries[r][run.tensor].weight;
            if (r != rank) dst[n++] = reinterpret_cast<T*>(args.heaps[r] + at) + run.offset;
        }
        return n;
    }
};

template <class T>
struct StagedAdamIo {
    using In = T;
    using Out = T;
    static constexpr bool kGather = true;
    const AdamArgs& args;
    int world;

    COCONET_HD bool contributes(int r, int32_t tensor) const {
        return args.entries[r][tensor].gradient != kAbsent;
    }
    COCONET_HD bool anyone(int32_t tensor) const {
        for (int r = 0; r < world; ++r)
            if (contributes(r, tensor)) return true;
        return false;
    }
    COCONET_HD const T* input(const Run& run) const {
        return static_cast<const T*>(args.gradients[run.tensor]) + run.offset;
    }
    COCONET_HD T* output(const Run& run) const {
        return static_cast<T*>(args.weights[run.tensor]) + run.offset;
    }
};

template <class T>
void all_reduce(Channel& channel, const FlatSlices& slices, const ReduceArgs& args) {
    CpuMachine machine{channel, channel.rank};
    rs_op_ag(machine, slices, AllReduceIo<T>{args, channel.world, args.stream},
             ScaleOp{args.scale});
}

template <class T>
void all_reduce_staged(Channel& channel, const FlatSlices& slices, const ReduceArgs& args) {
    CpuMachine machine{channel, channel.rank};
    rs_op_ag_staged(machine, slices, StagedReduceIo<T, true>{args}, ScaleOp{args.scale}, args.stage,
                    args.stream);
}

template <class T>
void reduce_scatter(Channel& channel, const DimSlices& slices, const ReduceArgs& args) {
    CpuMachine machine{channel, channel.rank};
    rs_op_ag(machine, slices, ReduceScatterIo<T>{{args, channel.world, args.stream}},
             ScaleOp{args.scale});
}

template <class T>
void reduce_scatter_staged(Channel& channel, const DimSlices& slices, const ReduceArgs& args) {
    CpuMachine machine{channel, channel.rank};
    rs_op_ag_staged(machine, slices, StagedReduceIo<T, false>{args}, ScaleOp{args.scale},
                    args.stage, args.stream);
}

template <class T>
AdamOp<T> adam_op(const AdamArgs& args) {
    return {args.constants, args.steps,      reinterpret_cast<T* const*>(args.weights),
            args.exp_avg,   args.exp_avg_sq, args.master};
}

template <class T>
void rs_adam_ag(Channel& channel, const AdamArgs& args) {
    CpuMachine machine{channel, channel.rank};
    rs_op_ag(machine, args.slices, AdamIo<T>{args, channel.rank, channel.world, args.stream},
             adam_op<T>(args));
}

template <class T>
void rs_adam_ag_staged(Channel& channel, const AdamArgs& args) {
    CpuMachine machine{channel, channel.rank};
    rs_op_ag_staged(machine, args.slices, StagedAdamIo<T>{args, channel.world}, adam_op<T>(args),
                    args.stage, args.stream);
}

void copy(void* dst, const void* src, int64_t bytes, bool stream) {
    CpuMachine::copy_bytes(static_cast<char*>(dst), static_cast<const char*>(src), bytes, stream);
}

}  // namespace

const Kernels kKernels = {
    COCONET_ISA_NAME,
    copy,
    {all_reduce<float>, all_reduce<bf16_t>, all_reduce<f16_t>},
    {all_reduce_staged<float>, all_reduce_staged<bf16_t>, all_reduce_staged<f16_t>},
    {reduce_scatter<float>, reduce_scatter<bf16_t>, reduce_scatter<f16_t>},
    {reduce_scatter_staged<float>, reduce_scatter_staged<bf16_t>, reduce_scatter_staged<f16_t>},
    {rs_adam_ag<float>, rs_adam_ag<bf16_t>, rs_adam_ag<f16_t>},
    {rs_adam_ag_staged<float>, rs_adam_ag_staged<bf16_t>, rs_adam_ag_staged<f16_t>},
};

}  // namespace coconet::COCONET_ISA
