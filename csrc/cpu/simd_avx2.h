// Vector primitives of AVX2, FMA and F16C. Included by machine.h.
#pragma once

namespace coconet::COCONET_ISA {

constexpr int kPackBytes = 32;
typedef float FloatPack __attribute__((vector_size(kPackBytes)));

COCONET_HD FloatPack fma(FloatPack a, FloatPack b, FloatPack c) { return _mm256_fmadd_ps(a, b, c); }
COCONET_HD FloatPack sqrt(FloatPack x) { return _mm256_sqrt_ps(x); }

COCONET_HD __m128i load_halves(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
COCONET_HD FloatPack widen(const bf16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p)), 16));
}
COCONET_HD FloatPack widen(const f16_t* p) { return _mm256_cvtph_ps(load_halves(p)); }

// The same rounding as from_float.
COCONET_HD __m128i narrow(const bf16_t*, FloatPack x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i even = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i high = _mm256_blendv_epi8(_mm256_add_epi32(bits, even), quiet, nan);
    high = _mm256_srli_epi32(high, 16);
    high = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xD8);
    return _mm256_castsi256_si128(high);
}
COCONET_HD __m128i narrow(const f16_t*, FloatPack x) {
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}

template <bool Stream, class Vector>
COCONET_HD void store_vector(void* p, Vector x) {
    if constexpr (!Stream)
        __builtin_memcpy(p, &x, sizeof x);
    else if constexpr (sizeof x == sizeof(__m128i))
        _mm_stream_si128(static_cast<__m128i*>(p), x);
    else
        _mm256_stream_si256(static_cast<__m256i*>(p), reinterpret_cast<__m256i>(x));
}

}  // namespace coconet::COCONET_ISA
