// The collectives of one tensor. Operands in the heap of every rank are used where they are; as
// soon as one rank's is elsewhere, all ranks go through the staging areas, or attach operands that
// are small to their descriptors.
#pragma once

#include <functional>
#include <optional>

#include "common/calls.h"
#include "cpu/communicator.h"
#include "cpu/kernels.h"

namespace coconet {

// A new output lies in the heap (block) when the input does, and elsewhere otherwise.
using Output = std::optional<Heap::Block>;
// Makes an output outside the heap with this size along dim and returns its memory.
using NewOutput = std::function<void*(int64_t size)>;

Output all_reduce(Communicator& comm, const Operand& x, bool average, const NewOutput& new_output);
void all_reduce_(Communicator& comm, const Operand& x, bool average);

// The slices are equal on all ranks; split says how they were made.
Output reduce_scatter(Communicator& comm, const Operand& x, int64_t dim, bool average, Split split,
                      const DimSlices& slices, const NewOutput& new_output);

// size: the expected total along dim, or -1. Fills begins[0..world]: the first row of each rank's
// shard, and the total.
Output all_gather(Communicator& comm, const Operand& shard, int64_t dim, int64_t size,
                  const NewOutput& new_output, int64_t* begins);

// How the operands of a call reach the peers.
enum class Path { direct, one_shot, staged };

// Enters the call with x as this rank's operand. Fills d.operands[0], its place in the heap, and
// d.operands[1], whether it is attached.
Path enter(Communicator& comm, Descriptor& d, const Operand& x, bool allocates);

// What the paths have in common: where the peers' inputs are. Destinations are the caller's.
ReduceArgs reduce_args(Communicator& comm, Path path, const Operand& x, bool average);
Stage stage_of(const Communicator& comm);
// Whether an output of this size goes past the cache, provided that it wasn't read before.
bool writes_past_cache(const Communicator& comm, Path path, int64_t bytes);

}  // namespace coconet
