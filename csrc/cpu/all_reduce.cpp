// all_reduce: skeleton 1 with the sum as op, and every rank as destination.
#include "cpu/collectives.h"

namespace coconet {

namespace {

// Operands and outputs of all ranks are in the heap; a new output has one offset everywhere.
void run_direct(Communicator& comm, const Operand& x, bool average, const Output& output) {
    const FlatSlices slices(x.numel(), comm.world);
    ReduceArgs args = reduce_args(comm, Path::direct, x, average);
    const auto add_destination = [&](int r) {
        const int64_t at = output ? output->offset : comm.channel().descriptor(r).operands[0];
        args.dst[args.num_dst++] = comm.heap_of(r) + at;
    };
    add_destination(comm.rank);
    for (int r = 0; r < comm.world; ++r)
        if (r != comm.rank) add_destination(r);
    // In place, the lines to write were just read: they are in the cache already.
    args.stream = output && writes_past_cache(comm, Path::direct, x.bytes());
    kernels().all_reduce(comm.channel(), slices, args);
}

void run_through_copies(Communicator& comm, Path path, const Operand& x, bool average,
                        void* output) {
    ReduceArgs args = reduce_args(comm, path, x, average);
    if (path == Path::one_shot) {
        // This rank's slice is everything.
        DimSlices whole{1, x.numel(), 1, {}};
        whole.begins[comm.rank + 1] = whole.dim;
        args.dst[0] = output;
        kernels().reduce_one_shot(comm.channel(), whole, args);
        return;
    }
    const FlatSlices slices(x.numel(), comm.world);
    args.output = output;
    args.stream = output != x.data && writes_past_cache(comm, path, x.bytes());
    kernels().all_reduce_staged(comm.channel(), slices, args);
}

}  // namespace

Output all_reduce(Communicator& comm, const Operand& x, bool average, const NewOutput& new_output) {
    return comm.call(OpCode::all_reduce, [&]() -> Output {
        Descriptor d = describe_all_reduce(x, average, false);
        const Path path = enter(comm, d, x, true);
        comm.probe(x.bytes());
        Output block;
        if (path == Path::direct) block = comm.allocate(x.bytes());
        if (block)
            run_direct(comm, x, average, block);
        else
            run_through_copies(comm, path == Path::direct ? Path::staged : path, x, average,
                               new_output(x.dims > 0 ? x.sizes[0] : 1));
        return block;
    });
}

void all_reduce_(Communicator& comm, const Operand& x, bool average) {
    comm.call(OpCode::all_reduce, [&] {
        Descriptor d = describe_all_reduce(x, average, true);
        const Path path = enter(comm, d, x, false);
        comm.probe(x.bytes());
        if (path == Path::direct)
            run_direct(comm, x, average, {});
        else
            run_through_copies(comm, path, x, average, x.data);
    });
}

}  // namespace coconet
