// The kernel table for one instruction set. Included by kernels_*.cpp inside their target pragma.
#pragma once

#include "common/staged.h"
#include "cpu/kernels.h"
#include "cpu/machine.h"

namespace coconet::COCONET_ISA {

namespace {

template <class T>
struct AllReduceIo {
    using In = T;
    using Out = T;
    const ReduceArgs& args;
    int world;
    bool stream;

    COCONET_HD Pointers<const T> sources(const Run& run) const {
        Pointers<const T> src;
        for (int r = 0; r < world; ++r) src.add(static_cast<const T*>(args.src[r]) + run.offset);
        return src;
    }
    COCONET_HD Pointers<T> destinations(const Run& run) const {
        Pointers<T> dst;
        for (int d = 0; d < args.num_dst; ++d) dst.add(static_cast<T*>(args.dst[d]) + run.offset);
        return dst;
    }
};

// The output is the slice alone.
template <class T>
struct ReduceScatterIo : AllReduceIo<T> {
    COCONET_HD Pointers<T> destinations(const Run& run) const {
        Pointers<T> dst;
        dst.add(static_cast<T*>(this->args.dst[0]) + run.index);
        return dst;
    }
};

// The places of the staged form, by rank; Io: who contributes.
template <class T, class Io, class Place>
COCONET_HD Pointers<const T> staged_sources(const Io& io, int rank, int world, const Run& run,
                                            const Place& place) {
    Pointers<const T> src;
    for (int r = 0; r < world; ++r)
        if (io.contributes(r, run.tensor)) src.add(r == rank ? io.input(run) : place(r));
    return src;
}
template <class T, class Io, class Place>
COCONET_HD Pointers<T> staged_destinations(const Io& io, int rank, int world, const Run& run,
                                           const Place& place) {
    Pointers<T> dst;
    dst.add(io.output(run));
    for (int r = 0; Io::kGather && r < world; ++r)
        if (r != rank) dst.add(place(r));
    return dst;
}

template <class T, bool Gather>
struct StagedReduceIo {
    using In = T;
    using Out = T;
    static constexpr bool kGather = Gather;
    const ReduceArgs& args;
    int rank, world;

    template <class Place>
    COCONET_HD Pointers<const T> sources(const Run& run, const Place& place) const {
        return staged_sources<T>(*this, rank, world, run, place);
    }
    template <class Place>
    COCONET_HD Pointers<T> destinations(const Run& run, const Place& place) const {
        return staged_destinations<T>(*this, rank, world, run, place);
    }

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

    COCONET_HD Pointers<const T> sources(const Run& run) const {
        Pointers<const T> src;
        for (int r = 0; r < world; ++r) {
            const int64_t at = args.entries[r][run.tensor].gradient;
            if (at != kAbsent) src.add(reinterpret_cast<T*>(args.heaps[r] + at) + run.offset);
        }
        return src;
    }
    COCONET_HD Pointers<T> destinations(const Run& run) const {
        Pointers<T> dst;
        dst.add(static_cast<T*>(args.weights[run.tensor]) + run.offset);
        for (int r = 0; r < world; ++r) {
            const int64_t at = args.entries[r][run.tensor].weight;
            if (r != rank) dst.add(reinterpret_cast<T*>(args.heaps[r] + at) + run.offset);
        }
        return dst;
    }
};

template <class T>
struct StagedAdamIo {
    using In = T;
    using Out = T;
    static constexpr bool kGather = true;
    const AdamArgs& args;
    int rank, world;

    template <class Place>
    COCONET_HD Pointers<const T> sources(const Run& run, const Place& place) const {
        return staged_sources<T>(*this, rank, world, run, place);
    }
    template <class Place>
    COCONET_HD Pointers<T> destinations(const Run& run, const Place& place) const {
        return staged_destinations<T>(*this, rank, world, run, place);
    }

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

// Integers are only summed.
template <class T>
auto reduce_op([[maybe_unused]] const ReduceArgs& args) {
    using Sum = SumOf<T>;
    if constexpr (static_cast<Sum>(0.5) != 0)
        return ScaleOp<Sum>{static_cast<Sum>(args.scale)};
    else
        return SumOp{};
}

template <class T>
struct Type {
    using type = T;
};

// Calls f(Type<T>) with the element type.
template <class F>
void with_adam_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::bf16:
            return f(Type<bf16_t>{});
        case DType::f16:
            return f(Type<f16_t>{});
        default:
            return f(Type<float>{});
    }
}
template <class F>
void with_reduce_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::f64:
            return f(Type<double>{});
        case DType::i64:
            return f(Type<uint64_t>{});  // the same sum, and overflow is defined
        case DType::i32:
            return f(Type<uint32_t>{});
        default:
            return with_adam_type(dtype, f);
    }
}

void all_reduce(Channel& channel, const FlatSlices& slices, const ReduceArgs& args) {
    with_reduce_type(args.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const CpuMachine<SumOf<T>> machine(channel);
        rs_op_ag(machine, slices, AllReduceIo<T>{args, channel.world, args.stream},
                 reduce_op<T>(args));
    });
}

void all_reduce_staged(Channel& channel, const FlatSlices& slices, const ReduceArgs& args) {
    with_reduce_type(args.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const CpuMachine<SumOf<T>> machine(channel);
        rs_op_ag_staged(machine, slices, StagedReduceIo<T, true>{args, machine.rank, machine.world},
                        reduce_op<T>(args), args.stage, args.stream);
    });
}

void reduce_scatter(Channel& channel, const DimSlices& slices, const ReduceArgs& args) {
    with_reduce_type(args.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const CpuMachine<SumOf<T>> machine(channel);
        rs_op_ag(machine, slices, ReduceScatterIo<T>{{args, channel.world, args.stream}},
                 reduce_op<T>(args));
    });
}

void reduce_one_shot(Channel& channel, const DimSlices& slices, const ReduceArgs& args) {
    with_reduce_type(args.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const CpuMachine<SumOf<T>> machine(channel);
        reduce_slice(machine, slices, ReduceScatterIo<T>{{args, channel.world, false}},
                     reduce_op<T>(args));
    });
    channel.leave();
}

void reduce_scatter_staged(Channel& channel, const DimSlices& slices, const ReduceArgs& args) {
    with_reduce_type(args.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const CpuMachine<SumOf<T>> machine(channel);
        rs_op_ag_staged(machine, slices,
                        StagedReduceIo<T, false>{args, machine.rank, machine.world},
                        reduce_op<T>(args), args.stage, args.stream);
    });
}

template <class T>
AdamOp<T> adam_op(const AdamArgs& args) {
    return {args.constants, args.steps,      reinterpret_cast<T* const*>(args.weights),
            args.exp_avg,   args.exp_avg_sq, args.master};
}

void rs_adam_ag(Channel& channel, const AdamArgs& args) {
    with_adam_type(args.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const CpuMachine<float> machine(channel);
        rs_op_ag(machine, args.slices, AdamIo<T>{args, channel.rank, channel.world, args.stream},
                 adam_op<T>(args));
    });
}

void rs_adam_ag_staged(Channel& channel, const AdamArgs& args) {
    with_adam_type(args.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const CpuMachine<float> machine(channel);
        rs_op_ag_staged(machine, args.slices, StagedAdamIo<T>{args, channel.rank, channel.world},
                        adam_op<T>(args), args.stage, args.stream);
    });
}

void copy(void* dst, const void* src, int64_t bytes, bool stream) {
    copy_bytes(dst, src, bytes, stream);
}

}  // namespace

const Kernels kKernels = {
    COCONET_ISA_NAME,  copy,           all_reduce,
    all_reduce_staged, reduce_scatter, reduce_scatter_staged,
    reduce_one_shot,   rs_adam_ag,     rs_adam_ag_staged,
};

}  // namespace coconet::COCONET_ISA
