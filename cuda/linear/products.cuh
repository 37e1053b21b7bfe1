// What the sources of matrix products share: the device, loads of weights, small products of tensor cores, and tables of
// products that share a launch: out[n, j] = activation(bias[j] + sum over k of x[n, k] weight[j, k]).
#pragma once

#include "../launch.cuh"

namespace rwkv {

constexpr int CLUSTER = 8;  // blocks, on every device that has clusters

struct Device {
    int processors = 0;
    bool clusters = false;
    bool hopper = false;
};
inline Device device() {
    static const Device known = [] {
        Device d;
        int index = 0, major = 0;
        cudaGetDevice(&index);
        cudaDeviceGetAttribute(&d.processors, cudaDevAttrMultiProcessorCount, index);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
        d.clusters = HAS_CLUSTERS && major >= 9, d.hopper = FOR_HOPPER && major == 9;
        return d;
    }();
    return known;
}

// Weights pass by once: they stay out of L1.
__device__ __forceinline__ uint4 load_weights(const __half* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// The same, or zeros when not `wanted`; no branch, so that many are under way at once.
__device__ __forceinline__ uint4 load_weights_if(const __half* p, bool wanted) {
    uint4 v;
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n"
        "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
        "@wanted ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(p), "r"(int(wanted)));
    return v;
}

// c [16, 8] += a [16, 16] b [16, 8].
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

constexpr float FP16_MAX = 65504.f;

struct Product {
    const __half* x;       // [N, K], rows x_stride apart
    const __half* weight;  // [rows, K]
    const float* bias;     // [rows] or null
    void* out;             // [N, rows], rows out_stride apart; fp32 when `wide`, else fp16
    int x_stride;
    int out_stride;
    int rows;
    int width;  // K, a multiple of 32
    int activation;
    bool wide;
    const void* scales = nullptr;  // of a quantised weight, see quant.cuh
};
constexpr int MAX_PRODUCTS = 7;
struct Products {
    int first_tile[MAX_PRODUCTS + 1] = {};  // of each product among the tiles of all
    int tiles = 0;
    int count = 0;
    int num_tokens = 0;
    Product item[MAX_PRODUCTS];

    void add(const Product& product, int tile_rows) {
        first_tile[count] = tiles;
        item[count++] = product;
        tiles += (product.rows + tile_rows - 1) / tile_rows;
        for (int i = count; i <= MAX_PRODUCTS; i++) first_tile[i] = tiles;
    }
    __device__ __forceinline__ int of(int tile) const {
        int i = 0;
#pragma unroll
        for (int j = 1; j < MAX_PRODUCTS; j++) i += tile >= first_tile[j];
        return i;
    }
};

__device__ __forceinline__ float activate(int activation, float v) {
    if (activation == RELU_SQUARE) {
        v = fmaxf(v, 0.f);
        return fminf(v * v, FP16_MAX);
    }
    if (activation == TANH) return tanhf(v);
    if (activation == SIGMOID) return __fdividef(1.f, 1.f + __expf(-v));
    return v;
}

__device__ __forceinline__ float bias_of(const Product& p, int row) { return p.bias ? p.bias[min(row, p.rows - 1)] : 0.f; }

// Activates and stores COUNT neighbouring sums of a token.
template <int COUNT>
__device__ __forceinline__ void store(const Product& p, int token, int row, float (&v)[COUNT]) {
    const int64_t at = int64_t(token) * p.out_stride + row;
    alignas(16) __half halves[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        v[i] = activate(p.activation, v[i]);
        halves[i] = __float2half_rn(v[i]);
    }
    if (row + COUNT > p.rows || p.out_stride % COUNT) {
        for (int i = 0; i < COUNT && row + i < p.rows; i++) {
            if (p.wide) static_cast<float*>(p.out)[at + i] = v[i];
            else static_cast<__half*>(p.out)[at + i] = halves[i];
        }
    } else if (p.wide) {
        float* out = static_cast<float*>(p.out) + at;
        if constexpr (COUNT == 2) *reinterpret_cast<float2*>(out) = make_float2(v[0], v[1]);
        else
#pragma unroll
            for (int i = 0; i < COUNT; i += 4) *reinterpret_cast<float4*>(out + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    } else {
        __half* out = static_cast<__half*>(p.out) + at;
        if constexpr (COUNT == 2) *reinterpret_cast<uint32_t*>(out) = *reinterpret_cast<uint32_t*>(halves);
        if constexpr (COUNT == 4) *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2*>(halves);
        if constexpr (COUNT == 8) *reinterpret_cast<uint4*>(out) = *reinterpret_cast<uint4*>(halves);
    }
}

// Of the pairs of low-rank matrices (LoRA) that make w, a, v_mix and the gate of a token.
struct LoraRanks {
    int w, a, v, g;
    int total() const { return w + a + v + g; }
};
struct Biases {
    const void *w0, *a0, *v0;  // fp32
};
struct Gates {
    void *w_raw, *a, *v_mix, *gate;
};

// The pairs' first matrices: hidden [N, R] from mixed [6, N, width] and lora_down [R, width].
inline void add_lora_down(Products& all, const __half* mixed, const __half* lora_down, __half* hidden, int width, LoraRanks ranks,
                       int tile_rows) {
    const int rank[4] = {ranks.w, ranks.a, ranks.v, ranks.g}, plane[4] = {3, 4, 2, 5};
    const int activation[4] = {TANH, NONE, NONE, SIGMOID};
    for (int i = 0, row = 0; i < 4; row += rank[i++])
        if (rank[i])
            all.add({mixed + int64_t(plane[i]) * all.num_tokens * width, lora_down + int64_t(row) * width, nullptr, hidden + row,
                     width, ranks.total(), rank[i], width, activation[i], false},
                    tile_rows);
}

// The second ones, [N, width] each, from hidden and `lora_up`: [width, rank] of w, a, v, g one after another.
inline void add_lora_up(Products& all, const __half* hidden, const __half* lora_up, Biases biases, Gates gates, int width,
                       LoraRanks ranks, int tile_rows) {
    const int rank[4] = {ranks.w, ranks.a, ranks.v, ranks.g}, activation[4] = {NONE, SIGMOID, SIGMOID, NONE};
    const void* const bias[4] = {biases.w0, biases.a0, biases.v0, nullptr};
    void* const out[4] = {gates.w_raw, gates.a, gates.v_mix, gates.gate};
    for (int i = 3, row = ranks.total(); i >= 0; i--) {  // the longest sums first
        row -= rank[i];
        if (rank[i])
            all.add({hidden + row, lora_up + int64_t(row) * width, static_cast<const float*>(bias[i]), out[i], ranks.total(), width,
                     width, rank[i], activation[i], i == 0},
                    tile_rows);
    }
}

// How a grouped product (grouped.cu) is cut up.
//   tile    tokens of a tile: 32, 64, 128, 160 or 256; where `height` is 64, up to 128
//   splits  thread blocks that share its K, up to 8; 1 where the tile is 256, or 64 x 128
//   blocks  for which a multiprocessor shall have room, up to 4
//   height  rows of weights of a tile: 64 or 128
struct GroupedCut {
    int tile, splits, blocks, height;
};

// The products of `all`, added with tiles of `height` rows, on a Hopper device; see grouped.cu. Returns a CUDA error number.
int start_grouped(const Products& all, const GroupedCut& cut, int overlap, void* stream);

}  // namespace rwkv
