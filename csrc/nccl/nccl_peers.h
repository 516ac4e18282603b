// Peer memory from NCCL's device API: a buffer of every rank as a window that every rank's device
// can load from and store to, and a barrier. Neither torch's nor NCCL's types are seen here.
//
// The steps are local or collective as a whole, so that ranks can agree between them on whether all
// have got through. Each raises Error(communicator) that names what failed and what NCCL says.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/runtime.h"

namespace coconet::cuda {

// Of the headers that this was built with, such as "2.28.9"; empty without NCCL.
std::string nccl_build_version();

class NcclPeers {
  public:
    // Local: loads NCCL and allocates the device's buffer, zeroed.
    NcclPeers(int device, int64_t bytes);
    ~NcclPeers();
    NcclPeers(const NcclPeers&) = delete;
    NcclPeers& operator=(const NcclPeers&) = delete;

    // Local: the bytes by which ranks meet. One rank makes them, all give them to connect.
    static std::string new_meeting();

    // Collective: NCCL's communicator. Fails unless all ranks can load from and store to each
    // other's memory.
    void connect(const std::string& meeting, int rank, int ranks);

    // Collective: every rank's buffer into every rank's address space.
    void map();

    // Every rank's buffer as this device sees it, after map.
    const std::vector<void*>& pointers() const;

    // Collective: enqueues a barrier of all ranks' devices; on one stream at a time. What a rank
    // wrote to any buffer before it, every rank sees after it. It waits for as long as it takes.
    void barrier(Stream stream);

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace coconet::cuda
