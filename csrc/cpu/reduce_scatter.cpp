// reduce_scatter: skeleton 1 with the own slice as the only destination.
#include "cpu/collectives.h"

namespace coconet {

DimSlices dim_slices(const Operand& x, int64_t dim, const int64_t* begins, int world) {
    DimSlices slices{x.product(0, dim), x.sizes[dim], x.product(dim + 1, x.dims), {}};
    for (int r = 0; r <= world; ++r) slices.begins[r] = begins[r];
    return slices;
}

DimSlices dim_slices(const Operand& x, int64_t dim, Split split, int world) {
    int64_t begins[kMaxRanks + 1];
    for (int r = 0; r <= world; ++r) begins[r] = split_begin(x.sizes[dim], r, world, split);
    return dim_slices(x, dim, begins, world);
}

Output reduce_scatter(Communicator& comm, const Operand& x, int64_t dim, bool average, Split split,
                      const DimSlices& slices, const NewOutput& new_output) {
    return comm.call(OpCode::reduce_scatter, [&]() -> Output {
        const int64_t offset = comm.heap()->offset_of(x.data, x.bytes());
        DescriptorBuilder builder(OpCode::reduce_scatter);
        builder.add(static_cast<int64_t>(x.dtype)).add(static_cast<int64_t>(average));
        builder.add(static_cast<int64_t>(split)).add(dim).add_shape(x.sizes, x.dims);
        builder.d.operands[0] = offset;
        comm.enter(builder.d, offset >= 0);

        const bool direct = comm.all_ranks([](const Descriptor& d) { return d.operands[0] >= 0; });
        int64_t longest = 0;
        for (int r = 0; r < comm.world; ++r) longest = max64(longest, slices.size(r) * x.itemsize);
        Output block;
        if (direct) block = comm.allocate(longest);
        void* output =
            block ? comm.heap_of(comm.rank) + block->offset : new_output(slices.rows(comm.rank));
        ReduceArgs args;
        args.scale = average ? 1.0f / comm.world : 1.0f;
        args.stream = longest > kStreamBytes;
        const int dtype = static_cast<int>(x.dtype);
        if (direct) {
            args.dst[0] = output;
            args.num_dst = 1;
            for (int r = 0; r < comm.world; ++r)
                args.src[r] = comm.heap_of(r) + comm.channel().descriptor(r).operands[0];
            kernels().reduce_scatter[dtype](comm.channel(), slices, args);
        } else {
            args.input = x.data;
            args.output = output;
            args.stage = stage_of(comm);
            kernels().reduce_scatter_staged[dtype](comm.channel(), slices, args);
        }
        return block;
    });
}

}  // namespace coconet
