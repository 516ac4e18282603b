#include "emulator/settings.h"

#include <stdlib.h>

#include "emulator/emulator.h"

namespace coconet::emulator {

namespace {

constexpr double kSpinTimeout = 120;

int64_t to_ns(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

}  // namespace

Settings::Settings() : multiprocessors(2) {
    const char* const seed_text = getenv("COCONET_EMULATOR_SEED");
    const char* const timeout_text = getenv("COCONET_EMULATOR_TIMEOUT");
    seed = seed_text ? strtoull(seed_text, nullptr, 10) : 0;
    spin_timeout_ns = to_ns(timeout_text ? atof(timeout_text) : kSpinTimeout);
}

Settings& settings() {
    static Settings settings;
    return settings;
}

void set_seed(uint64_t seed) { settings().seed = seed; }
void set_spin_timeout(double seconds) { settings().spin_timeout_ns = to_ns(seconds); }
void set_multiprocessors(int n) { settings().multiprocessors = n; }

}  // namespace coconet::emulator
