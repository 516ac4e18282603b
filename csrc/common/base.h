// Types and constants that every layer shares. No torch, no OS header.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define COCONET_HD __host__ __device__ __forceinline__
#else
// always_inline: files compiled for different instruction sets must not share an out-of-line copy.
#define COCONET_HD inline __attribute__((always_inline))
#endif

// Of loops in kernels.
#if defined(__CUDA_ARCH__)
#define COCONET_UNROLL _Pragma("unroll")
#define COCONET_NO_UNROLL _Pragma("unroll 1")
#else
#define COCONET_UNROLL
#define COCONET_NO_UNROLL
#endif

namespace coconet {

constexpr int kMaxRanks = 64;

// Sums accept f32 to i32, optimizers f32 to f16; ops that only move data accept all.
enum class DType : int32_t {
    f32,
    bf16,
    f16,
    f64,
    i64,
    i32,  // the last of those that can be summed
    i16,
    i8,
    u8,
    boolean,
    c64,
    c128,
    other  // and above: a dtype of the layer above, by its number there
};
constexpr int kNumReduceDTypes = 6;

struct bf16_t {
    uint16_t bits;
};
struct f16_t {
    uint16_t bits;
};

// The type in which elements are added up: their own, or fp32 for 16-bit floats.
template <class T>
struct SumType {
    using type = T;
};
template <>
struct SumType<bf16_t> {
    using type = float;
};
template <>
struct SumType<f16_t> {
    using type = float;
};
template <class T>
using SumOf = typename SumType<T>::type;

COCONET_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
COCONET_HD constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
COCONET_HD constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
COCONET_HD constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Of numbers >= 0, for code that also runs in kernels: CUDA's own 64-bit division is a function
// call.
struct Division {
    int64_t quotient, remainder;
};
COCONET_HD Division divide(int64_t a, int64_t b) {
#if defined(__CUDA_ARCH__)
    if (((a | b) >> 32) == 0) {
        const auto q = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
        return {q, static_cast<uint32_t>(a) - q * static_cast<uint32_t>(b)};
    }
    Division d{0, 0};  // digit by digit
    COCONET_NO_UNROLL
    for (int bit = 62; bit >= 0; --bit) {
        d.remainder = d.remainder << 1 | (a >> bit & 1);
        const bool one = d.remainder >= b;
        d.quotient = d.quotient << 1 | one;
        if (one) d.remainder -= b;
    }
    return d;
#else
    return {a / b, a % b};
#endif
}

}  // namespace coconet
