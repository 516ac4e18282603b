#include "emulator/limits.h"

#include <algorithm>
#include <climits>
#include <cstdint>

#include "emulator/thread.h"

namespace coconet::emulator {

namespace {

constexpr unsigned kMaxBlocksY = 65535;
constexpr size_t kMaxShared = 163 << 10;  // of a block
// Of a multiprocessor:
constexpr unsigned kThreads = 2048;
constexpr unsigned kBlocks = 32;
constexpr size_t kShared = 164 << 10;
constexpr size_t kSharedReserved = 1 << 10;  // of it, for each block

}  // namespace

int resident_blocks(unsigned threads, size_t shared_bytes, int multiprocessors) {
    if (threads == 0 || threads > kMaxThreads || shared_bytes > kMaxShared) return 0;
    const unsigned by_threads = kThreads / ((threads + kWarp - 1) / kWarp * kWarp);
    const auto by_shared = static_cast<unsigned>(kShared / (shared_bytes + kSharedReserved));
    return static_cast<int>(std::min({by_threads, by_shared, kBlocks})) * multiprocessors;
}

const char* refused(const cuda::LaunchShape& shape, int multiprocessors) {
    if (shape.blocks_x == 0 || shape.blocks_x > INT_MAX || shape.blocks_y == 0 ||
        shape.blocks_y > kMaxBlocksY || shape.threads == 0 || shape.threads > kMaxThreads)
        return "invalid configuration argument";
    if (shape.shared_bytes > kMaxShared) return "invalid argument";
    const uint64_t blocks = uint64_t{shape.blocks_x} * shape.blocks_y;
    const int resident = resident_blocks(shape.threads, shape.shared_bytes, multiprocessors);
    if (shape.cooperative && blocks > static_cast<uint64_t>(resident))
        return "too many blocks in cooperative launch";
    return nullptr;
}

}  // namespace coconet::emulator
