// all_gather: every rank copies its peers' shards, out of their heap, their attachments, or chunk
// by chunk out of their staging areas:
//   publish   copy a chunk of the own shard to the own staging area
//   collect   copy the peers' chunks to the own output
// Chunk k+1 is published before chunk k is collected. Slots as in staged.h: before a rank publishes
// k+1 it has collected k-1, so all peers have published k-1, after they have collected k-3.
#include <string>

#include "cpu/collectives.h"

namespace coconet {

namespace {

// Slices in bytes: inner holds the size of an element.
void gather_whole(Communicator& comm, Path path, const DimSlices& slices, char* output,
                  bool stream) {
    for (int i = 0; i < comm.world; ++i) {
        const int peer = (comm.rank + i) % comm.world;  // not all from the same rank at once
        const char* shard = path == Path::one_shot
                                ? comm.attachment_of(peer)
                                : comm.heap_of(peer) + comm.channel().descriptor(peer).operands[0];
        slices.for_runs(peer, 0, slices.size(peer), [&](const Run& run) {
            kernels().copy(output + run.offset, shard + run.index, run.length, stream);
        });
    }
    if (path == Path::one_shot)
        comm.channel().leave();
    else
        comm.channel().complete_outputs();
}

void gather_staged(Communicator& comm, const DimSlices& slices, const char* shard, char* output,
                   bool stream) {
    Channel& channel = comm.channel();
    int64_t longest = 0;
    for (int r = 0; r < comm.world; ++r) longest = max64(longest, slices.size(r));
    const int64_t step = comm.tuning().chunk_bytes;
    const int64_t num_chunks = ceil_div(longest, step);
    const uint32_t first = channel.chunk;

    const auto slot = [](char* area, uint32_t chunk) {
        return area + (chunk % kStageSlots) * kStageSlotBytes;
    };
    const auto publish = [&](int64_t k) {
        const uint32_t chunk = first + static_cast<uint32_t>(k);
        const int64_t begin = k * step;
        const int64_t end = min64(begin + step, slices.size(comm.rank));
        if (begin < end)
            kernels().copy(slot(comm.stage_of(comm.rank), chunk), shard + begin, end - begin,
                           false);
        channel.signal(kPublish, chunk + 1);
    };
    const auto collect = [&](int64_t k) {
        const uint32_t chunk = first + static_cast<uint32_t>(k);
        for (int i = 0; i < comm.world; ++i) {
            const int peer = (comm.rank + i) % comm.world;
            const bool own = peer == comm.rank;
            if (!own) channel.wait(peer, kPublish, chunk + 1);
            const char* source = own ? shard : slot(comm.stage_of(peer), chunk);
            const int64_t begin = k * step;
            const int64_t end = min64(begin + step, slices.size(peer));
            slices.for_runs(peer, begin, end, [&](const Run& run) {
                kernels().copy(output + run.offset, source + run.index - (own ? 0 : begin),
                               run.length, stream);
            });
        }
    };

    if (num_chunks > 0) publish(0);
    for (int64_t k = 0; k < num_chunks; ++k) {
        if (k + 1 < num_chunks) publish(k + 1);
        collect(k);
    }
    channel.finish_chunks(static_cast<uint32_t>(num_chunks));
}

}  // namespace

Output all_gather(Communicator& comm, const Operand& shard, int64_t dim, int64_t size,
                  const NewOutput& new_output, int64_t* begins) {
    return comm.call(OpCode::all_gather, [&]() -> Output {
        const int64_t rows = shard.sizes[dim];
        std::vector<int64_t> rest(shard.sizes, shard.sizes + shard.dims);
        rest[dim] = 1;
        DescriptorBuilder builder(OpCode::all_gather);
        builder.add(static_cast<int64_t>(shard.dtype)).add(shard.itemsize).add(dim).add(size);
        builder.add(rows).add_shape(rest.data(), shard.dims);
        builder.d.operands[2] = rows;
        const Path path = enter(comm, builder.d, shard, true);

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
        if (path == Path::staged)
            gather_staged(comm, slices, static_cast<const char*>(shard.data), output, stream);
        else
            gather_whole(comm, path, slices, output, stream);
        return block;
    });
}

}  // namespace coconet
