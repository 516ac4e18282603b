// Vector primitives without intrinsics. Included by machine.h.
#pragma once

namespace coconet::COCONET_ISA {

constexpr int kPackBytes = 16;
typedef float FloatPack __attribute__((vector_size(kPackBytes)));
constexpr int kFloatLanes = kPackBytes / sizeof(float);

COCONET_HD FloatPack fma(FloatPack a, FloatPack b, FloatPack c) {
    for (int k = 0; k < kFloatLanes; ++k) c[k] = __builtin_fmaf(a[k], b[k], c[k]);
    return c;
}
COCONET_HD FloatPack sqrt(FloatPack x) {
    for (int k = 0; k < kFloatLanes; ++k) x[k] = __builtin_sqrtf(x[k]);
    return x;
}

template <class Half>
COCONET_HD FloatPack widen(const Half* p) {
    FloatPack x{};
    for (int k = 0; k < kFloatLanes; ++k) x[k] = to_float(p[k]);
    return x;
}
template <class Half>
struct Halves {
    Half x[kFloatLanes];
};
template <class Half>
COCONET_HD Halves<Half> narrow(const Half*, FloatPack x) {
    Halves<Half> y;
    for (int k = 0; k < kFloatLanes; ++k) from_float(x[k], y.x + k);
    return y;
}
// Stores past the cache are an x86 matter: Stream makes no difference here.
template <bool Stream, class Vector>
COCONET_HD void store_vector(void* p, Vector x) {
    __builtin_memcpy(p, &x, sizeof x);
}

}  // namespace coconet::COCONET_ISA
