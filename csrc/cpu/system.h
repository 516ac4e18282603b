// Small wrappers of the operating system.
#pragma once

#include <errno.h>
#include <time.h>

#include <cstdint>
#include <system_error>

namespace coconet {

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

// What errno says about the call that just failed.
inline std::system_error os_error(const char* what) {
    return std::system_error(errno, std::generic_category(), what);
}

}  // namespace coconet
