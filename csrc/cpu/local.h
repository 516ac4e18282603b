// Communicators whose ranks are threads of one process.
#pragma once

#include <memory>
#include <vector>

#include "cpu/communicator.h"

namespace coconet {

// By rank, each for use by a thread of its own; options.rank is ignored. All of them use one
// mapping of each segment. A rank counts as alive until it closes. Throws Error when world isn't in
// [1, kMaxRanks], and std::system_error.
std::vector<std::shared_ptr<Communicator>> local_communicators(int world,
                                                               CommunicatorOptions options);

}  // namespace coconet
