// sparse_ffn, for weights of fp16 and quantised ones: see sparse_ffn.cu.
#pragma once

#include "hopper.cuh"
#include "quant.cuh"

namespace rwkv {
namespace {

template <class T>
__device__ __forceinline__ T load_if(const T* p, bool wanted) {  // no branch, so that many are under way at once
    static_assert(sizeof(T) == 8 || sizeof(T) == 4 || sizeof(T) == 2);
    if constexpr (sizeof(T) == 8) {
        T v;
        asm volatile(
            "{ .reg .pred wanted; setp.ne.b32 wanted, %3, 0;\n"
            "mov.b32 %0, 0; mov.b32 %1, 0;\n"
            "@wanted ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2]; }"
            : "=&r"(v.x), "=&r"(v.y)
            : "l"(p), "r"(int(wanted)));
        return v;
    } else if constexpr (sizeof(T) == 4) {
        uint32_t v;
        asm volatile("{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0; mov.b32 %0, 0; @wanted ld.global.nc.u32 %0, [%1]; }"
                     : "=&r"(v)
                     : "l"(p), "r"(int(wanted)));
        return v;
    } else {
        uint16_t v;
        asm volatile("{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0; mov.b16 %0, 0; @wanted ld.global.nc.u16 %0, [%1]; }"
                     : "=&h"(v)
                     : "l"(p), "r"(int(wanted)));
        return v;
    }
}

// Some neighbouring columns of a unit's row.
template <int FORMAT>
struct Some {
    static constexpr int COLUMNS = 16, AT_ONCE = wide_codes(FORMAT) ? 6 : 8;  // rows on their way
    static constexpr int WORDS = wide_codes(FORMAT) ? 4 : 2;
    uint32_t codes[WORDS], upper;
    __half scale;

    __device__ __forceinline__ void load(const void* weight, const void* scales, int64_t unit, int width, int column, bool wanted) {
        const uint8_t* const row = static_cast<const uint8_t*>(weight) + unit * row_bytes(FORMAT, width);
        if constexpr (wide_codes(FORMAT)) {
            const uint4 v = load_weights_if(reinterpret_cast<const __half*>(row + column), wanted);
            codes[0] = v.x, codes[1] = v.y, codes[2] = v.z, codes[3] = v.w;
        } else {
            const uint2 v = load_if(reinterpret_cast<const uint2*>(row + column / 2), wanted);
            codes[0] = v.x, codes[1] = v.y;
        }
        const uint8_t* const second = row + lower_bytes(FORMAT, width);
        if constexpr (FORMAT == FP6) upper = load_if(reinterpret_cast<const uint32_t*>(second) + column / 16, wanted);
        if constexpr (FORMAT == FP5) upper = load_if(reinterpret_cast<const uint16_t*>(second) + column / 16, wanted);
        if constexpr (grouped(FORMAT))
            scale = __ushort_as_half(load_if(static_cast<const uint16_t*>(scales) + (unit * width + column) / BLOCK, wanted));
    }
    __device__ __forceinline__ void add(float (&sum)[COLUMNS], float strength) const {
        if constexpr (wide_codes(FORMAT)) {
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                const uint2 v = decode_bytes<FORMAT>(codes[i]);
                add_pair(sum[4 * i], sum[4 * i + 1], v.x, strength), add_pair(sum[4 * i + 2], sum[4 * i + 3], v.y, strength);
            }
        } else {
            if constexpr (grouped(FORMAT)) strength *= __half2float(scale);
            const uint32_t above = FORMAT == FP5 ? spread_signs(upper) : upper;
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                const uint4 v = decode_nibbles<FORMAT>(codes[i], above, 4 * i);
                float* const to = sum + 8 * i;
                add_pair(to[0], to[4], v.x, strength), add_pair(to[1], to[5], v.y, strength);
                add_pair(to[2], to[6], v.z, strength), add_pair(to[3], to[7], v.w, strength);
            }
        }
    }
    static __device__ __forceinline__ void add_pair(float& a, float& b, uint32_t pair, float strength) {
        const float2 v = __half22float2(halves_of(pair));
        a = fmaf(strength, v.x, a), b = fmaf(strength, v.y, b);
    }
    // What a column's sum is multiplied with at the end.
    static __device__ __forceinline__ float scale_of(const void* scales, int column) {
        return grouped(FORMAT) ? 1.f : unit<FORMAT>() * static_cast<const float*>(scales)[column];
    }
};

template <>
struct Some<PLAIN> {
    static constexpr int COLUMNS = 8, AT_ONCE = 8;
    uint4 halves;

    __device__ __forceinline__ void load(const void* weight, const void*, int64_t unit, int width, int column, bool wanted) {
        halves = load_weights_if(static_cast<const __half*>(weight) + column + unit * width, wanted);
    }
    __device__ __forceinline__ void add(float (&sum)[COLUMNS], float strength) const {
        const __half2* pairs = reinterpret_cast<const __half2*>(&halves);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float2 v = __half22float2(pairs[c]);
            sum[2 * c] = fmaf(strength, v.x, sum[2 * c]);
            sum[2 * c + 1] = fmaf(strength, v.y, sum[2 * c + 1]);
        }
    }
    static __device__ __forceinline__ float scale_of(const void*, int) { return 1.f; }
};

#if __CUDA_ARCH__ >= 900
// Store into the shared memory of a block of the cluster, where the bytes count towards its `barrier`. Addresses as of the cluster.
__device__ __forceinline__ void send(uint32_t to, float value, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_int(value)), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void send(float* to, float value, uint64_t* barrier, int rank) {
    send(remote_address(to, rank), value, remote_address(barrier, rank));
}
#endif

// Every block has one token: rows that several tokens need come from L2 for all but the first.
//
// The blocks of a cluster share the units of some columns. A block lists those of its part that are on; its workers, of `lanes`
// lanes with 8 or 16 columns each, deal the list out among themselves.
constexpr int SPARSE_THREADS = 512, SPARSE_WARPS = SPARSE_THREADS / LANES;

template <int FORMAT>
__global__ __launch_bounds__(SPARSE_THREADS, 2) void sparse_ffn(const __half* hidden, const void* weight, const void* scales,
                                                                    __half* out, int num_tokens, int units, int width, int lanes,
                                                                    int splits) {
    constexpr int AT_ONCE = Some<FORMAT>::AT_ONCE, COUNT = Some<FORMAT>::COLUMNS;
    __shared__ int2 list[4 * SPARSE_THREADS];  // of units that are on, each with its value as fp32 bits
    __shared__ int counts[SPARSE_WARPS];
    __shared__ __align__(16) float parts[SPARSE_WARPS * 256];  // [SPARSE_WARPS, columns]
    __shared__ float gathered[256];                            // [splits, columns / splits]
    release_next();
    const int columns = lanes * COUNT, each = columns / splits;
#if __CUDA_ARCH__ >= 900
    __shared__ uint64_t complete;
    if (threadIdx.x == 0) {
        init_barrier(&complete, 1);
        publish_barriers();
        expect_bytes(&complete, columns * 4);
    }
    cluster_arrive_relaxed();
#endif
    const int lane_bits = 31 - __clz(lanes), each_bits = 31 - __clz(each);  // both are powers of two
    const int workers = SPARSE_THREADS >> lane_bits, worker = threadIdx.x >> lane_bits, lane = threadIdx.x & (lanes - 1);
    const int warp = threadIdx.x / LANES;
    const int rank = blockIdx.x % splits, token = blockIdx.x / splits % num_tokens, block = blockIdx.x / splits / num_tokens;
    const int share = ((units + splits - 1) / splits + 3) / 4 * 4;
    const int begin = min(rank * share, units), end = min(begin + share, units);
    const int column = (block * lanes + lane) * COUNT;
    int unit = begin + 4 * threadIdx.x;
    const __half* values = hidden + int64_t(token) * units + unit;
    if constexpr (FORMAT == NF4) wait_for_previous();  // whose codes take the registers for it
    else wait_for_previous_knowing(values, end, column, worker);

    float sum[COUNT] = {};
    constexpr int ROUND_UNITS = 4 * SPARSE_THREADS;
    for (int round = begin; round < end; round += ROUND_UNITS, unit += ROUND_UNITS, values += ROUND_UNITS) {
        uint2 raw = make_uint2(0, 0);
        if (unit < end) raw = *reinterpret_cast<const uint2*>(values);
        const uint32_t value[4] = {raw.x & 0xffff, raw.x >> 16, raw.y & 0xffff, raw.y >> 16};
        int count = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) count += (value[i] & 0x7fff) != 0;
        int upto = count;
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) {
            const int below = __shfl_up_sync(ALL, upto, d);
            if (threadIdx.x % LANES >= d) upto += below;
        }
        if (round > begin) __syncthreads();  // the list before has been worked through
        if (threadIdx.x % LANES == LANES - 1) counts[warp] = upto;
        __syncthreads();
        int at = upto - count, total = 0;
#pragma unroll
        for (int s = 0; s < SPARSE_WARPS; s++) {
            if (s == warp) at += total;
            total += counts[s];
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (value[i] & 0x7fff)
                list[at++] = make_int2(unit + i, __float_as_int(__half2float(__ushort_as_half(uint16_t(value[i])))));
        __syncthreads();
        for (int first = 0; first < total; first += AT_ONCE * workers) {
            Some<FORMAT> w[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int entry = first + j * workers + worker;
                w[j].load(weight, scales, list[min(entry, total - 1)].x, width, column, entry < total);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int entry = first + j * workers + worker;
                const float strength = entry < total ? __int_as_float(list[entry].y) : 0.f;
                w[j].add(sum, strength);
            }
        }
    }
    // Add up the workers: within a warp, then the warps of the block in order, then the blocks of the cluster in order.
    for (int d = lanes; d < LANES; d *= 2)
#pragma unroll
        for (int c = 0; c < COUNT; c++) sum[c] += __shfl_xor_sync(ALL, sum[c], d);
    if (threadIdx.x % LANES < lanes) {
        float4* to = reinterpret_cast<float4*>(parts + warp * columns + lane * COUNT);
#pragma unroll
        for (int c = 0; c < COUNT; c += 4) to[c / 4] = make_float4(sum[c], sum[c + 1], sum[c + 2], sum[c + 3]);
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    cluster_wait();
#endif
    if (threadIdx.x < columns) {
        float total = 0.f;
#pragma unroll
        for (int s = 0; s < SPARSE_WARPS; s++) total += parts[s * columns + threadIdx.x];
        float* to = gathered + rank * each + (threadIdx.x & (each - 1));
#if __CUDA_ARCH__ >= 900
        send(to, total, &complete, threadIdx.x >> each_bits);
#else
        *to = total;
#endif
    }
#if __CUDA_ARCH__ < 900
    __syncthreads();
#endif
    if (threadIdx.x < each) {
#if __CUDA_ARCH__ >= 900
        wait(&complete, 0);
#endif
        float total = 0.f;
        for (int s = 0; s < splits; s++) total += gathered[s * each + threadIdx.x];
        const int at = block * columns + rank * each + threadIdx.x;
        out[int64_t(token) * width + at] = __float2half_rn(total * Some<FORMAT>::scale_of(scales, at));
    }
}

template <int FORMAT>
cudaError_t start_sparse(const void* hidden, const void* weight, const void* scales, void* out, int num_tokens, int units, int width,
                         int overlap, void* stream) {
    if (units % 4 || width % 64) return cudaErrorInvalidValue;
    int columns = 256;  // as many as leave most multiprocessors with a block
    while (columns > 64 && (width % columns || width / columns * CLUSTER < device().processors * 3 / 4)) columns /= 2;
    const int lanes = columns / Some<FORMAT>::COLUMNS;
    const int splits = device().clusters ? CLUSTER : 1;
    const unsigned blocks = width / columns * num_tokens * splits;
    return start(sparse_ffn<FORMAT>, {blocks, SPARSE_THREADS, cudaStream_t(stream), overlap, splits},
                 static_cast<const __half*>(hidden), weight, scales, static_cast<__half*>(out), num_tokens, units, width, lanes, splits);
}

}  // namespace
}  // namespace rwkv
