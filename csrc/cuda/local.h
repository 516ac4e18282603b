// The "local" communicator: virtual ranks of one process on one device. Each rank is for a thread
// of its own. The threads of a call meet on the host; the last one compares what they call and
// launches one cooperative kernel for all, whose blockIdx.y is the rank.
#pragma once

#include <memory>
#include <vector>

#include "cuda/backend.h"

namespace coconet::cuda {

std::vector<std::shared_ptr<Communicator>> local_communicators(int world, const Options& options);

}  // namespace coconet::cuda
