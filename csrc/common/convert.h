// Scalar conversions between fp32 and the 16-bit floats: round to nearest even, NaN stays NaN.
#pragma once

#include "common/base.h"

namespace coconet {

COCONET_HD uint32_t float_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

COCONET_HD float bits_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

COCONET_HD float to_float(float x) { return x; }
COCONET_HD float to_float(bf16_t x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }
COCONET_HD float to_float(f16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000) << 16;
    const uint32_t magnitude = h.bits & 0x7fff;
    uint32_t bits;
    if (magnitude < 0x0400)  // subnormal: an integer multiple of 2^-24
        bits = float_bits(static_cast<float>(magnitude) * 0x1p-24f);
    else if (magnitude < 0x7c00)
        bits = (magnitude << 13) + (112u << 23);  // re-bias the exponent
    else
        bits = (magnitude << 13) | 0x7f800000 | (magnitude > 0x7c00 ? 0x400000 : 0);
    return bits_float(bits | sign);
}

COCONET_HD void from_float(float x, float* out) { *out = x; }
COCONET_HD void from_float(float x, bf16_t* out) {
    const uint32_t bits = float_bits(x);
    const uint32_t rounded = x != x ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
    out->bits = static_cast<uint16_t>(rounded >> 16);
}
COCONET_HD void from_float(float x, f16_t* out) {
    const uint32_t bits = float_bits(x) & 0x7fffffff;
    uint32_t half;
    if (bits > 0x7f800000)
        half = 0x7e00 | ((bits >> 13) & 0x3ff);
    else if (bits >= 0x477ff000)  // 65520 and above round to infinity
        half = 0x7c00;
    else if (bits < 0x38800000)  // subnormal: adding 0.5 makes the FPU round at 2^-24
        half = float_bits(bits_float(bits) + 0.5f) - 0x3f000000;
    else
        half = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
    out->bits = static_cast<uint16_t>(half | ((float_bits(x) >> 16) & 0x8000));
}

}  // namespace coconet
