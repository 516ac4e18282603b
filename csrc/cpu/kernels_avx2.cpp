// Kernels for x86 with AVX2, FMA and F16C.
#if defined(__x86_64__)

#include <immintrin.h>

// Before the pragma: inline functions that other files also emit.
#include "cpu/channel.h"

#pragma GCC target("avx2,fma,f16c")
#define COCONET_ISA avx2
#define COCONET_ISA_NAME "avx2"
#define COCONET_ISA_AVX2
#include "cpu/kernels_impl.h"

#endif
