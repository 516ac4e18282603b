// The CPU machine of the skeletons: a pack is a GCC vector of floats.
//
// Included only by a kernels_*.cpp file, after its target pragma and inside its own namespace
// (COCONET_ISA), so that code for one instruction set is never linked into another.
#pragma once

#include "common/convert.h"
#include "common/rs_op_ag.h"
#include "cpu/channel.h"

namespace coconet::COCONET_ISA {

#if defined(COCONET_PLAIN_STORES)  // sanitizers don't see the intrinsics of streaming stores
constexpr bool kStreamingStores = false;
#else
constexpr bool kStreamingStores = true;
#endif

struct CpuMachine {
#if defined(COCONET_ISA_AVX2)
    static constexpr int kLanes = 8;
#else
    static constexpr int kLanes = 4;
#endif
    typedef float Pack __attribute__((vector_size(kLanes * sizeof(float))));
    static constexpr int kUnroll = 2;

    Channel& channel;
    int rank;

    void wait_inputs() const { channel.wait_inputs(); }
    void complete_outputs() const { channel.complete_outputs(); }

    COCONET_HD Pack splat(float x) const { return Pack{} + x; }

    template <class T>
    COCONET_HD bool can_stream(const T* p) const {
        return reinterpret_cast<uintptr_t>(p) % (kLanes * sizeof(T)) == 0;
    }
    template <class T>
    COCONET_HD void store(T* p, Pack x, AllLanes) const {
        store_pack<false>(p, x);
    }
    template <class T>
    COCONET_HD Pack load(const T* p, SomeLanes lanes) const {
        T buffer[kLanes] = {};
        for (int k = 0; k < lanes.n; ++k) buffer[k] = p[k];
        return load(buffer, AllLanes{});
    }
    template <class T>
    COCONET_HD void store(T* p, Pack x, SomeLanes lanes) const {
        T buffer[kLanes];
        store_pack<false>(buffer, x);
        for (int k = 0; k < lanes.n; ++k) p[k] = buffer[k];
    }

    COCONET_HD void copy(void* dst, const void* src, int64_t bytes, bool stream) const {
        copy_bytes(static_cast<char*>(dst), static_cast<const char*>(src), bytes, stream);
    }

#if defined(COCONET_ISA_AVX2)

    static COCONET_HD void copy_bytes(char* dst, const char* src, int64_t bytes, bool stream) {
        int64_t i = 0;
        if (kStreamingStores && stream && reinterpret_cast<uintptr_t>(dst) % 32 == 0)
            for (; i + 64 <= bytes; i += 64) {
                const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
                const __m256i high =
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 32));
                _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), low);
                _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), high);
            }
        __builtin_memcpy(dst + i, src + i, bytes - i);
    }

    COCONET_HD Pack fma(Pack a, Pack b, Pack c) const { return _mm256_fmadd_ps(a, b, c); }
    COCONET_HD Pack sqrt(Pack x) const { return _mm256_sqrt_ps(x); }

    COCONET_HD Pack load(const float* p, AllLanes) const { return _mm256_loadu_ps(p); }
    COCONET_HD Pack load(const bf16_t* p, AllLanes) const {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
    }
    COCONET_HD Pack load(const f16_t* p, AllLanes) const { return _mm256_cvtph_ps(load128(p)); }

    template <bool Stream>
    COCONET_HD void store_pack(float* p, Pack x) const {
        if (Stream && kStreamingStores)
            _mm256_stream_ps(p, x);
        else
            _mm256_storeu_ps(p, x);
    }
    template <bool Stream>
    COCONET_HD void store_pack(bf16_t* p, Pack x) const {
        store128<Stream>(p, to_bf16(x));
    }
    template <bool Stream>
    COCONET_HD void store_pack(f16_t* p, Pack x) const {
        store128<Stream>(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }

  private:
    static COCONET_HD __m128i load128(const void* p) {
        return _mm_loadu_si128(static_cast<const __m128i*>(p));
    }
    template <bool Stream>
    static COCONET_HD void store128(void* p, __m128i x) {
        if (Stream && kStreamingStores)
            _mm_stream_si128(static_cast<__m128i*>(p), x);
        else
            _mm_storeu_si128(static_cast<__m128i*>(p), x);
    }
    // The same rounding as from_float.
    static COCONET_HD __m128i to_bf16(__m256 x) {
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

#else  // portable

    static COCONET_HD void copy_bytes(char* dst, const char* src, int64_t bytes, bool) {
        __builtin_memcpy(dst, src, bytes);
    }
    COCONET_HD Pack fma(Pack a, Pack b, Pack c) const {
        for (int k = 0; k < kLanes; ++k) c[k] = __builtin_fmaf(a[k], b[k], c[k]);
        return c;
    }
    COCONET_HD Pack sqrt(Pack x) const {
        for (int k = 0; k < kLanes; ++k) x[k] = __builtin_sqrtf(x[k]);
        return x;
    }
    template <class T>
    COCONET_HD Pack load(const T* p, AllLanes) const {
        Pack x{};
        for (int k = 0; k < kLanes; ++k) x[k] = to_float(p[k]);
        return x;
    }
    // Stores past the cache are an x86 matter: Stream makes no difference here.
    template <bool Stream, class T>
    COCONET_HD void store_pack(T* p, Pack x) const {
        for (int k = 0; k < kLanes; ++k) from_float(x[k], p + k);
    }

#endif
};

}  // namespace coconet::COCONET_ISA
