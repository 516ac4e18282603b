// In place of the other files of this folder in a build without NCCL's headers or without CUDA.
#include "common/errors.h"
#include "nccl/nccl_peers.h"

namespace coconet::cuda {

namespace {

[[noreturn]] void missing() {
    throw Error(ErrorKind::communicator,
                "coconet_ops was built without NCCL; a build with nvcc and pip's nvidia-nccl-cu13 "
                "has it");
}

}  // namespace

struct NcclPeers::Impl {};

std::string nccl_build_version() { return ""; }

NcclPeers::NcclPeers(int, int64_t) { missing(); }
NcclPeers::~NcclPeers() = default;
std::string NcclPeers::new_meeting() { missing(); }
void NcclPeers::connect(const std::string&, int, int) { missing(); }
void NcclPeers::map() { missing(); }
const std::vector<void*>& NcclPeers::pointers() const { missing(); }
void NcclPeers::barrier(Stream) { missing(); }

}  // namespace coconet::cuda
