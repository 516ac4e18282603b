#include "common/all_gather.h"

#include <string>

#include "cpu/collectives.h"

namespace coconet {

namespace {

// What the phases need of a machine; copies are the kernels'. Elements are bytes: the slices'
// inner holds the size of one.
struct GatherMachine {
    static constexpr int part = 0, parts = 1;
    static constexpr int64_t grain = 1;
    Channel& channel;
    int rank, world;

    void copy(char* to, const char* from, int64_t bytes, bool stream) const {
        kernels().copy(to, from, bytes, stream);
    }
    uint32_t first_chunk() const { return channel.chunk; }
    void signal(Phase phase, uint32_t value) const { channel.signal(phase, value); }
    bool wait(int peer, Phase phase, uint32_t want) const {
        channel.wait(peer, phase, want);
        return true;
    }
    void finish_chunks(uint32_t count) const { channel.finish_chunks(count); }
};

void gather(Communicator& comm, Path path, const DimSlices& slices, const char* shard, char* output,
            bool stream) {
    const GatherMachine machine{comm.channel(), comm.rank, comm.world};
    switch (path) {
        case Path::direct:
            gather_whole(
                machine, slices,
                [&](int r) { return comm.heap_of(r) + comm.channel().descriptor(r).operands[0]; },
                output, stream);
            comm.channel().complete_outputs();
            break;
        case Path::one_shot:
            gather_whole(
                machine, slices, [&](int r) { return comm.attachment_of(r); }, output, stream);
            comm.channel().leave();
            break;
        case Path::staged:
            gather_staged(machine, slices, shard, output, stage_of(comm), stream);
            break;
    }
}

}  // namespace

Output all_gather(Communicator& comm, const Operand& shard, int64_t dim, int64_t size,
                  const NewOutput& new_output, int64_t* begins) {
    return comm.call(OpCode::all_gather, [&]() -> Output {
        Descriptor d = describe_all_gather(shard, dim, size);
        d.operands[2] = shard.sizes[dim];
        const Path path = enter(comm, d, shard, true);

        DimSlices slices{
            shard.product(0, dim), 0, shard.product(dim + 1, shard.dims) * shard.itemsize, {}};
        for (int r = 0; r < comm.world; ++r)
            slices.begins[r + 1] = slices.begins[r] + comm.channel().descriptor(r).operands[2];
        for (int r = 0; r <= comm.world; ++r) begins[r] = slices.begins[r];
        const int64_t total = slices.dim = slices.begins[comm.world];
        if (size >= 0 && size != total) {
            comm.channel().leave();
            throw Error(ErrorKind::mismatch, "all_gather: size is " + std::to_string(size) +
                                                 " but the shards of all ranks have " +
                                                 std::to_string(total) + " rows along dim " +
                                                 std::to_string(dim));
        }
        const int64_t bytes = slices.outer * slices.dim * slices.inner;
        comm.probe(bytes);
        Output block;
        if (path == Path::direct) block = comm.allocate(bytes);
        char* output =
            block ? comm.heap_of(comm.rank) + block->offset : static_cast<char*>(new_output(total));
        const bool stream = writes_past_cache(comm, path, bytes);
        gather(comm, path, slices, static_cast<const char*>(shard.data), output, stream);
        return block;
    });
}

}  // namespace coconet
