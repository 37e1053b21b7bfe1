// Numbers as the sampler handles them: approximations, an order of floats as integers, halves in pairs, vectors of eight logits,
// and sums, minima and votes over a warp's lanes.
#pragma once

#include "../common.cuh"

#include <cstring>
#include <type_traits>

namespace rwkv {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr uint32_t BROKEN = 0xffffffffu;  // the key of a NaN
constexpr int NONE = 0x7fffffff;

__device__ __forceinline__ float exp2_of(float x) {
#ifdef RWKV_HIP
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// The larger one, or NaN when one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#ifdef RWKV_HIP
    return a > b || a != a ? a : b;
#else
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#endif
}

__device__ __forceinline__ float log2_of(float x) {
#ifdef RWKV_HIP
    return log2f(x);
#else
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// A float's bits in an order that unsigned comparison understands.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(x + 0.f);  // -0 is 0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Over a warp's lanes; all of them get the result.
#ifdef RWKV_HIP
__device__ __forceinline__ uint32_t lane_max(uint32_t v) {
    for (int d = LANES / 2; d; d /= 2) v = max(v, uint32_t(__shfl_xor_sync(ALL, int(v), d, LANES)));
    return v;
}
__device__ __forceinline__ int lane_first(int v) { return lane_min(v); }
// A bit for each lane; the wavefront may have twice as many.
__device__ __forceinline__ uint32_t lane_ballot(bool v) { return uint32_t(__ballot(v) >> (__lane_id() & LANES)); }
__device__ __forceinline__ int lane_add(int v) { return lane_sum(v); }
#else
__device__ __forceinline__ uint32_t lane_max(uint32_t v) { return __reduce_max_sync(ALL, v); }
__device__ __forceinline__ int lane_first(int v) { return __reduce_min_sync(ALL, v); }
__device__ __forceinline__ uint32_t lane_ballot(bool v) { return __ballot_sync(ALL, v); }
__device__ __forceinline__ int lane_add(int v) { return __reduce_add_sync(ALL, v); }
#endif
// Sum over the lower lanes.
__device__ __forceinline__ int lane_before(int v) {
    const int lane = threadIdx.x % LANES;
    int sum = v;
    for (int d = 1; d < LANES; d *= 2) {
        const int below = __shfl_up_sync(ALL, sum, d, LANES);
        if (lane >= d) sum += below;
    }
    return sum - v;
}

// Sums over the lanes of N numbers at once, N a power of two: lane i gets number i / (LANES / N).
template <int N, int DISTANCE = LANES / 2>
__device__ __forceinline__ float lane_sums(const float (&v)[N]) {
    if constexpr (DISTANCE == 0) {
        return v[0];
    } else if constexpr (N == 1) {
        const float sum[1] = {v[0] + __shfl_xor_sync(ALL, v[0], DISTANCE, LANES)};
        return lane_sums<1, DISTANCE / 2>(sum);
    } else {
        const bool upper = threadIdx.x & DISTANCE;
        float sums[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const float kept = upper ? v[i + N / 2] : v[i], given = upper ? v[i] : v[i + N / 2];
            sums[i] = kept + __shfl_xor_sync(ALL, given, DISTANCE, LANES);
        }
        return lane_sums<N / 2, DISTANCE / 2>(sums);
    }
}

// The place of the n-th bit that is set, from 0.
__device__ __forceinline__ int place_of_bit(uint32_t bits, int n) {
    int place = 0;
#pragma unroll
    for (int width = LANES / 2; width; width /= 2) {
        const int below = __popc(bits & ((1u << width) - 1));
        if (n >= below) n -= below, bits >>= width, place += width;
    }
    return place;
}

// Vec8 neighbouring logits.
template <class T>
struct alignas(16) Vec8 {
    T x[8];
};
// The same on their way from memory, in whole registers: eight halves would be taken apart, and so waited for, at once.
template <class T>
struct alignas(16) PackedVec8 {
    uint32_t words[2 * sizeof(T)];
    __device__ __forceinline__ Vec8<T> unpack() const {
        Vec8<T> e;
        memcpy(&e, words, sizeof(e));
        return e;
    }
};
template <class T>
__device__ __forceinline__ T minus_infinity() {
    if constexpr (sizeof(T) == 4) {
        return -INFINITY;
    } else {
        const uint16_t bits = std::is_same<T, __half>::value ? 0xfc00 : 0xff80;
        T x;
        memcpy(&x, &bits, sizeof(x));
        return x;
    }
}
// The largest of them, NaN when one is.
template <class T>
__device__ __forceinline__ float largest_of(const Vec8<T>& e) {
#ifndef RWKV_HIP
    if constexpr (std::is_same<T, __half>::value) {
        const __half2* h = reinterpret_cast<const __half2*>(e.x);
        const __half2 m = __hmax2_nan(__hmax2_nan(h[0], h[1]), __hmax2_nan(h[2], h[3]));
        return __half2float(__hmax_nan(__low2half(m), __high2half(m)));
    }
#endif
    float v = to_float(e.x[0]);
#pragma unroll
    for (int j = 1; j < 8; j++) v = max_or_nan(v, to_float(e.x[j]));
    return v;
}

// Two halves in a register.
__device__ __forceinline__ float2 floats_of(uint32_t halves) {
    __half two[2];
    memcpy(two, &halves, sizeof(two));
    return {to_float(two[0]), to_float(two[1])};
}
__device__ __forceinline__ uint32_t halves_of(float a, float b) {
    const __half two[2] = {__float2half(a), __float2half(b)};
    uint32_t halves;
    memcpy(&halves, two, sizeof(halves));
    return halves;
}
constexpr uint32_t NAN_HALVES = 0x7fff7fff, MINUS_INFINITY_HALVES = 0xfc00fc00;

}  // namespace rwkv
