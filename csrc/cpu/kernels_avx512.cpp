// Kernels for x86 with AVX-512 F, BW, DQ and VL.
#if defined(__x86_64__)

#include <immintrin.h>

// Before the pragma: inline functions that other files also emit.
#include "cpu/channel.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
// GCC 12 warns about the undefined vectors in its own header.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#define COCONET_ISA avx512
#define COCONET_ISA_NAME "avx512"
#define COCONET_ISA_AVX512
#include "cpu/kernels_impl.h"

#endif
