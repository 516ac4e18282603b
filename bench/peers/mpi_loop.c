// What a peer process calls of MPI. A loop in C, so that small messages are timed without Python.
// Built against each implementation's own mpi.h by scripts/setup_peers.sh. 0 means success.
#include <mpi.h>
#include <stddef.h>
#include <string.h>

static MPI_Datatype datatype(const char* name) {
    if (!strcmp(name, "float32")) return MPI_FLOAT;
#ifdef MPIX_BFLOAT16
    if (!strcmp(name, "bfloat16")) return MPIX_BFLOAT16;
#endif
#ifdef MPIX_C_FLOAT16
    if (!strcmp(name, "float16")) return MPIX_C_FLOAT16;
#endif
    return MPI_DATATYPE_NULL;
}

int start(int* rank, int* world) {
    if (MPI_Init(NULL, NULL)) return 1;
    return MPI_Comm_rank(MPI_COMM_WORLD, rank) || MPI_Comm_size(MPI_COMM_WORLD, world);
}

int finish(void) { return MPI_Finalize(); }

int barrier(void) { return MPI_Barrier(MPI_COMM_WORLD); }

// Whether values of this dtype can be summed.
int sums(const char* dtype) {
    int size = 0;
    return datatype(dtype) != MPI_DATATYPE_NULL && !MPI_Type_size(datatype(dtype), &size) && size;
}

int all_reduce(void* x, int count, const char* dtype, int calls) {
    const MPI_Datatype type = datatype(dtype);
    for (; calls; --calls)
        if (MPI_Allreduce(MPI_IN_PLACE, x, count, type, MPI_SUM, MPI_COMM_WORLD)) return 1;
    return 0;
}

int reduce_scatter(const void* x, void* shard, int count, const char* dtype, int calls) {
    const MPI_Datatype type = datatype(dtype);
    for (; calls; --calls)
        if (MPI_Reduce_scatter_block(x, shard, count, type, MPI_SUM, MPI_COMM_WORLD)) return 1;
    return 0;
}

// count: of each shard, in elements of 2 or 4 bytes. Without a shard it is in place already.
int all_gather(const void* shard, void* x, int count, int itemsize, int calls) {
    const MPI_Datatype type = itemsize == 4 ? MPI_INT32_T : MPI_INT16_T;
    const void* send = shard ? shard : MPI_IN_PLACE;
    for (; calls; --calls)
        if (MPI_Allgather(send, count, type, x, count, type, MPI_COMM_WORLD)) return 1;
    return 0;
}
