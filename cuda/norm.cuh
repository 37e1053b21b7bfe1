// Rows of the residual stream: how they are dealt out to threads, layer norm, and the blend of two of them. See mix.cu.
#pragma once

#include "cluster.cuh"
#include "launch.cuh"

namespace rwkv {

constexpr int EACH = 8;             // columns of a thread
constexpr int SPAN = EACH * LANES;  // columns of a warp
constexpr int MAX_WIDTH = 4096;
constexpr int MAX_THREADS = MAX_WIDTH / EACH;
constexpr float LAYER_NORM_EPS = 1e-5f;

struct alignas(16) Halves {
    __half2 pair[4];
};

__device__ __forceinline__ Halves load_halves(const __half* p) { return *reinterpret_cast<const Halves*>(p); }
__device__ __forceinline__ void store_halves(__half* p, const Halves& h) { *reinterpret_cast<Halves*>(p) = h; }
// The same as one access, where the compiler makes four of the structure's.
__device__ __forceinline__ Halves load_halves_at_once(const __half* p) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    return reinterpret_cast<const Halves&>(raw);
}
__device__ __forceinline__ void store_halves_at_once(__half* p, const Halves& h) {
    *reinterpret_cast<uint4*>(p) = reinterpret_cast<const uint4&>(h);
}
// For results that are too many to stay in the L2 cache until they are read.
__device__ __forceinline__ void store_passing(__half* p, const Halves& h) {
#ifdef RWKV_HIP
    store_halves(p, h);
#else
    __stcs(reinterpret_cast<float4*>(p), *reinterpret_cast<const float4*>(&h));
#endif
}
__device__ __forceinline__ void store8(float* p, const float (&v)[EACH]) {
    *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
    *reinterpret_cast<float4*>(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
}
// The same by all lanes of a warp, of which those with columns store: two neighbours together fill sectors of 32 bytes at once.
__device__ __forceinline__ void store8_in_pairs(float* p, const float (&v)[EACH], bool live) {
    const bool odd = threadIdx.x % 2;
    float own[4], other[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        own[j] = odd ? v[j + 4] : v[j];
        other[j] = __shfl_xor_sync(ALL, odd ? v[j] : v[j + 4], 1, LANES);
    }
    const float4 mine = make_float4(own[0], own[1], own[2], own[3]);
    const float4 given = make_float4(other[0], other[1], other[2], other[3]);
    float* const first = odd ? p - 4 : p;
    if (!live) return;
    *reinterpret_cast<float4*>(first) = odd ? given : mine;
    *reinterpret_cast<float4*>(first + EACH) = odd ? mine : given;
}
__device__ __forceinline__ void add(float (&v)[EACH], const Halves& h) {
#pragma unroll
    for (int j = 0; j < EACH; j += 2) {
        const float2 pair = __half22float2(h.pair[j / 2]);
        v[j] += pair.x, v[j + 1] += pair.y;
    }
}
__device__ __forceinline__ Halves zero_halves() {
    Halves h;
#pragma unroll
    for (int j = 0; j < 4; j++) h.pair[j] = __floats2half2_rn(0.f, 0.f);
    return h;
}
__device__ __forceinline__ Halves lerp(const Halves& from, const Halves& to, const float (&share)[EACH]) {
    Halves out;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 a = __half22float2(from.pair[j]), b = __half22float2(to.pair[j]);
        out.pair[j] = __floats2half2_rn(fmaf(share[2 * j], b.x - a.x, a.x), fmaf(share[2 * j + 1], b.y - a.y, a.y));
    }
    return out;
}

// Eight constants, loaded right here rather than where they are first used.
__device__ __forceinline__ void load8_now(const float* p, float (&v)[EACH]) {
#ifdef RWKV_HIP
    load8(p, v);
#else
#pragma unroll
    for (int j = 0; j < EACH; j += 4)
        asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[j]), "=f"(v[j + 1]), "=f"(v[j + 2]), "=f"(v[j + 3]) : "l"(p + j));
#endif
}

// The part of a row, of `width` columns, that a block works on; `parts` blocks of a cluster share a row.
struct Place {
    int width, parts, part, warps;
    int column;
    bool live;  // whether this thread has columns

    __device__ __forceinline__ Place(int width, int parts, int part) : width(width), parts(parts), part(part) {
        const int slice = width / parts;
        warps = (slice + SPAN - 1) / SPAN;
        column = part * slice + threadIdx.x * EACH;
        live = threadIdx.x * EACH < slice;
    }
};

struct Moments {
    float2 of_warp[MAX_WIDTH / SPAN];  // mean, sum of squared deviations
};

// sum / count. POWERS: where count is a power of two, by a multiplication with the same result; it pays where many rows follow.
template <bool POWERS>
__device__ __forceinline__ float over(float sum, float count) {
    const uint32_t bits = __float_as_uint(count);
    if (POWERS && bits << 9 == 0) return sum * __uint_as_float(0x7f000000u - bits);
    return sum / count;
}

// Layer norm of R rows at once, rounded to fp16, in two halves: first what each warp knows of its columns, up to the barrier.
// Threads without columns take part with whatever they hold.
template <bool POWERS, int R>
__device__ __forceinline__ void share_moments(const float (&v)[R][EACH], const Place& place, Moments (&moments)[R]) {
    const int warp = threadIdx.x / LANES + place.part * place.warps;
    const float count = fminf(SPAN, place.width - warp * SPAN);
#pragma unroll
    for (int r = 0; r < R; r++) {
        float sum = 0.f, squares = 0.f;
#pragma unroll
        for (int j = 0; j < EACH; j++) sum += v[r][j];
        const float mean = over<POWERS>(lane_sum(place.live ? sum : 0.f), count);
#pragma unroll
        for (int j = 0; j < EACH; j++) squares = fmaf(v[r][j] - mean, v[r][j] - mean, squares);
        cluster_store(&moments[r].of_warp[warp], make_float2(mean, lane_sum(place.live ? squares : 0.f)), place.parts);
    }
    cluster_sync(place.parts);
}
template <bool POWERS, int R>
__device__ __forceinline__ void normalize_by(const float (&v)[R][EACH], const float (&weight)[EACH], const float (&bias)[EACH],
        const Place& place, const Moments (&moments)[R], Halves (&out)[R]) {
    const int lane = threadIdx.x % LANES;
    const bool counts = lane < place.parts * place.warps;
    const float columns = counts ? fminf(SPAN, place.width - lane * SPAN) : 0.f;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const float2 own = counts ? moments[r].of_warp[lane] : make_float2(0.f, 0.f);
        const float mean = over<POWERS>(lane_sum(columns * own.x), place.width);
        const float squares = lane_sum(fmaf(columns * (own.x - mean), own.x - mean, own.y));
        const float scale = rsqrtf(over<POWERS>(squares, place.width) + LAYER_NORM_EPS);
#pragma unroll
        for (int j = 0; j < 4; j++)
            out[r].pair[j] = __floats2half2_rn(fmaf((v[r][2 * j] - mean) * scale, weight[2 * j], bias[2 * j]),
                fmaf((v[r][2 * j + 1] - mean) * scale, weight[2 * j + 1], bias[2 * j + 1]));
    }
}
template <int R>
__device__ __forceinline__ void normalize(const float (&v)[R][EACH], const float (&weight)[EACH], const float (&bias)[EACH],
        const Place& place, Moments (&moments)[R], Halves (&out)[R]) {
    share_moments<false>(v, place, moments);
    normalize_by<false>(v, weight, bias, place, moments, out);
}

}  // namespace rwkv
