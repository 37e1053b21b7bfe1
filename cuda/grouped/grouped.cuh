// What the grouped products of many tokens share (grouped.cu, inputs.cu): stages of shared memory, the sums of a tile by Hopper's
// wgmma, and their way out. Tiles, stages and who loads them are each kernel's own.
#pragma once

#include "../linear/hopper.cuh"
#include "../linear/products.cuh"

namespace rwkv {

constexpr int BK = 64;  // k of a stage: 128 bytes, the width of a swizzled row
constexpr int MAX_STAGES = 8;
constexpr int BAND = 4;  // tiles of tokens that are worked on together, the longest sums first
constexpr int MULTIPROCESSOR_BYTES = 228 << 10;
constexpr int OTHER_BYTES = 2 << 10;  // of a thread block: barriers, and what the device keeps for itself

// fp16 results on their way out, of one warpgroup: rows of 64, whose beginnings lie in different banks.
constexpr int HALF_TOKENS = 32, HALF_PITCH = 64 + 8, SPACE = HALF_TOKENS * HALF_PITCH * 2;

__host__ __device__ constexpr int consumers(int bm) { return bm * 2; }  // threads that multiply
__host__ __device__ constexpr int stage_bytes(int bm, int bn) { return (bm + bn) * BK * 2; }

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES], gathered;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Ring {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance(int stages, int by = 1) {  // at most once past the end
        if ((stage += by) >= stages) stage -= stages, parity ^= 1;
    }
};

// One warpgroup's sums of a tile, over this thread block's part of k.
template <int BM, int BN>
__device__ __forceinline__ void accumulate(
    float (&sums)[BN / 2], int steps, int num_stages, const char* stages, Barriers& barriers, Ring& ring
) {
    // The first lane's, so that the compiler knows it for the same in all and keeps addresses where wgmma wants them.
    const int group = __shfl_sync(ALL, threadIdx.x / 128, 0);
    auto release = [&](int stage) {
        if (threadIdx.x % LANES == 0) arrive(&barriers.empty[stage]);
    };
    int last = 0;
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        wait(&barriers.full[ring.stage], ring.parity);
        const char* const stage = stages + ring.stage * stage_bytes(BM, BN);
        const uint64_t a = describe(stage + group * 64 * BK * 2), b = describe(stage + BM * BK * 2);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / 16; k++) Wgmma<BN, false>::multiply(sums, a + k * 2, b + k * 2, i + k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0) release(last);
        last = ring.stage;
        ring.advance(num_stages);
    }
    wgmma_wait<0>();
    release(last);
}

// A lane's sums are [row, token] fragments: sums[4 j + i] is that of token 8 j + lane % 4 * 2 + i % 2 and of row
// warp * 16 + lane / 4 + i / 2 * 8 of the warpgroup.

static __device__ __noinline__ float tanh_of(float v) { return tanhf(v); }  // long: not to be repeated for every sum

__device__ __forceinline__ uint32_t pack(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(pair);
}

// Write one warpgroup's sums as fp16 through shared memory, 16 bytes a thread.
template <int BN>
__device__ __forceinline__ void store_halves(
    float (&sums)[BN / 2], const Product& p, int tile_row, int tile_token, int num_tokens, float2 bias, char* space
) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / LANES, lane = threadIdx.x % LANES;
    const int row = tile_row + group * 64 + thread % 8 * 8;
    __half* const staged = reinterpret_cast<__half*>(space + group * SPACE);
#pragma unroll
    for (int i = 0; i < BN / 2; i++) sums[i] += i & 2 ? bias.y : bias.x;
    if (p.activation == SIGMOID)
#pragma unroll
        for (int i = 0; i < BN / 2; i++) sums[i] = activate(SIGMOID, sums[i]);
    if (p.activation == TANH)
#pragma unroll
        for (int i = 0; i < BN / 2; i++) sums[i] = tanh_of(sums[i]);
#pragma unroll
    for (int n0 = 0; n0 < BN; n0 += HALF_TOKENS) {
        if (tile_token + n0 >= num_tokens) break;
        sync_threads(1 + group, 128);
#pragma unroll
        for (int j = 0; j < HALF_TOKENS; j += 16) {  // of each 16 tokens: two quarters of the sums' rows, twice
            const float* s = sums + (n0 + j) / 2;
            __half* to = staged + (j + lane / 16 * 8 + lane % 8) * HALF_PITCH + warp * 16 + lane / 8 % 2 * 8;
            store_transposed(to, pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7]));
        }
        sync_threads(1 + group, 128);
#pragma unroll
        for (int n = thread / 8; n < HALF_TOKENS; n += 16) {
            const int token = tile_token + n0 + n;
            if (token < num_tokens && row < p.rows)
                *reinterpret_cast<uint4*>(static_cast<__half*>(p.out) + int64_t(token) * p.out_stride + row) =
                    *reinterpret_cast<const uint4*>(staged + n * HALF_PITCH + thread % 8 * 8);
        }
    }
}

// The same as fp32, right from the registers: the lanes that have a token's sums have eight neighbouring rows, a sector of memory.
template <int BN>
__device__ __forceinline__ void store_floats(
    const float (&sums)[BN / 2], const Product& p, int tile_row, int tile_token, int num_tokens, float2 bias
) {
    const int lane = threadIdx.x % LANES, row = tile_row + threadIdx.x / LANES * 16 + lane / 4;
    if (row >= p.rows) return;  // the rows are multiples of 32
    float* const out = static_cast<float*>(p.out) + row;
#pragma unroll
    for (int j = 0; j < BN / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = tile_token + 8 * j + lane % 4 * 2 + i;
            if (token >= num_tokens) continue;
            float* const to = out + int64_t(token) * p.out_stride;
            to[0] = sums[4 * j + i] + bias.x, to[8] = sums[4 * j + 2 + i] + bias.y;
        }
}

#endif

// [rows, width] with rows `stride` values apart, in boxes of `high` rows.
inline int describe_rows(CUtensorMap* map, const __half* first, int width, int rows, int stride, int high) {
    const uint64_t sizes[] = {uint64_t(width), uint64_t(rows), 1};
    const uint64_t strides[] = {uint64_t(stride) * 2, uint64_t(stride) * 2 * rows};
    const uint32_t box[] = {BK, uint32_t(high), 1};
    return describe_tensor(map, first, 3, sizes, strides, box);
}

inline int processors() {
    static const int known = [] {
        int device = 0, count = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
        return count;
    }();
    return known;
}

}  // namespace rwkv
