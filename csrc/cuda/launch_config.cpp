#include "cuda/launch_config.h"

#include <algorithm>

#include "cuda/layout.h"

namespace coconet::cuda {

namespace {

#if defined(COCONET_STRESS)  // the native tests: many chunks
constexpr int64_t kChunk = 8 << 10, kOneShot = 16 << 10, kAttachment = 2 << 10;
#else
constexpr int64_t kChunk = 128 << 10, kOneShot = 256 << 10, kAttachment = 32 << 10;
#endif

}  // namespace

LaunchConfig launch_config(const DeviceInfo& device, int ranks_on_device, int blocks, int threads) {
    LaunchConfig config;
    config.threads = threads > 0 ? threads : kMaxThreads;
    // One block on each multiprocessor, so that all of them run at the same time; of a device for
    // one rank some are left to other kernels, since fewer saturate its links.
    const int share = ranks_on_device > 1 ? device.multiprocessors / ranks_on_device
                                          : std::min(device.multiprocessors, 64);
    config.blocks = std::clamp(blocks > 0 ? blocks : share, 1, kMaxBlocks);
    config.unroll = kReduceUnroll;
    config.pack_bytes = kPackBytes;
    config.chunk_bytes = kChunk;
    config.one_shot_bytes = kOneShot;
    config.attachment_bytes = kAttachment;
    return config;
}

std::string to_string(const LaunchConfig& c) {
    return std::to_string(c.blocks) + " blocks of " + std::to_string(c.threads) +
           " threads per rank, " + std::to_string(c.unroll) + " packs of " +
           std::to_string(c.pack_bytes) + " bytes in flight per thread, staging chunks of " +
           std::to_string(c.chunk_bytes) + " bytes per block, one exchange up to " +
           std::to_string(c.one_shot_bytes) + " bytes";
}

}  // namespace coconet::cuda
