// What the forms of the wkv recurrence share: their inputs and a token's decay.
#pragma once

#include "../launch.cuh"

namespace rwkv {

constexpr int HEAD = 64;
constexpr float LOG_DECAY_SCALE = -0.6065306597126334f;  // -exp(-0.5)
constexpr float GROUP_NORM_EPS = 64e-5f;

// Inputs of N tokens, [N, C] each, and a layer's vectors, [C] each: w_raw gives the decay, a is the in-context learning rate, v_mix
// the share of the first layer's v in this one's; it is null in layer 0, whose v becomes v_first.
struct WkvInputs {
    const __half *r, *k, *v;
    const float* w_raw;
    const __half *a, *v_mix, *gate;
    __half* v_first;
    const float *k_k, *k_a, *r_k, *norm_weight, *norm_bias;
    __half* out;
};

__device__ __forceinline__ float2 load2(const __half* p) { return __half22float2(*reinterpret_cast<const __half2*>(p)); }
__device__ __forceinline__ float2 load2(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ __forceinline__ void store2(__half* p, float2 v) { *reinterpret_cast<__half2*>(p) = __floats2half2_rn(v.x, v.y); }
__device__ __forceinline__ void store2(float* p, float2 v) { *reinterpret_cast<float2*>(p) = v; }
__device__ __forceinline__ float dot(float2 a, float2 b) { return fmaf(a.x, b.x, a.y * b.y); }
__device__ __forceinline__ float2 operator*(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
// exp(v) to the same bits as __expf where the result is no denormal number; else it is 0.
__device__ __forceinline__ float exp_or_zero(float v) {
#ifdef RWKV_HIP
    return __expf(v);
#else
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v * 1.4426950408889634f));
    return power;
#endif
}
__device__ __forceinline__ float decay(float w_raw) {
    return exp_or_zero(LOG_DECAY_SCALE * __fdividef(1.f, 1.f + exp_or_zero(-w_raw)));
}

}  // namespace rwkv
