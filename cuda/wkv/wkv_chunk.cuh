// The wkv recurrence in matrix form, 16 tokens at a time: what wkv_chunks.cu and wkv_spread.cu share.
//
// With a = kk, b = -kk times the learning rate, G_i the decay from a chunk's start through token i, and S the state before it,
//     u_i = S_{i-1} a_i = S (G_{i-1} a_i) + sum_{j<i} (u_j b_j + v_j k_j) . (G_{i-1} / G_j a_i)
// is a unit lower triangular system for all u at once. Its inverse does not depend on S, so that a chunk becomes
//     U = solved S^T,   Y = query S^T + within V,   S <- S diag(G) + U^T removed + V^T inserted
// with four 16 x 64 matrices and a 16 x 16 one. (The WY form of generalised delta rules: Yang et al., "Parallelizing linear
// transformers with the delta rule", 2024.) Decays are counted from the chunk's middle: a ratio G_i / G_j then splits into two
// factors between e^-4.9 and e^4.9, which fp16 holds. Sums and the state are fp32; the factors of products are fp16.
#pragma once

#include "wkv.cuh"

#ifndef RWKV_HIP

namespace rwkv {
namespace {

constexpr int CHUNK = 16;
constexpr float LOG2_E = 1.4426950408889634f;

// A preparing warp's own: two 16 x 16 matrices, the triangular system, then its solution.
struct alignas(128) Scratch {
    float system[CHUNK * CHUNK], own[CHUNK * CHUNK];
};

// Matrices lie in rows of 64 or 16 halves, their 16-byte units permuted so that eight rows of a column of units never collide.
__device__ __forceinline__ int wide_at(int row, int column) { return row * HEAD + ((column / 8 ^ row % 8) * 8) + column % 8; }
__device__ __forceinline__ int square_at(int row, int column) {
    return row * CHUNK + ((column / 8 ^ row / 4 % 2) * 8) + column % 8;
}

template <bool TRANSPOSED>
__device__ __forceinline__ uint4 load_matrices(const __half* p) {
    uint4 m;
    const uint32_t at = uint32_t(__cvta_generic_to_shared(p));
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(at) : "memory");
    return m;
}

// 16 x 16 parts, at column `from`, as the operands of products. Left ones are stored in rows or, turned, in columns; a right one
// [k, n] is stored with k in rows (`down`) or with n in rows (`across`), two n8 halves: x, y and z, w.
__device__ __forceinline__ int turned_row() { return threadIdx.x % 8 + threadIdx.x / 16 % 2 * 8; }
__device__ __forceinline__ int turned_column() { return threadIdx.x / 8 % 2 * 8; }
__device__ __forceinline__ uint4 left_turned(const __half* m, int from) {
    return load_matrices<true>(m + wide_at(turned_row(), from + turned_column()));
}
__device__ __forceinline__ uint4 square_left_turned(const __half* m) {
    return load_matrices<true>(m + square_at(turned_row(), turned_column()));
}
__device__ __forceinline__ uint4 square_right_across(const __half* m) {
    return load_matrices<false>(m + square_at(turned_row(), turned_column()));
}

// sum += left right, for n = 8 columns. A lane holds of a sum: row lane / 4, columns lane % 4 * 2 and the next; then row + 8.
__device__ __forceinline__ void multiply(float (&sum)[4], const uint4& left, uint32_t low, uint32_t high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left.x), "r"(left.y), "r"(left.z), "r"(left.w), "r"(low), "r"(high));
}
// The same for 16 columns.
__device__ __forceinline__ void multiply(float (&sum)[2][4], const uint4& left, const uint4& right) {
    multiply(sum[0], left, right.x, right.y);
    multiply(sum[1], left, right.z, right.w);
}
__device__ __forceinline__ uint32_t pack(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
// A 16 x 16 sum as the left operand of the next product.
__device__ __forceinline__ uint4 as_left(const float (&a)[4], const float (&b)[4]) {
    return make_uint4(pack(a[0], a[1]), pack(a[2], a[3]), pack(b[0], b[1]), pack(b[2], b[3]));
}
// Without care for subnormals, which costs three times as much as the functions themselves.
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Solve x = right + system x for the 16 columns of the identity and of `own`, one a lane; the columns, as halves, replace both.
__device__ __forceinline__ void solve(Scratch& scratch) {
    const int column = threadIdx.x % CHUNK;
    const bool second = threadIdx.x % LANES >= CHUNK;
    float x[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float even = second ? scratch.own[i * CHUNK + column] : (i == column ? 1.f : 0.f), odd = 0.f;
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            const float4 four = *reinterpret_cast<const float4*>(scratch.system + i * CHUNK + j);
            even = fmaf(four.x, x[j], even);
            if (j + 1 < i) odd = fmaf(four.y, x[j + 1], odd);
            if (j + 2 < i) even = fmaf(four.z, x[j + 2], even);
            if (j + 3 < i) odd = fmaf(four.w, x[j + 3], odd);
        }
        x[i] = even + odd;
    }
    __syncwarp();
    __half* to = reinterpret_cast<__half*>(scratch.system) + (second ? CHUNK * CHUNK : 0);
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const float* v = x + 8 * part;
        *reinterpret_cast<uint4*>(to + square_at(column, 8 * part)) =
            make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
    }
    __syncwarp();
}

}  // namespace
}  // namespace rwkv

#endif
