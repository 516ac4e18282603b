#include "cpu/collectives.h"

namespace coconet {

Path enter(Communicator& comm, Descriptor& d, const Operand& x, bool allocates) {
    const int64_t bytes = x.bytes(), offset = comm.heap()->offset_of(x.data, bytes);
    const bool attached = offset < 0 && bytes <= comm.tuning().one_shot_bytes;
    d.operands[0] = offset;
    d.operands[1] = attached;
    if (attached) comm.attach(x.data, bytes);
    comm.enter(d, allocates && offset >= 0);
    if (comm.all_ranks([](const Descriptor& other) { return other.operands[0] >= 0; }))
        return Path::direct;
    if (comm.all_ranks([](const Descriptor& other) { return other.operands[1] != 0; }))
        return Path::one_shot;
    return Path::staged;
}

ReduceArgs reduce_args(Communicator& comm, Path path, const Operand& x, bool average) {
    ReduceArgs args;
    args.dtype = x.dtype;
    args.scale = average ? 1.0 / comm.world : 1.0;
    args.num_dst = 0;
    if (path == Path::staged) {
        args.input = x.data;
        args.stage = stage_of(comm);
    }
    for (int r = 0; r < comm.world && path != Path::staged; ++r)
        args.src[r] = path == Path::one_shot
                          ? comm.attachment_of(r)
                          : comm.heap_of(r) + comm.channel().descriptor(r).operands[0];
    return args;
}

Stage stage_of(const Communicator& comm) {
    Stage stage;
    stage.chunk_bytes = comm.tuning().chunk_bytes;
    for (int r = 0; r < comm.world; ++r) stage.area[r] = comm.stage_of(r);
    return stage;
}

bool writes_past_cache(const Communicator& comm, Path path, int64_t bytes) {
    const Tuning& t = comm.tuning();
    return bytes > (path == Path::staged ? t.staged_stream_bytes : t.stream_bytes);
}

}  // namespace coconet
