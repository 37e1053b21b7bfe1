// What every kernel source shares: number types, block-wide sums, the Philox generator, the C ABI's return value.
// No torch headers: sources compile with nvcc alone, and with hipcc through hip/compat.h.
#pragma once

#ifndef RWKV_HIP
#ifndef FP16_ALONE  // see parts.cuh; the compiler takes half a second to read this
#include <cuda_bf16.h>
#endif
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define RWKV_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#include <cstdint>

namespace rwkv {

constexpr int LANES = 32;  // shuffles work on groups of 32 threads, also where a wavefront has 64
constexpr unsigned ALL = 0xffffffffu;

// What the device code was compiled for: 800 is compute_80. The card may be newer; what kernels do there, and how they may be
// started, follows both. 0: another compiler than nvcc.
#ifdef __CUDA_ARCH_LIST__
constexpr int ARCHITECTURES[] = {__CUDA_ARCH_LIST__}, BUILT_FOR = ARCHITECTURES[0];
#else
constexpr int BUILT_FOR = 0;
#endif
constexpr bool HAS_CLUSTERS = BUILT_FOR >= 900, FOR_HOPPER = BUILT_FOR == 900;

enum Type : int { FP32 = 0, FP16 = 1, BF16 = 2 };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
#ifndef FP16_ALONE
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
#endif

// Eight neighbouring values as fp32, by 16-byte loads.
__device__ __forceinline__ void load8(const float* p, float (&v)[8]) {
    const float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
template <class T>
__device__ __forceinline__ void load8(const T* p, float (&v)[8]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    const T* halves = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = to_float(halves[j]);
}

__device__ __forceinline__ float lane_max(float v) {
    for (int d = LANES / 2; d; d /= 2) v = fmaxf(v, __shfl_xor_sync(ALL, v, d, LANES));
    return v;
}
__device__ __forceinline__ float lane_sum(float v) {
    for (int d = LANES / 2; d; d /= 2) v += __shfl_xor_sync(ALL, v, d, LANES);
    return v;
}
__device__ __forceinline__ int lane_sum(int v) {
    for (int d = LANES / 2; d; d /= 2) v += __shfl_xor_sync(ALL, v, d, LANES);
    return v;
}
__device__ __forceinline__ int lane_min(int v) {
    for (int d = LANES / 2; d; d /= 2) v = min(v, __shfl_xor_sync(ALL, v, d, LANES));
    return v;
}
// Inclusive sum over the lower lanes.
__device__ __forceinline__ float lane_scan(float v) {
    const int lane = threadIdx.x % LANES;
    for (int d = 1; d < LANES; d *= 2) {
        const float below = __shfl_up_sync(ALL, v, d, LANES);
        if (lane >= d) v += below;
    }
    return v;
}

// 1 / sqrt(v) to the same bits as rsqrtf, where v is no denormal number: without what that would take.
__device__ __forceinline__ float rsqrt_of_normal(float v) {
#ifdef RWKV_HIP
    return rsqrtf(v);
#else
    float root;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(v));
    return root;
#endif
}

// Ask for a line of 128 bytes to be brought into the L2 cache.
__device__ __forceinline__ void prefetch(const void* p) {
#ifndef RWKV_HIP
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
__device__ __forceinline__ uint4 philox(uint4 c, uint2 k) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t(0xD2511F53u) * c.x, b = uint64_t(0xCD9E8D57u) * c.z;
        c = make_uint4(uint32_t(b >> 32) ^ c.y ^ k.x, uint32_t(b), uint32_t(a >> 32) ^ c.w ^ k.y, uint32_t(a));
        k.x += 0x9E3779B9u, k.y += 0xBB67AE85u;
    }
    return c;
}
// Uniform in (0, 1), exact in fp32; the layout of all random numbers stands in sampling/base.py.
__device__ __forceinline__ float uniform(uint32_t word) { return float(2 * (word >> 9) + 1) * 5.9604644775390625e-8f; }

}  // namespace rwkv
