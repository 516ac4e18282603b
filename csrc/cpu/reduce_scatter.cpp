// reduce_scatter: skeleton 1 with the own slice as the only destination.
#include "cpu/collectives.h"

namespace coconet {

Output reduce_scatter(Communicator& comm, const Operand& x, int64_t dim, bool average, Split split,
                      const DimSlices& slices, const NewOutput& new_output) {
    return comm.call(OpCode::reduce_scatter, [&]() -> Output {
        Descriptor d = describe_reduce_scatter(x, dim, average, split);
        const Path path = enter(comm, d, x, true);
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
