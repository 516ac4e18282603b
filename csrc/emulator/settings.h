// What emulator.h sets, and blocks read.
#pragma once

#include <atomic>
#include <cstdint>

namespace coconet::emulator {

struct Settings {
    Settings();
    std::atomic<uint64_t> seed;
    std::atomic<int64_t> spin_timeout_ns;
    std::atomic<int> multiprocessors;
};
Settings& settings();

}  // namespace coconet::emulator
