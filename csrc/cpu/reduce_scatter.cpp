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
        DescriptorBuilder builder(OpCode::reduce_scatter);
        builder.add(static_cast<int64_t>(x.dtype)).add(static_cast<int64_t>(average));
        builder.add(static_cast<int64_t>(split)).add(dim).add_shape(x.sizes, x.dims);
        const Path path = enter(comm, builder.d, x, true);
        comm.probe(x.bytes());

        int64_t longest = 0;
        for (int r = 0; r < comm.world; ++r) longest = max64(longest, slices.size(r) * x.itemsize);
        Output block;
        if (path == Path::direct) block = comm.allocate(longest);
        void* output =
            block ? comm.heap_of(comm.rank) + block->offset : new_output(slices.rows(comm.rank));
        ReduceArgs args = reduce_args(comm, path, x, average);
        args.stream = writes_past_cache(comm, path, longest);
        args.dst[args.num_dst++] = output;
        args.output = output;
        switch (path) {
            case Path::direct:
                kernels().reduce_scatter(comm.channel(), slices, args);
                break;
            case Path::one_shot:
                kernels().reduce_one_shot(comm.channel(), slices, args);
                break;
            case Path::staged:
                kernels().reduce_scatter_staged(comm.channel(), slices, args);
                break;
        }
        return block;
    });
}

}  // namespace coconet
