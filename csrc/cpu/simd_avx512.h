// Vector primitives of AVX-512 (F, BW, DQ, VL). Included by machine.h.
#pragma once

namespace coconet::COCONET_ISA {

constexpr int kPackBytes = 64;
typedef float FloatPack __attribute__((vector_size(kPackBytes)));

COCONET_HD FloatPack fma(FloatPack a, FloatPack b, FloatPack c) { return _mm512_fmadd_ps(a, b, c); }
COCONET_HD FloatPack sqrt(FloatPack x) { return _mm512_sqrt_ps(x); }

COCONET_HD __m256i load_halves(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i_u*>(p));
}
COCONET_HD FloatPack widen(const bf16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(p)), 16));
}
COCONET_HD FloatPack widen(const f16_t* p) { return _mm512_cvtph_ps(load_halves(p)); }

// The same rounding as from_float; vcvtneps2bf16 would flush subnormals.
COCONET_HD __m256i narrow(const bf16_t*, FloatPack x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i even = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i high = _mm512_mask_mov_epi32(_mm512_add_epi32(bits, even), nan, quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(high, 16));
}
COCONET_HD __m256i narrow(const f16_t*, FloatPack x) {
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}

template <bool Stream, class Vector>
COCONET_HD void store_vector(void* p, Vector x) {
    if constexpr (!Stream)
        __builtin_memcpy(p, &x, sizeof x);
    else if constexpr (sizeof x == sizeof(__m256i))
        _mm256_stream_si256(static_cast<__m256i*>(p), x);
    else
        _mm512_stream_si512(static_cast<__m512i*>(p), reinterpret_cast<__m512i>(x));
}

}  // namespace coconet::COCONET_ISA
