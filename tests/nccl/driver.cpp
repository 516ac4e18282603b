// driver DEVICE: rank 1 of 4, from the allocation to the end.
#include <cstdio>
#include <cstdlib>

#include "common/errors.h"
#include "nccl/nccl_peers.h"

int main(int, char** arguments) {
    using coconet::cuda::NcclPeers;
    setbuf(stdout, nullptr);  // the fakes write as well
    printf("built for %s\n", coconet::cuda::nccl_build_version().c_str());
    try {
        NcclPeers peers(atoi(arguments[1]), 4096);
        const std::string meeting = NcclPeers::new_meeting();
        peers.connect(meeting, 1, 4);
        peers.map();
        for (const void* pointer : peers.pointers()) printf("pointer %p\n", pointer);
        peers.barrier(reinterpret_cast<coconet::cuda::Stream>(0x7));
    } catch (const coconet::Error& error) {
        printf("%s: %s\n", error.kind == coconet::ErrorKind::communicator ? "error" : "wrong kind",
               error.what());
    }
}
