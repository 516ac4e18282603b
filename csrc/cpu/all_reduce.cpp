// all_reduce: skeleton 1 with the plain copy as op, and every rank as destination.
#include "cpu/collectives.h"

namespace coconet {

Stage stage_of(const Communicator& comm) {
    Stage stage;
    for (int r = 0; r < comm.world; ++r) {
        stage.input[r] = comm.stage_of(r);
        stage.result[r] = comm.result_of(r);
    }
    return stage;
}

namespace {

// output < 0: outside the heap.
void run(Communicator& comm, const Operand& x, bool average, int64_t output, void* private_output) {
    const FlatSlices slices(x.numel(), comm.world);
    const int dtype = static_cast<int>(x.dtype);
    ReduceArgs args;
    args.scale = average ? 1.0f / comm.world : 1.0f;
    // In place, the lines to write were just read: they are in the cache already.
    const bool in_place = comm.channel().descriptor(comm.rank).operands[1] >= 0;
    args.stream = !in_place && slices.slice * x.itemsize > kStreamBytes;
    if (output >= 0) {
        args.num_dst = 0;
        args.dst[args.num_dst++] = comm.heap_of(comm.rank) + output;
        for (int r = 0; r < comm.world; ++r) {
            const Descriptor& d = comm.channel().descriptor(r);
            args.src[r] = comm.heap_of(r) + d.operands[0];
            const int64_t at = d.operands[1] >= 0 ? d.operands[1] : output;
            if (r != comm.rank) args.dst[args.num_dst++] = comm.heap_of(r) + at;
        }
        kernels().all_reduce[dtype](comm.channel(), slices, args);
    } else {
        args.input = x.data;
        args.output = private_output;
        args.stage = stage_of(comm);
        kernels().all_reduce_staged[dtype](comm.channel(), slices, args);
    }
}

Descriptor describe(const Operand& x, bool average, bool in_place, int64_t offset) {
    DescriptorBuilder builder(OpCode::all_reduce);
    builder.add(static_cast<int64_t>(x.dtype)).add(static_cast<int64_t>(average));
    builder.add(static_cast<int64_t>(in_place)).add_shape(x.sizes, x.dims);
    builder.d.operands[0] = offset;
    builder.d.operands[1] = in_place ? offset : kPrivate;  // known beforehand, may differ by rank
    return builder.d;
}

bool in_heap(const Descriptor& d) { return d.operands[0] >= 0; }

}  // namespace

Output all_reduce(Communicator& comm, const Operand& x, bool average, const NewOutput& new_output) {
    return comm.call(OpCode::all_reduce, [&]() -> Output {
        const int64_t offset = comm.heap()->offset_of(x.data, x.bytes());
        comm.enter(describe(x, average, false, offset), offset >= 0);
        Output block;
        if (comm.all_ranks(in_heap)) block = comm.allocate(x.bytes());
        run(comm, x, average, block ? block->offset : kPrivate,
            block ? nullptr : new_output(x.dims > 0 ? x.sizes[0] : 1));
        return block;
    });
}

void all_reduce_(Communicator& comm, const Operand& x, bool average) {
    comm.call(OpCode::all_reduce, [&] {
        const int64_t offset = comm.heap()->offset_of(x.data, x.bytes());
        comm.enter(describe(x, average, true, offset));
        run(comm, x, average, comm.all_ranks(in_heap) ? offset : kPrivate, x.data);
    });
}

}  // namespace coconet
