#include "cpu/kernels.h"

namespace coconet {

const Kernels& kernels() {
#if defined(__x86_64__)
    static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                             __builtin_cpu_supports("f16c");
    if (avx2) return avx2::kKernels;
#endif
    return portable::kKernels;
}

}  // namespace coconet
