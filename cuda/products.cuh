// Tables of matrix products that share a launch: out[n, j] = activation(bias[j] + sum over k of x[n, k] weight[j, k]).
#pragma once

#include "launch.cuh"

namespace rwkv {

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

constexpr int GROUPED_ROWS = 128;  // of weights, to a tile of cuda/grouped.cu

// The products of `all`, added with tiles of GROUPED_ROWS rows, on a Hopper device; see cuda/grouped.cu.
// tile: tokens of a tile, 32, 64, 128, 160 or 256; splits: thread blocks that share its K, up to 8, and 1 where it is 256;
// blocks: for which a multiprocessor shall have room, up to 3. Returns a CUDA error number.
int start_grouped(const Products& all, int tile, int splits, int blocks, int overlap, void* stream);

}  // namespace rwkv
