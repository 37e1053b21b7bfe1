// out[n, m] = scale[m] * sum over k of W[m, k] x[n, k] for some to many rows n, W of 8 bits a value, by Hopper's wgmma with the
// weights as its 64-high operand, in registers.
//
// A tile is WGS times 128 rows of W by BN rows of x. Two warps keep two rings of shared-memory stages full through the copy engine
// (TMA, 128-byte swizzle), 128 values of k a stage: weights, which come from far but go into registers at once, and rows of x,
// which are near but wait for the end of their products. A warpgroup for every 128 weight rows takes their bytes into registers: two
// operands of 64 rows. x is fp16, and weights become fp16 on the way; or both are e4m3 and multiplied as they are, x having a
// scale for each row. The tensor cores keep 14 bits of a sum of e4m3 (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, 3.3.2):
// in narrow tiles, sums of 128 values of k are added up in fp32; wide ones have no registers for that, and their error, 1e-3 of a
// result, is small beside that of e4m3.
//
// Which weight row a lane works on is free: lane 4 g + q of warp w has rows 32 w + 4 g + i, i = 0..3, of the warpgroup's. So
// - of a matrix [M, K] (in the order of rwkv_batch/model/quantized.py: a lane's 16 values of k of each 64 lie together) it reads
//   16 bytes of each row;
// - of a matrix [K, M] it reads 4 bytes, its rows, of each k = 16 s + 2 q + {0, 1, 8, 9}, and turns 4 times 4 bytes over;
// - its results for a row of x are neighbours, 8 bytes of fp16.
// e4m3 rows of x have the values of k that a lane needs at once together: stored[16 s + 4 q + j] = x[16 s + 2 q + {0, 1, 8, 9}[j]].
//
// Where there are too few tiles for the device, `split` thread blocks of a cluster share a tile, each summing a part of k; then
// each adds all sums for its part of the rows of x in the order of k. The L2 cache is not fast enough for what all thread blocks read:
// where x is e4m3, `cast` of a cluster have the same weights and neighbouring rows of x, and each fetches a part of the weights for
// all of them; where x is fp16 and there are few rows, they have neighbouring weights and the same rows of x. A row's result depends on neither its position nor the
// other rows, nor on how many there are while `split` and that stay the same.
#pragma once

#include "../linear/hopper.cuh"

#include <algorithm>

namespace rwkv {
namespace {

constexpr int BK = 128;  // k of a stage: bytes of a row of weights
constexpr int GROUP_ROWS = 128, GROUP_BYTES = GROUP_ROWS * BK;  // weight rows of a warpgroup, and their bytes of a stage
constexpr int BOX_ROWS = 64, BOX_BYTES = BOX_ROWS * BK;         // of weights that one copy takes: half of those
constexpr int MAX_STAGES = 16;
constexpr int MAX_CLUSTER = 8;  // thread blocks of a cluster on every device
constexpr int BAND = 8;       // tiles of rows of x that go with all weights before the next: they stay in the L2 cache

enum Values : int { INT8_VALUES, E4M3_VALUES };

struct Shape {
    __half* out;               // [batch, N, width]
    const float* scales;       // [batch, M] of weight rows
    const float* token_scales;  // [batch, N] of rows of x, where they are e4m3
    uint32_t* active_mask;     // [M / 32] or null: bit i of word w says whether weight row 32 w + i has a result that is not zero
    int N, M, width, k_blocks, m_tiles, n_tiles, batch, split, cast, log_cast;  // of tiles `cast` at once
    int stages, row_stages;  // of weights, of rows of x
    int shared;              // bytes of them, or of the sums that a split exchanges; behind those are the barriers
    int activation;
};

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES], rows_full[MAX_STAGES], rows_empty[MAX_STAGES];
};

// Thread blocks that need many registers have a whole loading warpgroup, whose registers the others get; else the two loading warps.
__host__ __device__ constexpr bool wide(int bn, bool fp8) { return fp8 || bn > 64; }
__host__ __device__ constexpr int threads(int wgs, int bn, bool fp8) { return wgs * 128 + (wide(bn, fp8) ? 128 : 64); }
__host__ __device__ constexpr int row_stage(int bn, bool fp8) { return bn * BK * (fp8 ? 1 : 2); }  // bytes
constexpr int row_stages(int stages) { return (3 * stages + 3) / 4; }  // of rows of x, beside so many of weights
__host__ __device__ constexpr int float_pitch(int wgs) { return wgs * GROUP_ROWS + 4; }  // fp32 row of the partial sums

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// max(a, 0)^2 that fits into fp16; NaN stays.
__device__ __forceinline__ float relu_squared(float a) {
    a = a < 0.f ? 0.f : a * a;
    return a > 65504.f ? 65504.f : a;
}
// Two results as fp16.
__device__ __forceinline__ uint32_t finish(float a, float b, int activation) {
    if (activation == RELU_SQUARE) a = relu_squared(a), b = relu_squared(b);
    const __half2 pair = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(pair);
}

// A thread block's part of the work: every `stride`-th tile from `first`, k blocks k0 to k0 + steps - 1 of each; of `cast`
// neighbouring ones the one with this number.
struct Work {
    int part, first, stride, tiles, k0, steps, number;
    __device__ explicit Work(const Shape& p) {
        const int cluster = p.split * p.cast;
        number = blockIdx.x & (p.cast - 1), part = (blockIdx.x >> p.log_cast) % p.split;
        first = blockIdx.x / cluster, stride = gridDim.x / cluster;
        tiles = p.m_tiles * p.batch * p.n_tiles;
        k0 = part * p.k_blocks / p.split;
        steps = (part + 1) * p.k_blocks / p.split - k0;
    }
};
struct Tile {
    int m, n = 0, plane = 0;  // first weight row, first row of x, and which of the matrices
    __device__ Tile(int tile, const Shape& p, const Work& work, int bm, int bn) {
        if (p.n_tiles > 1) {
            const int of_band = BAND * p.m_tiles * p.batch, first = tile / of_band * BAND;
            const int breadth = min(BAND, p.n_tiles - first);
            tile %= of_band;
            n = first + tile % breadth, tile /= breadth;
        }
        if (p.batch > 1) plane = tile / p.m_tiles, tile %= p.m_tiles;
        n = (p.token_scales ? n * p.cast + work.number : n) * bn;
        m = (p.token_scales ? tile : tile * p.cast + work.number) * bm;
    }
};

struct Ring {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// The warp that loads weights, of which one thread works.
template <bool FP8, bool TRANSPOSED, int WGS, int BN>
__device__ __forceinline__ void load_weights(
    const CUtensorMap& map, const Shape& p, const Work& work, char* stages, Barriers& barriers
) {
    const uint64_t policy = p.n_tiles == 1 ? READ_ONCE : READ_AGAIN;
    const auto load = [&](int stage, const Tile& tile, int k) {
        expect_bytes(&barriers.full[stage], WGS * GROUP_BYTES);
        char* to = stages + stage * (WGS * GROUP_BYTES);
        const int boxes = FP8 ? WGS * 2 >> p.log_cast : WGS * 2, before = FP8 ? work.number * boxes : 0;  // this thread block's
#pragma unroll
        for (int i = 0; i < WGS * 2; i++) {
            if (i >= boxes) break;
            const int box = before + i;
            const int m = TRANSPOSED ? tile.m + box / 2 * GROUP_ROWS : tile.m + box * BOX_ROWS;
            const int from_k = TRANSPOSED ? k * BK + box % 2 * BOX_ROWS : k * BK;
            const int c0 = TRANSPOSED ? m : from_k, c1 = TRANSPOSED ? from_k : m;
            if (!FP8 || p.cast == 1)
                copy_box(to + box * BOX_BYTES, map, &barriers.full[stage], policy, c0, c1, tile.plane);
            else
                copy_box_to_all(to + box * BOX_BYTES, map, &barriers.full[stage], policy, c0, c1, tile.plane,
                                ((1 << p.cast) - 1) << work.part * p.cast);
        }
    };
    const bool leads = threadIdx.x % 32 == 0;
    const int early = min(p.stages, work.steps);
    const Tile first(work.first, p, work, WGS * GROUP_ROWS, BN);
    if (FP8 && p.cast > 1) cluster_wait();  // the others have begun, and what they have of barriers is there
#pragma unroll 1
    for (int i = 0; leads && i < early; i++) load(i, first, work.k0 + i);
    // The next kernel may ask for its weights when all of this one's are asked for.
    const bool all = early == work.steps && work.first + work.stride >= work.tiles;
    if (all) release_next();
    __syncwarp();
    if (!FP8 && p.cast > 1) cluster_wait();
    __syncthreads();
    if (leads && !all) {
        Ring ring{early % p.stages, early / p.stages};
        for (int t = work.first; t < work.tiles; t += work.stride) {
            const Tile tile(t, p, work, WGS * GROUP_ROWS, BN);
#pragma unroll 1
            for (int i = t == work.first ? early : 0; i < work.steps; i++) {
                wait(&barriers.empty[ring.stage], ring.parity ^ 1);
                load(ring.stage, tile, work.k0 + i);
                ring.advance(p.stages);
            }
        }
        release_next();
    }
    __syncwarp();
}

// The warp that loads rows of x.
template <bool FP8, int WGS, int BN>
__device__ __forceinline__ void load_rows(
    const CUtensorMap& map, const Shape& p, const Work& work, char* stages, Barriers& barriers
) {
    if (threadIdx.x % 32 == 0) prefetch_map(map);
    __syncwarp();
    if (p.cast > 1) cluster_wait();
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        wait_for_previous();
        Ring ring;
        for (int t = work.first; t < work.tiles; t += work.stride) {
            const Tile tile(t, p, work, WGS * GROUP_ROWS, BN);
#pragma unroll 1
            for (int i = 0; i < work.steps; i++) {
                uint64_t* const full = &barriers.rows_full[ring.stage];
                wait(&barriers.rows_empty[ring.stage], ring.parity ^ 1);
                expect_bytes(full, row_stage(BN, FP8));
#pragma unroll
                for (int half = 0; half < (FP8 ? 1 : 2); half++) {  // bytes: 64 values of fp16, or 128 of e4m3
                    char* const to = stages + ring.stage * row_stage(BN, FP8) + half * BN * 128;
                    const int k = (work.k0 + i) * BK * (FP8 ? 1 : 2) + half * 128;
                    if (FP8 || p.cast == 1) {
                        copy_box(to, map, full, READ_AGAIN, k, tile.n, tile.plane);
                    } else {
                        const int first = work.number * (BN >> p.log_cast);
                        copy_box_to_all(to + first * 128, map, full, READ_AGAIN, k, tile.n + first, tile.plane,
                                        ((1 << p.cast) - 1) << work.part * p.cast);
                    }
                }
                ring.advance(p.row_stages);
            }
        }
    }
    __syncwarp();
}

// Where a warp of consumers is in the rings.
struct Place {
    Barriers& barriers;
    const Shape& p;
    const Work& work;
    uint32_t weights, rows;  // addresses: this warpgroup's in the first stage; those of x
    Ring ring, row_ring;
};

// A warp has used a stage of weights, or of rows of x; where thread blocks fetch them for each other, all are told. The compiler may
// move loads behind an arrival elsewhere, so that comes after what was loaded has been used.
__device__ __forceinline__ void release_to_all(uint64_t* barrier, const Place& at) {
    const int lane = threadIdx.x % 32;
    if (lane < at.p.cast) arrive_relaxed_at(barrier, at.work.part * at.p.cast + lane);
}
template <bool FP8>
__device__ __forceinline__ void release_weights(const Place& at, int stage) {
    uint64_t* const barrier = &at.barriers.empty[stage];
    __syncwarp();
    if constexpr (FP8) release_to_all(barrier, at);
    else if (threadIdx.x % 32 == 0) arrive(barrier);
}
template <bool FP8>
__device__ __forceinline__ void release_rows(const Place& at, int stage) {
    uint64_t* const barrier = &at.barriers.rows_empty[stage];
    if constexpr (!FP8) release_to_all(barrier, at);
    else if (threadIdx.x % 32 == 0) arrive(barrier);
}

__device__ __forceinline__ uint4 read16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ uint32_t read4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

// A lane's bytes of 64 values of k, `half` of those of a stage at `weights`. Of [M, K]: word 4 i + s has the values of row i of
// the four in fragment s. TRANSPOSED: word 4 s + j has the rows' values of the fragment's j-th k.
template <bool TRANSPOSED>
__device__ __forceinline__ void read_weights(uint32_t (&words)[16], uint32_t weights, int half) {
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    if constexpr (TRANSPOSED) {
        const int piece = 2 * warp + g / 4;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = 2 * q + (j & 1);  // modulo 8, which the swizzle goes by
            const uint32_t at = weights + row * BK + (piece ^ row) * 16 + g % 4 * 4;
#pragma unroll
            for (int s = 0; s < 4; s++) words[4 * s + j] = read4(at + (half * 64 + s * 16 + (j >> 1) * 8) * BK);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = 32 * warp + 4 * g + i;
            const uint4 v = read16(weights + row * BK + ((half * 4 + q) ^ row % 8) * 16);
            words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
        }
    }
}

// Two neighbouring bytes, the upper or the lower, as fp16. Of int8 all bits but the sign's are as stored.
template <Values VALUES>
__device__ __forceinline__ uint32_t to_fp16(uint32_t word, bool upper) {
    uint32_t pair;
    if constexpr (VALUES == INT8_VALUES) {  // 1024 + 128 + value
        pair = __byte_perm(word, 0x64646464, upper ? 0x4342 : 0x4140);
        asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x64806480));
    } else {
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }"
            : "=r"(pair)
            : "r"(upper ? word >> 16 : word));
    }
    return pair;
}

// The operands of fragments s = 0..3 of 16 values of k, in fp16, of both tiles of 64 rows.
template <Values VALUES, bool TRANSPOSED>
__device__ __forceinline__ void convert(uint32_t (&a)[4][2][4], uint32_t (&words)[16]) {
    if constexpr (VALUES == INT8_VALUES)
#pragma unroll
        for (int i = 0; i < 16; i++) words[i] ^= 0x80808080;
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
        for (int tile = 0; tile < 2; tile++)
            if constexpr (TRANSPOSED) {
#pragma unroll
                for (int later = 0; later < 2; later++) {  // the fragment's k from 8 on
                    const uint32_t pairs =
                        __byte_perm(words[4 * s + 2 * later], words[4 * s + 2 * later + 1], tile ? 0x7362 : 0x5140);
                    a[s][tile][2 * later] = to_fp16<VALUES>(pairs, false);
                    a[s][tile][2 * later + 1] = to_fp16<VALUES>(pairs, true);
                }
            } else {
#pragma unroll
                for (int r = 0; r < 4; r++) a[s][tile][r] = to_fp16<VALUES>(words[4 * (2 * tile + (r & 1)) + s], r >= 2);
            }
}

// The operands of fragments u = 0, 1 of 32 values of k, as e4m3, of one tile of 64 rows.
template <bool TRANSPOSED>
__device__ __forceinline__ void arrange(uint32_t (&a)[2][4], const uint32_t (&w)[16], int tile) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
        uint32_t* const to = a[s / 2] + s % 2 * 2;
        if constexpr (TRANSPOSED) {
            const uint32_t first = __byte_perm(w[4 * s], w[4 * s + 1], tile ? 0x7362 : 0x5140);
            const uint32_t later = __byte_perm(w[4 * s + 2], w[4 * s + 3], tile ? 0x7362 : 0x5140);
            to[0] = __byte_perm(first, later, 0x5410), to[1] = __byte_perm(first, later, 0x7632);
        } else {
            to[0] = w[4 * (2 * tile) + s], to[1] = w[4 * (2 * tile + 1) + s];
        }
    }
}

// One warpgroup's sums of a tile, over this thread block's part of k, x being fp16. 64 values of k are converted while the tensor
// cores work on the 64 before.
template <Values VALUES, bool TRANSPOSED, int WGS, int BN>
__device__ __forceinline__ void accumulate_fp16(float (&sums)[2][BN / 2], Place& at) {
    uint32_t a[2][4][2][4];
    int last = 0;
#pragma unroll 1
    for (int i = 0; i < at.work.steps; i++) {
        const uint32_t weights = at.weights + at.ring.stage * (WGS * GROUP_BYTES);
        const uint64_t b = describe(at.rows + at.row_ring.stage * row_stage(BN, false));
        wait(&at.barriers.full[at.ring.stage], at.ring.parity);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t words[16];
            read_weights<TRANSPOSED>(words, weights, half);
            if (half == 0) wait(&at.barriers.rows_full[at.row_ring.stage], at.row_ring.parity);
            if (half == 1) release_weights<false>(at, at.ring.stage);
            wgmma_wait<1>();
            if (half == 1 && i > 0) release_rows<false>(at, last);
            convert<VALUES, TRANSPOSED>(a[half], words);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++)
#pragma unroll
                for (int tile = 0; tile < 2; tile++)
                    WgmmaHeld<BN>::multiply_fp16(sums[tile], a[half][s][tile], b + (half * BN * 128 + s * 32) / 16, i + half + s > 0);
            wgmma_commit();
        }
        last = at.row_ring.stage;
        at.ring.advance(at.p.stages), at.row_ring.advance(at.p.row_stages);
    }
    wgmma_wait<0>();
    release_rows<false>(at, last);
}

// Nothing that makes or takes these values moves over this place: no instruction, but the compiler is held to the order that
// products started and not yet waited for demand.
__device__ __forceinline__ void pin(uint32_t& v) { asm volatile("" : "+r"(v)::"memory"); }
template <class T, int COUNT>
__device__ __forceinline__ void pin(T (&v)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) pin(v[i]);
}

// Start the product of a stage and one tile of 64 rows.
template <int BN>
__device__ __forceinline__ void start_part(float (&part)[BN / 2], const uint32_t (&a)[2][2][4], uint64_t b) {
#pragma unroll
    for (int u = 0; u < 4; u++) WgmmaHeld<BN>::multiply_e4m3(part, a[u / 2][u % 2], b + u * 2, u > 0);
    wgmma_commit();
}
template <int COUNT>
__device__ __forceinline__ void add(float (&sums)[COUNT], const float (&part)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) sums[i] += part[i];
}

// The same with x in e4m3, and parts of 128 values of k added in fp32. Where registers allow, the next weights are read while the
// tensor cores work, and the part of one tile of 64 rows is added while they work on the other.
template <bool TRANSPOSED, int WGS, int BN>
__device__ __forceinline__ void accumulate_parts(float (&sums)[2][BN / 2], Place& at) {
    constexpr bool TWO_PARTS = BN <= 80, AHEAD = TRANSPOSED && BN <= 96;  // what ptxas takes without waiting for each product
    uint32_t words[2][16], a[2][2][2][4];
    const auto read = [&](bool there) {  // else what was read means nothing
        if (there) wait(&at.barriers.full[at.ring.stage], at.ring.parity);
#pragma unroll
        for (int half = 0; half < 2; half++)
            read_weights<TRANSPOSED>(words[half], at.weights + at.ring.stage * (WGS * GROUP_BYTES), half);
    };
#pragma unroll
    for (int i = 0; i < BN; i++) sums[i / (BN / 2)][i % (BN / 2)] = 0;
    if (AHEAD) read(true);
#pragma unroll 1
    for (int i = 0; i < at.work.steps; i++) {
        if (!AHEAD) read(true);
        const int stage = at.row_ring.stage;
        const uint64_t b = describe(at.rows + stage * row_stage(BN, true));
        wait(&at.barriers.rows_full[stage], at.row_ring.parity);
        float parts[TWO_PARTS ? 2 : 1][BN / 2];
        pin(words);
#pragma unroll
        for (int j = 0; j < 4; j++) arrange<TRANSPOSED>(a[j / 2][j % 2], words[j % 2], j / 2);
        pin(a);
        wgmma_fence();
        start_part<BN>(parts[0], a[0], b);
        if (!TWO_PARTS) {
            wgmma_wait<0>();
            add(sums[0], parts[0]);
            wgmma_fence();
        }
        start_part<BN>(parts[TWO_PARTS], a[1], b);
        release_weights<true>(at, at.ring.stage);
        at.ring.advance(at.p.stages);
        if (AHEAD) read(i + 1 < at.work.steps);
        if (TWO_PARTS) {
            wgmma_wait<1>();
            add(sums[0], parts[0]);
        }
        wgmma_wait<0>();
        release_rows<true>(at, stage);
        add(sums[1], parts[TWO_PARTS]);
        at.row_ring.advance(at.p.row_stages);
    }
}

// The same with x in e4m3, and sums left to the tensor cores.
template <bool TRANSPOSED, int WGS, int BN>
__device__ __forceinline__ void accumulate_whole(float (&sums)[2][BN / 2], Place& at) {
    uint32_t a[2][2][2][4];
    int last = 0;
#pragma unroll 1
    for (int i = 0; i < at.work.steps; i++) {
        const uint32_t weights = at.weights + at.ring.stage * (WGS * GROUP_BYTES);
        const uint64_t b = describe(at.rows + at.row_ring.stage * row_stage(BN, true));
        wait(&at.barriers.full[at.ring.stage], at.ring.parity);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t words[16];
            if (!TRANSPOSED) wgmma_wait<1>();  // what is read are operands: not while those of two halves ago are in use
            read_weights<TRANSPOSED>(words, weights, half);
            if (half == 0) wait(&at.barriers.rows_full[at.row_ring.stage], at.row_ring.parity);
            if (TRANSPOSED) wgmma_wait<1>();
            if (half == 1 && i > 0) release_rows<true>(at, last);
            pin(words);
            arrange<TRANSPOSED>(a[half][0], words, 0), arrange<TRANSPOSED>(a[half][1], words, 1);
            pin(a[half]);
            wgmma_fence();
#pragma unroll
            for (int u = 0; u < 2; u++)
#pragma unroll
                for (int tile = 0; tile < 2; tile++)
                    WgmmaHeld<BN>::multiply_e4m3(sums[tile], a[half][tile][u], b + half * 4 + u * 2, i + half + u > 0);
            wgmma_commit();
        }
        release_weights<true>(at, at.ring.stage);
        last = at.row_ring.stage;
        at.ring.advance(at.p.stages), at.row_ring.advance(at.p.row_stages);
    }
    wgmma_wait<0>();
    release_rows<true>(at, last);
}

// The four weight rows that a thread writes the results of, and their scales, asked for before they are needed: those of its sums,
// or with a split others.
template <int WGS>
struct Rows {
    int m;
    float scale[4];
    __device__ Rows(const Shape& p, const Tile& tile) {
        const int own = threadIdx.x / 32 * 32 + threadIdx.x % 32 / 4 * 4;  // a warp has 32 weight rows
        m = tile.m + (p.split == 1 ? own : threadIdx.x % (WGS * GROUP_ROWS / 4) * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) scale[i] = m + i < p.M ? p.scales[size_t(tile.plane) * p.M + m + i] : 0.f;
    }
    // Write the results of four sums of a row of x; returns them or'ed, as fp16, in the order (0, 1), (2, 3).
    __device__ __forceinline__ uint2 write(const Shape& p, const Tile& tile, int row, float a, float b, float c, float d) const {
        const float of_x = p.token_scales ? p.token_scales[size_t(tile.plane) * p.N + row] : 1.f;
        const uint2 v = make_uint2(
            finish(a * (scale[0] * of_x), b * (scale[1] * of_x), p.activation),
            finish(c * (scale[2] * of_x), d * (scale[3] * of_x), p.activation)
        );
        *reinterpret_cast<uint2*>(p.out + (size_t(tile.plane) * p.N + row) * p.width + m) = v;
        return v;
    }
};

// Write one warpgroup's sums as fp16.
template <int WGS, int BN>
__device__ __forceinline__ void store(const float (&sums)[2][BN / 2], const Shape& p, const Tile& tile, const Rows<WGS>& rows) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 32;
    uint2 any{};
    if (rows.m < p.width)
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int row = tile.n + j * 8 + lane % 4 * 2 + odd, at = j * 4 + odd;
                if (row >= p.N) continue;
                const uint2 v = rows.write(p, tile, row, sums[0][at], sums[0][at + 2], sums[1][at], sums[1][at + 2]);
                any.x |= v.x, any.y |= v.y;
            }
    if (p.active_mask) {
        const auto bit = [](uint32_t half, int at) { return uint32_t((half & 0x7fff) != 0) << at; };
        const uint32_t own = bit(any.x, 0) | bit(any.x >> 16, 1) | bit(any.y, 2) | bit(any.y >> 16, 3);
        const uint32_t active_mask = __reduce_or_sync(0xffffffff, own << lane / 4 * 4);
        if (lane == 0 && tile.m + first < p.M) p.active_mask[(tile.m + first) / 32] = active_mask;
    }
}

// Add the sums of the blocks that split k, in its order, and write them: each block an equal part of the rows of x. This block's
// sums go where the stages were. Threads that hold no sums take part in the cluster's meeting.
template <int WGS, int BN>
__device__ __forceinline__ void store_shared(
    const float (&sums)[2][BN / 2], const Shape& p, const Tile& tile, const Rows<WGS>& rows, char* stages, const Work& work
) {
    constexpr int PITCH = float_pitch(WGS), WIDTH = WGS * GROUP_ROWS / 4;
    const int thread = threadIdx.x, lane = thread % 32;
    float* const own = reinterpret_cast<float*>(stages);
    sync_threads(1, WGS * 128);  // all of the stages are used up
    float* to = own + lane % 4 * 2 * PITCH + thread / 32 * 32 + lane / 4 * 4;
#pragma unroll
    for (int j = 0; j < BN / 8; j++, to += 8 * PITCH)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int at = j * 4 + odd;
            *reinterpret_cast<float4*>(to + odd * PITCH) =
                make_float4(sums[0][at], sums[0][at + 2], sums[1][at], sums[1][at + 2]);
        }
    cluster_arrive_release();
    cluster_wait();
    const int tokens = (BN + p.split - 1) / p.split;
#pragma unroll 1
    for (int n = thread / WIDTH; n < tokens; n += WGS * 128 / WIDTH) {
        const int of_tile = work.part * tokens + n, row = tile.n + of_tile;
        if (of_tile >= BN || row >= p.N || rows.m >= p.width) break;
        float4 sum{};
#pragma unroll
        for (int part = 0; part < MAX_CLUSTER; part++) {
            if (part >= p.split) break;
            const float* const from = remote(own, part * p.cast + work.number) + of_tile * PITCH + thread % WIDTH * 4;
            const float4 v = *reinterpret_cast<const float4*>(from);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        rows.write(p, tile, row, sum.x, sum.y, sum.z, sum.w);
    }
}

// All tiles of one thread block.
template <Values VALUES, bool FP8, bool TRANSPOSED, int WGS, int BN>
__device__ __forceinline__ void multiply_tiles(const CUtensorMap& w_map, const CUtensorMap& x_map, const Shape& p, char* memory) {
    constexpr int CONSUMERS = WGS * 128;
    const Work work(p);
    Barriers& barriers = *reinterpret_cast<Barriers*>(memory + p.shared);
    char* const stages = memory;
    char* const rows = stages + p.stages * (WGS * GROUP_BYTES);
    const int loader = int(threadIdx.x) / 32 - CONSUMERS / 32;  // number of the warp among the others
    if (loader == 0) {
        const int lane = threadIdx.x % 32;
        if (lane < p.stages) init_barrier(&barriers.full[lane], 1), init_barrier(&barriers.empty[lane], CONSUMERS / 32 * (FP8 ? p.cast : 1));
        if (lane < p.row_stages) init_barrier(&barriers.rows_full[lane], 1), init_barrier(&barriers.rows_empty[lane], CONSUMERS / 32 * (FP8 ? 1 : p.cast));
        publish_barriers();
        __syncwarp();
    }
    if (p.cast > 1) cluster_arrive_release();
    if (threadIdx.x < CONSUMERS) {
        if (wide(BN, FP8)) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        if (p.cast > 1) cluster_wait();
        __syncthreads();
        if (FP8) wait_for_previous();  // the scales of the rows of x
        Place at{barriers, p, work, shared_address(stages) + threadIdx.x / 128 * GROUP_BYTES, shared_address(rows), {}, {}};
        for (int t = work.first; t < work.tiles; t += work.stride) {
            float sums[2][BN / 2];
            const Tile tile(t, p, work, WGS * GROUP_ROWS, BN);
            const auto write = [&](const Rows<WGS>& of_tile) {
                if (p.split == 1)
                    store<WGS, BN>(sums, p, tile, of_tile);
                else
                    store_shared<WGS, BN>(sums, p, tile, of_tile, stages, work);
            };
            if constexpr (FP8) {  // no registers are left for the scales
                prefetch(p.scales + size_t(tile.plane) * p.M + min(tile.m + int(threadIdx.x), p.M - 1));
                if constexpr (BN > 96)
                    accumulate_whole<TRANSPOSED, WGS, BN>(sums, at);
                else
                    accumulate_parts<TRANSPOSED, WGS, BN>(sums, at);
                write(Rows<WGS>(p, tile));
            } else {
                const Rows<WGS> of_tile(p, tile);
                accumulate_fp16<VALUES, TRANSPOSED, WGS, BN>(sums, at);
                write(of_tile);
            }
        }
    } else {
        if (wide(BN, FP8)) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (loader == 0) {
            load_weights<FP8, TRANSPOSED, WGS, BN>(w_map, p, work, stages, barriers);
        } else if (loader == 1) {
            load_rows<FP8, WGS, BN>(x_map, p, work, rows, barriers);
        } else {
            if (p.cast > 1) cluster_wait();
            __syncthreads();
        }
        if (p.split > 1) {  // as in store_shared
            cluster_arrive_release();
            cluster_wait();
        }
    }
    if (p.split * p.cast > 1) {  // this block's memory is read, and its barriers are arrived at, until all have come here
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
    }
}

#endif

template <Values VALUES, bool FP8, bool TRANSPOSED, int WGS, int BN>
__global__ void __launch_bounds__(threads(WGS, BN, FP8), WGS == 1 ? 2 : 1)
    quant_gemm(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ Shape p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char memory[];
    multiply_tiles<VALUES, FP8, TRANSPOSED, WGS, BN>(w_map, x_map, p, memory);
#endif
}

using Kernel = void (*)(CUtensorMap, CUtensorMap, Shape);
struct Variant {
    bool transposed;
    int wgs, bn, row_stage, threads, most_cast;
    Kernel kernel;
};
template <Values VALUES, bool FP8, bool TRANSPOSED, int WGS, int BN>
constexpr Variant variant() {
    static_assert(WGS == 2 || !wide(BN, FP8));  // else more registers than a thread has
    return {TRANSPOSED, WGS, BN, row_stage(BN, FP8), threads(WGS, BN, FP8), FP8 ? 2 * WGS : BN / 8, quant_gemm<VALUES, FP8, TRANSPOSED, WGS, BN>};
}

// Those for rows of fp16.
template <Values VALUES>
const Variant FOR_HALF_ROWS[] = {
    variant<VALUES, false, false, 1, 16>(), variant<VALUES, false, false, 1, 32>(),  variant<VALUES, false, false, 1, 64>(),
    variant<VALUES, false, false, 2, 16>(), variant<VALUES, false, false, 2, 32>(),  variant<VALUES, false, false, 2, 64>(),
    variant<VALUES, false, false, 2, 128>(), variant<VALUES, false, true, 1, 16>(), variant<VALUES, false, true, 1, 32>(),
    variant<VALUES, false, true, 1, 64>(),  variant<VALUES, false, true, 2, 16>(),  variant<VALUES, false, true, 2, 32>(),
    variant<VALUES, false, true, 2, 64>(),  variant<VALUES, false, true, 2, 128>(),
};

// How a product is cut up: tiles bm x bn; see the top of the file; how many clusters at most; whether to start early.
struct Cut {
    int bm, bn, split, stages, clusters, cast, overlap;
};

template <int COUNT>
cudaError_t launch(
    const Variant (&variants)[COUNT], const void* w_map, const void* x_map, Shape p, int K, bool transposed, const Cut& cut, void* stream
) {
    p.split = cut.split, p.cast = cut.cast, p.log_cast = p.cast >= MAX_CLUSTER ? 3 : p.cast / 2;  // of 1, 2, 4, 8
    p.stages = cut.stages, p.row_stages = row_stages(p.stages), p.k_blocks = (K + BK - 1) / BK;
    if (p.N < 1 || p.M < 1 || K % 64 || p.split < 1 || p.k_blocks < p.split) return cudaErrorInvalidValue;
    if (p.cast != 1 << p.log_cast || p.split * p.cast > MAX_CLUSTER) return cudaErrorInvalidValue;
    if (p.width < p.M || p.width % 8 || cut.clusters < 1 || p.stages < 2 || p.stages > MAX_STAGES) return cudaErrorInvalidValue;
    for (const Variant& v : variants) {
        if (v.transposed != transposed || v.wgs * GROUP_ROWS != cut.bm || v.bn != cut.bn || cut.cast > v.most_cast) continue;
        const int high = cut.bm * (p.token_scales ? 1 : p.cast), wide = v.bn * (p.token_scales ? p.cast : 1);
        p.m_tiles = (p.width + high - 1) / high, p.n_tiles = (p.N + wide - 1) / wide;
        if (p.active_mask && (p.split > 1 || p.n_tiles > 1 || p.batch > 1 || v.bn < p.N)) return cudaErrorInvalidValue;
        const int tiles = p.m_tiles * p.batch * p.n_tiles, clusters = p.split > 1 ? tiles : std::min(cut.clusters, tiles);
        const int stages = p.stages * v.wgs * GROUP_BYTES + p.row_stages * v.row_stage;
        p.shared = std::max(stages, p.split > 1 ? v.bn * float_pitch(v.wgs) * 4 : 0);
        const int cluster = p.split * p.cast;
        const Launch how = {dim3(clusters * cluster), dim3(v.threads), cudaStream_t(stream), cut.overlap, cluster,
                            p.shared + int(sizeof(Barriers))};
        const auto map = [](const void* at) { return *static_cast<const CUtensorMap*>(at); };
        return start(v.kernel, how, map(w_map), map(x_map), p);
    }
    return cudaErrorInvalidValue;
}

// What the exported functions do with their arguments.
template <int COUNT>
cudaError_t multiply(
    const Variant (&variants)[COUNT], const void* w_map, const void* x_map, const void* scales, const void* token_scales, void* out,
    void* active_mask, int N, int M, int width, int K, int batch, bool transposed, bool relu_square, const Cut& cut, void* stream
) {
    Shape p{static_cast<__half*>(out), static_cast<const float*>(scales), static_cast<const float*>(token_scales),
            static_cast<uint32_t*>(active_mask), N, M, width};
    p.batch = batch, p.activation = relu_square ? RELU_SQUARE : NONE;
    return launch(variants, w_map, x_map, p, K, transposed, cut, stream);
}

// 0 where these kernels run on the current device, cudaErrorNotSupported elsewhere.
template <int COUNT>
cudaError_t set_up(const Variant (&variants)[COUNT]) {
    int device, major, bytes;
    cudaError_t error = cudaGetDevice(&device);
    if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (!error) error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (!error && !(FOR_HOPPER && major == 9)) return cudaErrorNotSupported;
    for (const Variant& v : variants)
        if (!error) error = cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes - 1024);
    return error;
}

}  // namespace
}  // namespace rwkv
