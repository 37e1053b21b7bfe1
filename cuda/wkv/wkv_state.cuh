// How the token-by-token forms of the wkv recurrences hold a head's state: 64 values (rows) x 64 keys (columns), eight neighbouring
// lanes to a row, eight keys each.
#pragma once

#include "wkv.cuh"

namespace rwkv {

constexpr int KEYS = 8;              // keys of a lane
constexpr int GROUP = HEAD / KEYS;   // lanes of a row
constexpr int BAND = LANES / GROUP;  // rows that a warp holds at once

__device__ __forceinline__ float group_sum(float v) {
#pragma unroll
    for (int d = GROUP / 2; d; d /= 2) v += __shfl_xor_sync(ALL, v, d, LANES);
    return v;
}

// The same of N values at once, a power of two up to GROUP, to the same bits with a third of the exchanges: from one exchange to the next
// each lane goes on with half of them. Of a row's lanes those from i * GROUP / N on get the i-th sum; see `group_sum_of`.
template <int N>
__device__ __forceinline__ float group_sums(float (&v)[N]) {
    int d = GROUP / 2;
#pragma unroll
    for (int n = N / 2; n; n /= 2, d /= 2) {
        const bool upper = threadIdx.x & d;
#pragma unroll
        for (int i = 0; i < n; i++) {
            const float own = upper ? v[i + n] : v[i], given = upper ? v[i] : v[i + n];
            v[i] = own + __shfl_xor_sync(ALL, given, d, LANES);
        }
    }
#pragma unroll
    for (; d; d /= 2) v[0] += __shfl_xor_sync(ALL, v[0], d, LANES);
    return v[0];
}
// Gives all lanes the i-th of N.
template <int N>
__device__ __forceinline__ float group_sum_of(float sums, int i) {
    return __shfl_sync(ALL, sums, threadIdx.x % LANES / GROUP * GROUP + i * (GROUP / N), LANES);
}

struct alignas(16) Outputs {
    float of_value[HEAD];
};

// Past the L1 cache, in which nobody would look for a state again.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
#ifdef RWKV_HIP
    return *p;
#else
    return __ldcg(p);
#endif
}
__device__ __forceinline__ void store_once(uint4* p, uint4 v) {
#ifdef RWKV_HIP
    *p = v;
#else
    __stcg(p, v);
#endif
}

// Which keys a lane holds, and how: two runs of four, so that a row's eight lanes read whole 128-byte lines of a state. `place`:
// where a key stands in a token's vectors, whose first half is the lanes' first runs, the second the others; no banks collide.
template <class State>
struct Keys;
template <>
struct Keys<__half> {
    uint4 raw;
    static __device__ __forceinline__ int place(int key) { return key / 4 % 2 * HEAD / 2 + key / KEYS * 4 + key % 4; }
    __device__ __forceinline__ void load(const __half* row) {
        raw = load_once(reinterpret_cast<const uint4*>(row + threadIdx.x % GROUP * KEYS));
    }
    __device__ __forceinline__ void unpack(float (&s)[KEYS]) const {
        const __half2* pairs = reinterpret_cast<const __half2*>(&raw);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 pair = __half22float2(pairs[j]);
            s[2 * j] = pair.x, s[2 * j + 1] = pair.y;
        }
    }
    static __device__ __forceinline__ uint4 pack(const float (&s)[KEYS]) {
        uint4 raw;
        __half2* pairs = reinterpret_cast<__half2*>(&raw);
#pragma unroll
        for (int j = 0; j < 4; j++) pairs[j] = __floats2half2_rn(s[2 * j], s[2 * j + 1]);
        return raw;
    }
    static __device__ __forceinline__ void store(__half* row, const float (&s)[KEYS]) {
        store_once(reinterpret_cast<uint4*>(row + threadIdx.x % GROUP * KEYS), pack(s));
    }
};
template <>
struct Keys<float> {
    float4 raw[2];
    static __device__ __forceinline__ int place(int key) { return key; }
    static __device__ __forceinline__ int run(int half) { return half * HEAD / 2 + threadIdx.x % GROUP * 4; }
    __device__ __forceinline__ void load(const float* row) {
        raw[0] = *reinterpret_cast<const float4*>(row + run(0)), raw[1] = *reinterpret_cast<const float4*>(row + run(1));
    }
    __device__ __forceinline__ void unpack(float (&s)[KEYS]) const {
        s[0] = raw[0].x, s[1] = raw[0].y, s[2] = raw[0].z, s[3] = raw[0].w;
        s[4] = raw[1].x, s[5] = raw[1].y, s[6] = raw[1].z, s[7] = raw[1].w;
    }
    static __device__ __forceinline__ void store(float* row, const float (&s)[KEYS]) {
        *reinterpret_cast<float4*>(row + run(0)) = make_float4(s[0], s[1], s[2], s[3]);
        *reinterpret_cast<float4*>(row + run(1)) = make_float4(s[4], s[5], s[6], s[7]);
    }
};

__device__ __forceinline__ void pick(const float* vector, float (&v)[KEYS]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 four = *reinterpret_cast<const float4*>(vector + half * HEAD / 2 + threadIdx.x % GROUP * 4);
        v[4 * half] = four.x, v[4 * half + 1] = four.y, v[4 * half + 2] = four.z, v[4 * half + 3] = four.w;
    }
}

__device__ __forceinline__ float dot(const float (&a)[KEYS], const float (&b)[KEYS]) {
    float even = a[0] * b[0], odd = a[1] * b[1];
#pragma unroll
    for (int j = 2; j < KEYS; j += 2) even = fmaf(a[j], b[j], even), odd = fmaf(a[j + 1], b[j + 1], odd);
    return even + odd;
}

}  // namespace rwkv
