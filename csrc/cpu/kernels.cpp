#include "cpu/kernels.h"

#include <stdlib.h>
#include <string.h>

namespace coconet {

namespace {

const Kernels& choose() {
    const char* wanted = getenv("COCONET_ISA");
    if (wanted && strcmp(wanted, "portable") == 0) return portable::kKernels;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        return avx2::kKernels;
#endif
    return portable::kKernels;
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

}  // namespace coconet
