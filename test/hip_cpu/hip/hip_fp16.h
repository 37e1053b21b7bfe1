// The halves of HIP, as its older releases have them: `__float2half_ru` rounds to the nearest like all the others.
#pragma once

#include "hip_runtime.h"

#include <cstring>

struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};

inline float __half2float(__half h) {
    const uint32_t sign = uint32_t(h.bits & 0x8000) << 16, rest = h.bits & 0x7fff;
    if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    const float size = __uint_as_float(rest << 13) * 0x1p112f;  // exact, subnormal halves too
    return __uint_as_float(sign | __float_as_uint(size));
}
inline __half __float2half(float x) {
    const uint32_t bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    uint32_t half;
    if (rest > 0x7f800000) {
        half = 0x7e00;
    } else if (rest >= 0x477ff000) {  // would round to 65,536 or more
        half = 0x7c00;
    } else if (rest < 0x38800000) {  // subnormal: the sum has the result in its low bits, rounded
        half = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000;
    } else {
        half = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
    }
    return {uint16_t(sign | half)};
}
inline __half __float2half_ru(float x) { return __float2half(x); }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) {
    const float2 x = __half22float2(a), y = __half22float2(b);
    return __floats2half2_rn(x.x - y.x, x.y - y.y);
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    const float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
    return __floats2half2_rn(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
}
