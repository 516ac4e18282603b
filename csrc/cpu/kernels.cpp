#include "cpu/kernels.h"

#include <stdlib.h>
#include <string.h>

namespace coconet {

namespace {

struct Variant {
    const Kernels* kernels;
    bool supported;
};

const Kernels& choose() {
    const Variant variants[] = {
#if defined(__x86_64__)
        {&avx512::kKernels,
         __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
        {&avx2::kKernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                              __builtin_cpu_supports("f16c")},
#endif
        {&portable::kKernels, true}};
    const char* wanted = getenv("COCONET_ISA");
    for (const Variant& v : variants)
        if (v.supported && wanted && strcmp(wanted, v.kernels->isa) == 0) return *v.kernels;
    for (const Variant& v : variants)
        if (v.supported) return *v.kernels;
    return portable::kKernels;
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

}  // namespace coconet
