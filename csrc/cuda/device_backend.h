// The Backend over runtime.h, whichever runtime that is.
#pragma once

#include "cuda/backend.h"
#include "cuda/local.h"
#include "cuda/peer.h"

namespace coconet::cuda {

class DeviceBackend : public Backend {
  public:
    std::string version() const override { return runtime_version(); }
    std::string targets() const override { return runtime_targets(); }
    int device_count(std::string* why) const override { return cuda::device_count(why); }
    DeviceInfo device_info(int device) const override { return cuda::device_info(device); }
    std::vector<std::shared_ptr<Communicator>> local(int world,
                                                     const Options& options) const override {
        return local_communicators(world, options);
    }
    std::shared_ptr<Communicator> peer(const PeerBuffers& buffers,
                                       const Options& options) const override {
        return peer_communicator(buffers, options);
    }
    int64_t buffer_bytes(int world, const Options& options) const override {
        return peer_buffer_bytes(world, options);
    }
};

}  // namespace coconet::cuda
