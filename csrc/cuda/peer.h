// The communicator of ranks in several processes, a device each: one launch per rank. What the
// ranks call is compared by the kernels, so a disagreement is raised by the next call; the ranks'
// streams are out of step then, and the communicator is closed.
#pragma once

#include <memory>

#include "cuda/backend.h"

namespace coconet::cuda {

std::shared_ptr<Communicator> peer_communicator(const PeerBuffers& buffers, const Options& options);
int64_t peer_buffer_bytes(int world, const Options& options);

}  // namespace coconet::cuda
