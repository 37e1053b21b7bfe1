// Products of up to 16 tokens with quantised weights, which are read as they are stored: see quant.cuh.
//
// out[n, j] = activation(scale[j] sum_k x[n, k] q[j, k]), or with a scale for every 64 of k; x in fp16, sums in fp32. Their order
// depends on the shapes alone, so a token's result depends neither on the other tokens, nor on its place or their number.
//
//   stream_codes  K up to 4096 (Hopper): the copy engine keeps the memory busy at all times; some products may be of fp16,
//                 or other blocks of the launch may have the LoRA pairs (lora.cuh)
//   few_codes     all other cases
//
// Tensor cores take 16 rows of weights on their tall side, and 8 tokens. Eight warps share the K of such a tile: a warp has every
// eighth block of 64. Programmatic dependent launch: weights are fetched before griddepcontrol.wait, all else after it.

// parts: 7
#include "../parts.cuh"
#include "hopper.cuh"
#include "lora.cuh"
#include "quant.cuh"

namespace rwkv {
namespace {

constexpr int WARPS = 8;  // that multiply
constexpr int ROWS = 16;  // of weights, to a tile
constexpr int MAX_FEW = 16;  // tokens
constexpr int MOST_BLOCKS = 8;  // of 64 values of k, to a warp of stream_codes

// x at the 32 values of k of two fragments, of 8 * HALVES tokens.
template <int HALVES>
using Inputs = uint4[HALVES];

// sum [16 rows, 8 tokens of each half] += two fragments of rows g and g + 8, by x.
template <int HALVES>
__device__ __forceinline__ void multiply(float (&sum)[HALVES][4], const uint4& low, const uint4& high, const Inputs<HALVES>& x) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        mma(sum[h], low.x, high.x, low.y, high.y, x[h].x, x[h].y);
        mma(sum[h], low.z, high.z, low.w, high.w, x[h].z, x[h].w);
    }
}

// The same of a block of codes. Formats of groups: with the scales of both rows.
template <int FORMAT, int HALVES>
__device__ __forceinline__ void multiply_block(
    float (&sum)[2][HALVES][4], const Codes<FORMAT>& low, const Codes<FORMAT>& high, const Inputs<HALVES> (&x)[2], float low_scale,
    float high_scale
) {
    if constexpr (grouped(FORMAT)) {
        float part[HALVES][4] = {};
#pragma unroll
        for (int w = 0; w < 2; w++) multiply<HALVES>(part, low.decode(w), high.decode(w), x[w]);
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            sum[0][h][0] = fmaf(part[h][0], low_scale, sum[0][h][0]), sum[0][h][1] = fmaf(part[h][1], low_scale, sum[0][h][1]);
            sum[0][h][2] = fmaf(part[h][2], high_scale, sum[0][h][2]), sum[0][h][3] = fmaf(part[h][3], high_scale, sum[0][h][3]);
        }
    } else {
#pragma unroll
        for (int w = 0; w < 2; w++) multiply<HALVES>(sum[w], low.decode(w), high.decode(w), x[w]);
    }
}

// A tile's sums of all warps.
template <int HALVES>
using Parts = float4[WARPS][HALVES][LANES];

template <int HALVES>
__device__ __forceinline__ void leave_sums(Parts<HALVES>& parts, const float (&sum)[2][HALVES][4], int warp, int lane) {
#pragma unroll
    for (int h = 0; h < HALVES; h++)
        parts[warp][h][lane] = make_float4(sum[0][h][0] + sum[1][h][0], sum[0][h][1] + sum[1][h][1], sum[0][h][2] + sum[1][h][2],
                                           sum[0][h][3] + sum[1][h][3]);
}

// Which row of weights is row g of the fragments: so lanes that load together meet no bank twice, see `Stage`.
__device__ __forceinline__ int row_of(int group) { return (group & 1) << 2 | (group & 2) | group >> 2; }

// A warp adds them up for half `h` of the tokens, and stores the results. The scales: of the lane's two rows. Returns a bit for
// each row that is not zero in all of these tokens.
template <int HALVES>
__device__ __forceinline__ uint32_t finish(
    const Parts<HALVES>& parts, int h, const Product& p, int first_row, int num_tokens, float low_scale, float high_scale, int lane
) {
    const int group = lane / 4, quarter = lane % 4;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float4 part = parts[w][h][lane];
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    total.x *= low_scale, total.y *= low_scale, total.z *= high_scale, total.w *= high_scale;
    // Two lanes with neighbouring rows of two tokens deal them out: each gets both rows of one.
    const bool odd = row_of(group) & 1;
    const float low = __shfl_xor_sync(ALL, odd ? total.x : total.y, 16), high = __shfl_xor_sync(ALL, odd ? total.z : total.w, 16);
    const int token = 8 * h + 2 * quarter + odd, row = first_row + row_of(group) - odd;
    const bool there = token < num_tokens;
    float v[2] = {odd ? low : total.x, odd ? total.y : low}, u[2] = {odd ? high : total.z, odd ? total.w : high};
    if (there) {
        store<2>(p, token, row, v);
        store<2>(p, token, row + 8, u);
    }
    uint32_t on = 0;
    if (p.activation == RELU_SQUARE) {
        // Of pairs of rows 0 to 3, two groups of four lanes each have some tokens.
        const uint32_t even = __ballot_sync(ALL, there && v[0] != 0.f), next = __ballot_sync(ALL, there && v[1] != 0.f);
        const uint32_t far = __ballot_sync(ALL, there && u[0] != 0.f), last = __ballot_sync(ALL, there && u[1] != 0.f);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            const uint32_t lanes = 0x000f000fu << 4 * (pair / 2 | (pair & 1) << 1);
            on |= ((even & lanes) != 0) << 2 * pair | ((next & lanes) != 0) << (2 * pair + 1);
            on |= ((far & lanes) != 0) << (2 * pair + 8) | ((last & lanes) != 0) << (2 * pair + 9);
        }
    }
    return on;
}

// The warps in turn finish a tile, number `count` of a block. With a mask, one warp sees to all tokens.
template <int HALVES>
__device__ __forceinline__ void finish_in_turn(
    const Parts<HALVES>& parts, int count, const Product& p, int first_row, int num_tokens, float unit, float low_scale,
    float high_scale, uint16_t* active_mask, int warp, int lane
) {
    if (active_mask) {
        if (warp != count % WARPS) return;
        uint32_t on = 0;
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            on |= finish<HALVES>(parts, h, p, first_row, num_tokens, unit * low_scale, unit * high_scale, lane);
        if (lane == 0) active_mask[first_row / ROWS] = uint16_t(on);
    } else {
        const int half = (warp - count * HALVES) & (WARPS - 1);
        if (half < HALVES) finish<HALVES>(parts, half, p, first_row, num_tokens, unit * low_scale, unit * high_scale, lane);
    }
}

// Of a row, but for the unit. Nothing is done with it yet: it comes while the tile is worked on.
template <int FORMAT>
__device__ __forceinline__ float scale_of(const Product& p, int row) {
    return grouped(FORMAT) ? 1.f : static_cast<const float*>(p.scales)[min(row, p.rows - 1)];
}

// A stage of the ring: of each of a tile's rows so many values of k, plane by plane, and all of its groups' scales. A plane is
// chunks of [ROWS, 128 bytes], piece i of 16 bytes of row r at i ^ r % 8, as the copy engine leaves them. With rows in the order of `row_of`
// a load meets no bank twice, whether lanes that are served together have two rows or four.
constexpr int CHUNK = 128, CHUNK_BYTES = ROWS * CHUNK;
static_assert(MOST_BLOCKS * WARPS * 2 <= CHUNK);  // scales of a row
template <int FORMAT>
struct Stage {
    static constexpr int LOWER = upper_bytes(FORMAT, BLOCK) ? 1024 : 2048;  // bytes of a row in the first plane
    static constexpr int PIECE = wide_codes(FORMAT) ? LOWER : 2 * LOWER, BLOCKS = PIECE / BLOCK / WARPS;  // values; blocks to a warp
    static constexpr int PLAIN_PIECE = LOWER / 2, PLAIN_BLOCKS = PLAIN_PIECE / BLOCK / WARPS;             // of fp16
    static constexpr int BESIDE = ROWS * LOWER;
    static constexpr int BESIDE_BYTES = ROWS * (grouped(FORMAT) ? CHUNK : upper_bytes(FORMAT, PIECE));
    static constexpr int BYTES = BESIDE + BESIDE_BYTES;
    static_assert(BYTES % 1024 == 0);  // where the pattern repeats
};
// How the copy engine reads a launch's weights: codes (the first plane), what is beside them (the second, or scales), and fp16.
struct Maps {
    CUtensorMap codes, beside, plain;
};

// One block or two a multiprocessor, every one with its share of the bytes of all tiles. Weights come in a ring of stages; the warps
// keep their part of x in registers, and add up their sums at a tile's end.
//
// All products have the same K. Quantised ones come first, with `coded` tiles; a tile of fp16 counts as `weight` of them.
struct Shares {
    Products products;
    int coded, weight;
    uint16_t* active_mask;  // or null
    // The first tile of one of so many blocks.
    __device__ __forceinline__ int first(int block, int blocks) const {
        const int total = coded + (products.tiles - coded) * weight;
        const int begin = (int64_t(block) * total + blocks - 1) / blocks;
        return begin <= coded ? begin : coded + (begin - coded + weight - 1) / weight;
    }
};
template <int FORMAT, int HALVES>
constexpr int stream_bytes(int stages) { return 1024 + stages * Stage<FORMAT>::BYTES + 2 * int(sizeof(Parts<HALVES>)); }

constexpr int AHEAD_BYTES = 160 << 10;  // that a thread block asks for beyond its ring; of all blocks, half of the L2 cache

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int FORMAT, int HALVES, int STAGES>
__device__ __forceinline__ void stream(const Shares& shares, const Maps& maps, int part, int all_parts, uint8_t* unaligned) {
    using S = Stage<FORMAT>;
    uint8_t* const ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    __shared__ uint64_t full[STAGES], empty[STAGES];
    Parts<HALVES>* const parts = reinterpret_cast<Parts<HALVES>*>(ring + STAGES * S::BYTES);  // of this tile and the one before
    const Products& all = shares.products;
    const int coded = shares.coded;
    release_next();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, group = lane / 4, quarter = lane % 4;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) init_barrier(full + s, 1), init_barrier(empty + s, WARPS);
        publish_barriers();
    }
    __syncthreads();
    const int first = shares.first(part, all_parts), last = shares.first(part + 1, all_parts);
    const int width = all.item[0].width;  // of all
    int stage = 0, parity = 0, step = 0;
    // What is asked for next: a piece of a tile. All threads keep count; `mine` says who asks.
    int ahead = first, ahead_piece = 0;
    auto row_of_tile = [&](int tile) {
        // The matrices of codes lie behind one another, and so do those of fp16, whose heights are whole tiles.
        const int i = all.of(tile);
        return tile >= coded ? (tile - coded) * ROWS : i * all.item[i].rows + (tile - all.first_tile[i]) * ROWS;
    };
    auto advance = [&](int& tile, int& piece) {
        if (++piece * (tile >= coded ? S::PLAIN_PIECE : S::PIECE) >= width) tile++, piece = 0;
    };
    auto fetch = [&](int to_stage, bool mine) {
        if (ahead >= last) return;
        const bool plain = ahead >= coded;
        if (mine) {
            const int row = row_of_tile(ahead);
            uint8_t* const to = ring + to_stage * S::BYTES;
            expect_bytes(full + to_stage, plain ? ROWS * S::LOWER : S::BYTES);
            copy_box(to, plain ? maps.plain : maps.codes, full + to_stage, READ_ONCE, 0, row, ahead_piece * (S::LOWER / CHUNK));
            if (S::BESIDE_BYTES && !plain)
                copy_box(to + S::BESIDE, maps.beside, full + to_stage, READ_ONCE, 0, row,
                         grouped(FORMAT) ? 0 : ahead_piece * (S::BESIDE_BYTES / CHUNK_BYTES));
        }
        advance(ahead, ahead_piece);
    };
    for (int s = 0; s < STAGES; s++) fetch(s, threadIdx.x == 0);
    // What follows comes as far as the L2 cache while x is waited for: the memory has nothing else to do.
    if (threadIdx.x == 0)
        for (int tile = ahead, piece = ahead_piece, bytes = 0; tile < last && bytes < AHEAD_BYTES; bytes += ROWS * S::LOWER) {
            prefetch_box(tile >= coded ? maps.plain : maps.codes, 0, row_of_tile(tile), piece * (S::LOWER / CHUNK));
            advance(tile, piece);
        }
    // A stage has been used by this warp. The one before, which by now all have used, is filled again, by the warps in turn.
    auto release = [&] {
        __syncwarp();
        if (lane == 0) arrive(empty + stage);
        if (step > 0) {
            const int before = stage == 0 ? STAGES - 1 : stage - 1;
            const bool mine = lane == 0 && step % WARPS == warp;
            if (mine && ahead < last) wait(empty + before, stage == 0 ? parity ^ 1 : parity);
            fetch(before, mine);
        }
        step++;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    };

    const int own = row_of(group);
    const uint8_t* const own_rows = ring + own * CHUNK;  // of the first chunk
    auto codes_of = [&](const uint8_t* at, int block) {  // of a stage, whose first row this is, or eight rows on
        Codes<FORMAT> codes;
        if constexpr (wide_codes(FORMAT)) {
            const uint4 v = *reinterpret_cast<const uint4*>(at + block / 2 * CHUNK_BYTES + ((block % 2 * 4 + quarter) ^ own) * 16);
            codes.lower[0] = v.x, codes.lower[1] = v.y, codes.lower[2] = v.z, codes.lower[3] = v.w;
        } else {
            const uint2 v = *reinterpret_cast<const uint2*>(at + block / 4 * CHUNK_BYTES +
                                                            ((block % 4 * 2 + quarter / 2) ^ own) * 16 + quarter % 2 * 8);
            codes.lower[0] = v.x, codes.lower[1] = v.y;
        }
        const uint8_t* const beside = at + S::BESIDE;
        if constexpr (FORMAT == FP6)
            codes.upper = *reinterpret_cast<const uint32_t*>(beside + block / 8 * CHUNK_BYTES + (block % 8 ^ own) * 16 + quarter * 4);
        if constexpr (FORMAT == FP5)
            codes.upper = spread_signs(*reinterpret_cast<const uint16_t*>(beside + block / 16 * CHUNK_BYTES +
                                                                          (block % 16 / 2 ^ own) * 16 + block % 2 * 8 + quarter * 2));
        return codes;
    };
    auto group_scale = [&](const uint8_t* at, int block) {  // of a row of the stage, as above; the block of all K
        return __half2float(*reinterpret_cast<const __half*>(at + S::BESIDE + (block / 8 ^ own) * 16 + block % 8 * 2));
    };
    wait_for_previous();
    Inputs<HALVES> x[MOST_BLOCKS][2] = {};  // of block 8 n + warp
    int loaded = -1, flip = 0;
    for (int tile = first; tile < last; tile++) {
        const int i = all.of(tile);
        const Product& p = all.item[i];
        const int first_row = (tile - all.first_tile[i]) * ROWS;
        const bool plain = tile >= coded;
        const float low_scale = plain ? 1.f : scale_of<FORMAT>(p, first_row + own);
        const float high_scale = plain ? 1.f : scale_of<FORMAT>(p, first_row + own + 8);
        if (i != loaded) {
            loaded = i;
#pragma unroll
            for (int n = 0; n < MOST_BLOCKS; n++) {
                if ((n * WARPS + warp) * BLOCK >= width) break;
#pragma unroll
                for (int w = 0; w < 2; w++)
#pragma unroll
                    for (int h = 0; h < HALVES; h++)
                        if (group + 8 * h < all.num_tokens)
                            x[n][w][h] = *reinterpret_cast<const uint4*>(p.x + int64_t(group + 8 * h) * p.x_stride +
                                                                         (n * WARPS + warp) * BLOCK + w * 32 + 8 * quarter);
            }
            if (!plain)
#pragma unroll
                for (int n = 0; n < MOST_BLOCKS; n++)
#pragma unroll
                    for (int w = 0; w < 2; w++)
#pragma unroll
                        for (int h = 0; h < HALVES; h++) x[n][w][h] = exchange(x[n][w][h], quarter);
        }
        float sum[2][HALVES][4] = {};
        if (plain) {
#pragma unroll
            for (int n = 0; n < MOST_BLOCKS; n += S::PLAIN_BLOCKS) {
                if (n * WARPS * BLOCK >= width) break;
                wait(full + stage, parity);
                const uint8_t* const at = own_rows + stage * S::BYTES + warp * CHUNK_BYTES;
#pragma unroll
                for (int s = 0; s < S::PLAIN_BLOCKS; s++)
#pragma unroll
                    for (int w = 0; w < 2; w++) {
                        const uint8_t* const piece = at + s * WARPS * CHUNK_BYTES + ((w * 4 + quarter) ^ own) * 16;
                        multiply<HALVES>(sum[w], *reinterpret_cast<const uint4*>(piece),
                                         *reinterpret_cast<const uint4*>(piece + 8 * CHUNK), x[n + s][w]);
                    }
                release();
            }
        } else {
#pragma unroll
            for (int n = 0; n < MOST_BLOCKS; n += S::BLOCKS) {
                if (n * WARPS * BLOCK >= width) break;
                wait(full + stage, parity);
                const uint8_t* const at = own_rows + stage * S::BYTES;
#pragma unroll
                for (int s = 0; s < S::BLOCKS; s++) {
                    if (s > 0 && s % 4 == 0 && (n + s) * WARPS * BLOCK >= width) break;
                    const int block = s * WARPS + warp;  // beyond K, zeros meet zeros
                    float low = 1.f, high = 1.f;
                    if constexpr (grouped(FORMAT)) {
                        low = group_scale(at, n * WARPS + block), high = group_scale(at + 8 * CHUNK, n * WARPS + block);
                    }
                    multiply_block<FORMAT, HALVES>(sum, codes_of(at, block), codes_of(at + 8 * CHUNK, block), x[n + s], low, high);
                }
                release();
            }
        }
        leave_sums<HALVES>(parts[flip], sum, warp, lane);
        sync_threads(1, WARPS * LANES);
        finish_in_turn<HALVES>(parts[flip], tile - first, p, first_row, all.num_tokens, plain ? 1.f : unit<FORMAT>(), low_scale,
                               high_scale, shares.active_mask, warp, lane);
        flip ^= 1;
    }
}
#endif

template <int FORMAT, int HALVES, int STAGES>
__global__ __launch_bounds__(WARPS * LANES, HALVES == 1 ? 2 : 1)  //
    void stream_codes(const __grid_constant__ Shares shares, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) uint8_t memory[];
    stream<FORMAT, HALVES, STAGES>(shares, maps, blockIdx.x, gridDim.x, memory);
#endif
}

// The same and, in the first blocks, the LoRA pairs. All blocks run at once: one to a multiprocessor, and no more than those.
template <int FORMAT, int HALVES, int STAGES>
__global__ __launch_bounds__(WARPS * LANES, 1)  //
    void stream_beside_pairs(
        const __grid_constant__ Shares shares, const __grid_constant__ Maps maps, const __grid_constant__ Pairs pairs
    ) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) uint8_t memory[];
    if (int(blockIdx.x) < pairs.blocks) lora_pairs<HALVES>(pairs, blockIdx.x, memory);
    else stream<FORMAT, HALVES, STAGES>(shares, maps, blockIdx.x - pairs.blocks, gridDim.x - pairs.blocks, memory);
#endif
}

// Blocks of 8 warps, each tile by tile. The loads run DEPTH of a warp's blocks ahead of their use, across the borders of tiles.
template <int FORMAT, int HALVES>
__global__ __launch_bounds__(WARPS * LANES, 2) void few_codes(const __grid_constant__ Products all, uint16_t* active_mask) {
    constexpr int DEPTH = wide_codes(FORMAT) ? 4 : 8;
    struct Rows {  // what this lane has of a block of rows g and g + 8
        Codes<FORMAT> codes[2];
        __half scale[2];
    };
    __shared__ Parts<HALVES> parts[2];
    release_next();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, group = lane / 4, quarter = lane % 4;

    int ahead = blockIdx.x, ahead_block = warp, ahead_blocks = 0;
    const uint8_t* ahead_row[2] = {};
    const __half* ahead_scale[2] = {};
    auto aim = [&] {
        if (ahead >= all.tiles) return;
        const int i = all.of(ahead);
        const Product& p = all.item[i];
        ahead_blocks = p.width / BLOCK, ahead_block = warp;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t row = min((ahead - all.first_tile[i]) * ROWS + row_of(group) + 8 * r, p.rows - 1);
            ahead_row[r] = reinterpret_cast<const uint8_t*>(p.weight) + row * row_bytes(FORMAT, p.width);
            if (grouped(FORMAT)) ahead_scale[r] = static_cast<const __half*>(p.scales) + row * ahead_blocks;
        }
    };
    auto fetch = [&](Rows& to) {
        if (ahead >= all.tiles) return;
        if (ahead_block < ahead_blocks)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                Codes<FORMAT>& codes = to.codes[r];
                const uint8_t* const lower = ahead_row[r] + ahead_block * lower_bytes(FORMAT, BLOCK);
                const uint8_t* const upper = ahead_row[r] + lower_bytes(FORMAT, ahead_blocks * BLOCK) + ahead_block * upper_bytes(FORMAT, BLOCK);
                if constexpr (wide_codes(FORMAT)) {
                    const uint4 v = __ldg(reinterpret_cast<const uint4*>(lower) + quarter);
                    codes.lower[0] = v.x, codes.lower[1] = v.y, codes.lower[2] = v.z, codes.lower[3] = v.w;
                } else {
                    const uint2 v = __ldg(reinterpret_cast<const uint2*>(lower) + quarter);
                    codes.lower[0] = v.x, codes.lower[1] = v.y;
                }
                if constexpr (FORMAT == FP6) codes.upper = __ldg(reinterpret_cast<const uint32_t*>(upper) + quarter);
                if constexpr (FORMAT == FP5) codes.upper = __ldg(reinterpret_cast<const uint16_t*>(upper) + quarter);
                if constexpr (grouped(FORMAT)) to.scale[r] = ahead_scale[r][ahead_block];
            }
        ahead_block += WARPS;
        if (ahead_block - warp >= ahead_blocks) ahead += gridDim.x, aim();
    };

    Rows coming[DEPTH];
    aim();
#pragma unroll
    for (int d = 0; d < DEPTH; d++) fetch(coming[d]);
    wait_for_previous();

    float sum[2][HALVES][4] = {};
    int flip = 0, tile = blockIdx.x, block = warp, count = 0;
    while (tile < all.tiles) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (tile >= all.tiles) break;
            const int i = all.of(tile);
            const Product& p = all.item[i];
            const int first_row = (tile - all.first_tile[i]) * ROWS;
            if (block * BLOCK < p.width) {
                Inputs<HALVES> x[2] = {};
#pragma unroll
                for (int w = 0; w < 2; w++)
#pragma unroll
                    for (int h = 0; h < HALVES; h++) {
                        if (group + 8 * h < all.num_tokens)
                            x[w][h] = *reinterpret_cast<const uint4*>(p.x + int64_t(group + 8 * h) * p.x_stride + block * BLOCK +
                                                                      w * 32 + 8 * quarter);
                        x[w][h] = exchange(x[w][h], quarter);
                    }
                Rows& now = coming[d];
                float low = 1.f, high = 1.f;
                if constexpr (grouped(FORMAT)) low = __half2float(now.scale[0]), high = __half2float(now.scale[1]);
                if constexpr (FORMAT == FP5)
                    now.codes[0].upper = spread_signs(now.codes[0].upper), now.codes[1].upper = spread_signs(now.codes[1].upper);
                multiply_block<FORMAT, HALVES>(sum, now.codes[0], now.codes[1], x, low, high);
            }
            fetch(coming[d]);
            block += WARPS;
            if ((block - warp) * BLOCK < p.width) continue;

            leave_sums<HALVES>(parts[flip], sum, warp, lane);
            __syncthreads();
            finish_in_turn<HALVES>(parts[flip], count, p, first_row, all.num_tokens, unit<FORMAT>(),
                                   scale_of<FORMAT>(p, first_row + row_of(group)),
                                   scale_of<FORMAT>(p, first_row + row_of(group) + 8), active_mask, warp, lane);
#pragma unroll
            for (int w = 0; w < 2; w++)
#pragma unroll
                for (int h = 0; h < HALVES; h++) sum[w][h][0] = sum[w][h][1] = sum[w][h][2] = sum[w][h][3] = 0.f;
            flip ^= 1, block = warp, tile += gridDim.x, count++;
        }
    }
}

template <int FORMAT>
constexpr int PLAIN_WEIGHT = 2 * BLOCK / row_bytes(FORMAT, BLOCK);  // bytes of fp16 for one of codes, rounded down

// As many stages as let two blocks share a multiprocessor, so that the next kernel's weights come while this one ends; of many
// tokens, whose x takes the registers of two, more.
template <int FORMAT, int HALVES>
constexpr int STAGES = ((HALVES == 1 ? 113 << 10 : 160 << 10) - stream_bytes<FORMAT, HALVES>(0)) / Stage<FORMAT>::BYTES;

template <int FORMAT, int HALVES>
int start_stream(const Products& all, int coded, uint16_t* active_mask, const Maps& maps, int blocks, int overlap, void* stream) {
    const auto kernel = stream_codes<FORMAT, HALVES, STAGES<FORMAT, HALVES>>;
    constexpr int BYTES = stream_bytes<FORMAT, HALVES>(STAGES<FORMAT, HALVES>);
    static const cudaError_t prepared = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (prepared) return prepared;
    const unsigned grid = min(all.tiles, blocks ? blocks : device().processors);
    return start(kernel, {grid, WARPS * LANES, cudaStream_t(stream), overlap, 1, BYTES},
                 Shares{all, coded, PLAIN_WEIGHT<FORMAT>, active_mask}, maps);
}

constexpr int MOST_BYTES = 227 << 10;  // of shared memory of a block of Hopper

template <int FORMAT, int HALVES>
int start_beside(const Products& all, const Maps& maps, const Pairs& pairs, int blocks, int overlap, void* stream) {
    constexpr int DEEP = (MOST_BYTES - 1024 - stream_bytes<FORMAT, HALVES>(0)) / Stage<FORMAT>::BYTES;
    constexpr int BYTES = stream_bytes<FORMAT, HALVES>(DEEP);
    const auto kernel = stream_beside_pairs<FORMAT, HALVES, DEEP>;
    static const cudaError_t prepared = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_BYTES - 1024);
    if (prepared) return prepared;
    const int room = PairSpace(all.item[0].width / PAIR_WARPS, pairs.rank, HALVES).total;
    const unsigned grid = pairs.blocks + blocks;
    return start(kernel, {grid, WARPS * LANES, cudaStream_t(stream), overlap, 1, max(BYTES, room)},
                 Shares{all, all.tiles, PLAIN_WEIGHT<FORMAT>, nullptr}, maps, pairs);
}

template <int FORMAT>
int start_few(const Products& all, uint16_t* active_mask, int overlap, void* stream) {
    const unsigned blocks = min(all.tiles, 2 * device().processors);
    return start(all.num_tokens <= 8 ? few_codes<FORMAT, 1> : few_codes<FORMAT, 2>,
                 {blocks, WARPS * LANES, cudaStream_t(stream), overlap}, all, active_mask);
}

// Whether the copy engine can read a matrix of codes, and x has room.
bool streams(int format, const void* scales, int width) {
    const int upper = upper_bytes(format, width);
    const bool whole = lower_bytes(format, width) % CHUNK == 0 && upper % CHUNK == 0;
    const bool aligned = !grouped(format) || (width % (8 * BLOCK) == 0 && reinterpret_cast<uintptr_t>(scales) % 16 == 0);
    return device().hopper && whole && aligned && width <= MOST_BLOCKS * WARPS * BLOCK;
}

// [rows, chunks, 128 bytes] for boxes of so many chunks.
int describe_plane(CUtensorMap* map, const void* plane, int rows, int pitch, int bytes, int box_chunks) {
    const uint64_t sizes[] = {CHUNK / 2, uint64_t(rows), uint64_t(bytes / CHUNK)}, strides[] = {uint64_t(pitch), CHUNK};
    const uint32_t box[] = {CHUNK / 2, ROWS, uint32_t(box_chunks)};
    return describe_tensor(map, plane, 3, sizes, strides, box);
}

// Describes codes [rows, width] with their scales, and `pairs` rows of fp16.
template <int FORMAT>
int describe(Maps& maps, const void* values, const void* scales, int rows, int width, const void* plain, int pairs) {
    using S = Stage<FORMAT>;
    const int pitch = row_bytes(FORMAT, width), lower = lower_bytes(FORMAT, width), upper = upper_bytes(FORMAT, width);
    int error = describe_plane(&maps.codes, values, rows, pitch, lower, S::LOWER / CHUNK);
    if (!error && upper)
        error = describe_plane(&maps.beside, static_cast<const uint8_t*>(values) + lower, rows, pitch, upper,
                               S::BESIDE_BYTES / CHUNK_BYTES);
    if (!error && grouped(FORMAT)) {
        const uint64_t row = width / BLOCK, sizes[] = {row, uint64_t(rows), 1}, strides[] = {row * 2, row * 2 * rows};
        const uint32_t box[] = {CHUNK / 2, ROWS, 1};
        error = describe_tensor(&maps.beside, scales, 3, sizes, strides, box);
    }
    return error || !plain ? error : describe_plane(&maps.plain, plain, pairs, 2 * width, 2 * width, S::LOWER / CHUNK);
}

// Adds `problems` stacked matrices to `all`, each with its x and out.
void add_coded(Products& all, int format, const void* x, const void* values, const void* scales, void* out, int problems, int rows,
               int width, int out_stride, int activation) {
    for (int64_t i = 0; i < problems; i++) {
        const uint8_t* const codes = static_cast<const uint8_t*>(values) + i * rows * row_bytes(format, width);
        const uint8_t* const scale = static_cast<const uint8_t*>(scales) + i * rows * (grouped(format) ? width / BLOCK * 2 : 4);
        all.add({static_cast<const __half*>(x) + i * all.num_tokens * width, reinterpret_cast<const __half*>(codes), nullptr,
                 static_cast<__half*>(out) + i * all.num_tokens * out_stride, width, out_stride, rows, width, activation, false, scale},
                ROWS);
    }
}

}  // namespace

// What the C functions below start, in one format. `rows`: of all matrices together.
template <int FORMAT>
struct CodedProducts {
    static int gemv(const Products& all, const void* values, const void* scales, uint16_t* active_mask, int rows, int width,
                    int blocks, int overlap, void* stream);
    static int project(const Products& all, int coded, const void* values, const void* scales, const void* lora_down, int rows,
                       int width, int blocks, int overlap, void* stream);
    static int inputs(const Products& all, const Pairs& pairs, const void* values, const void* scales, int rows, int width,
                      int blocks, int overlap, void* stream);
};

template <int FORMAT>
int CodedProducts<FORMAT>::gemv(const Products& all, const void* values, const void* scales, uint16_t* active_mask, int rows,
                                int width, int blocks, int overlap, void* stream) {
    if (!streams(FORMAT, scales, width)) return start_few<FORMAT>(all, active_mask, overlap, stream);
    Maps maps{};
    if (const int error = describe<FORMAT>(maps, values, scales, rows, width, nullptr, 0)) return error;
    return (all.num_tokens <= 8 ? start_stream<FORMAT, 1> : start_stream<FORMAT, 2>)(all, all.tiles, active_mask, maps, blocks,
                                                                                     overlap, stream);
}

template <int FORMAT>
int CodedProducts<FORMAT>::project(const Products& all, int coded, const void* values, const void* scales, const void* lora_down,
                                   int rows, int width, int blocks, int overlap, void* stream) {
    Maps maps{};
    int rank = 0;
    for (int i = 3; i < all.count; i++) rank += all.item[i].rows;
    if (const int error = describe<FORMAT>(maps, values, scales, rows, width, lora_down, rank)) return error;
    return (all.num_tokens <= 8 ? start_stream<FORMAT, 1> : start_stream<FORMAT, 2>)(all, coded, nullptr, maps, blocks, overlap,
                                                                                     stream);
}

template <int FORMAT>
int CodedProducts<FORMAT>::inputs(const Products& all, const Pairs& pairs, const void* values, const void* scales, int rows,
                                  int width, int blocks, int overlap, void* stream) {
    if constexpr (upper_bytes(FORMAT, BLOCK) > 0) return cudaErrorNotSupported;
    else {
        Maps maps{};
        if (const int error = describe<FORMAT>(maps, values, scales, rows, width, nullptr, 0)) return error;
        return (all.num_tokens <= 8 ? start_beside<FORMAT, 1> : start_beside<FORMAT, 2>)(all, maps, pairs, blocks, overlap, stream);
    }
}

extern template struct CodedProducts<INT8>;
extern template struct CodedProducts<FP8>;
extern template struct CodedProducts<INT4>;
extern template struct CodedProducts<NF4>;
extern template struct CodedProducts<FP6>;
extern template struct CodedProducts<FP5>;
#if IN_PART(1)
template struct CodedProducts<INT8>;
#endif
#if IN_PART(2)
template struct CodedProducts<FP8>;
#endif
#if IN_PART(3)
template struct CodedProducts<INT4>;
#endif
#if IN_PART(4)
template struct CodedProducts<NF4>;
#endif
#if IN_PART(5)
template struct CodedProducts<FP6>;
#endif
#if IN_PART(6)
template struct CodedProducts<FP5>;
#endif

}  // namespace rwkv

#if IN_PART(0)
using namespace rwkv;

extern "C" int rwkv_lora_down(const void* mixed, const void* lora_down, void* hidden, int num_tokens, int width, int rank_w,
                              int rank_a, int rank_v, int rank_g, int tile, int splits, int blocks, int height,
                              int overlap, void* stream);

// out [P, N, M of out_stride] = x [P, N, K] weight [P, M, K]^T, N <= 16, P <= 7, K a multiple of 64.
// active_mask: null, or with a squared ReLU, P = 1 and M a multiple of 32, where to write M bits, 32 to a word, that say which
// columns of out are not all zeros. blocks: thread blocks, 0 = one to a multiprocessor, where the kernel has a choice.
RWKV_EXPORT int rwkv_quant_gemv(const void* x, const void* values, const void* scales, void* out, void* active_mask, int format,
                                int problems, int num_tokens, int rows, int width, int out_stride, int activation, int blocks,
                                int overlap, void* stream) {
    if (num_tokens > MAX_FEW || problems > MAX_PRODUCTS || width % BLOCK) return cudaErrorInvalidValue;
    if (active_mask && (activation != RELU_SQUARE || problems != 1 || rows % 32)) return cudaErrorInvalidValue;
    uint16_t* const mask = static_cast<uint16_t*>(active_mask);
    Products all;
    all.num_tokens = num_tokens;
    add_coded(all, format, x, values, scales, out, problems, rows, width, out_stride, activation);
    return with_format(format, [&](auto chosen) -> int {
        return CodedProducts<decltype(chosen)::value>::gemv(all, values, scales, mask, problems * rows, width, blocks, overlap, stream);
    });
}

// rkv [3, N, C] and hidden [N, R] in one launch where that can be, N <= 16: mixed [6, N, C], weight [3, C, C], lora_down [R, C] fp16.
RWKV_EXPORT int rwkv_quant_project(const void* mixed, const void* values, const void* scales, const void* lora_down, void* rkv,
                                   void* hidden, int format, int num_tokens, int width, int rank_w, int rank_a, int rank_v,
                                   int rank_g, int blocks, int overlap, void* stream) {
    if (num_tokens > MAX_FEW || width % BLOCK) return cudaErrorInvalidValue;
    Products all;
    all.num_tokens = num_tokens;
    add_coded(all, format, mixed, values, scales, rkv, 3, width, width, width, NONE);
    const int coded = all.tiles, together = streams(format, scales, width);
    if (!together) {
        const int error = rwkv_lora_down(mixed, lora_down, hidden, num_tokens, width, rank_w, rank_a, rank_v, rank_g, 0, 1, 1, 128,
                                         overlap, stream);
        if (error) return error;
    } else {
        add_lora_down(all, static_cast<const __half*>(mixed), static_cast<const __half*>(lora_down), static_cast<__half*>(hidden),
                      width, {rank_w, rank_a, rank_v, rank_g}, ROWS);
    }
    return with_format(format, [&](auto chosen) -> int {
        using Coded = CodedProducts<decltype(chosen)::value>;
        if (!together) return Coded::gemv(all, values, scales, nullptr, 3 * width, width, blocks, overlap, stream);
        return Coded::project(all, coded, values, scales, lora_down, 3 * width, width, blocks, overlap, stream);
    });
}

// rkv [3, N, C], and the LoRA pairs' w_raw, a, v_mix, gate [N, C] with hidden [N, R] between, in one launch on Hopper, N <= 16.
// With codes of 8 or 4 bits. arrived: as of rwkv_gemm_inputs. blocks: thread blocks of r, k, v; the pairs get all other multiprocessors.
RWKV_EXPORT int rwkv_quant_inputs(const void* mixed, const void* values, const void* scales, const void* lora_down,
                                  const void* lora_up, const void* w0, const void* a0, const void* v0, void* rkv, void* hidden,
                                  void* w_raw, void* a, void* v_mix, void* gate, void* arrived, int format, int num_tokens, int width,
                                  int rank_w, int rank_a, int rank_v, int rank_g, int blocks, int overlap, void* stream) {
    const LoraRanks ranks{rank_w, rank_a, rank_v, rank_g};
    for (const int rank : {rank_w, rank_a, rank_v, rank_g})
        if (rank < 0 || rank > PAIR_SLICE || rank % PAIR_STEP) return cudaErrorInvalidValue;
    Products all;
    Pairs pairs{};
    all.num_tokens = pairs.lora_down.num_tokens = pairs.lora_up.num_tokens = num_tokens;
    add_coded(all, format, mixed, values, scales, rkv, 3, width, width, width, NONE);
    pairs.rank = ranks.total(), pairs.blocks = device().processors - blocks;
    if (num_tokens > MAX_FEW || !streams(format, scales, width) || width % (PAIR_WARPS * PAIR_STEP) || width > PAIR_WARPS * PAIR_SLICE)
        return cudaErrorInvalidValue;
    if (blocks < 1 || blocks > all.tiles || pairs.blocks < 1 || pairs.rank == 0) return cudaErrorInvalidValue;
    pairs.hidden = static_cast<const __half*>(hidden), pairs.arrived = static_cast<unsigned long long*>(arrived) + pairs.blocks;
    add_lora_down(pairs.lora_down, static_cast<const __half*>(mixed), static_cast<const __half*>(lora_down),
                  static_cast<__half*>(hidden), width, ranks, PAIR_ROWS);
    add_lora_up(pairs.lora_up, pairs.hidden, static_cast<const __half*>(lora_up), {w0, a0, v0}, {w_raw, a, v_mix, gate}, width, ranks,
                PAIR_ROWS);
    return with_format(format, [&](auto chosen) -> int {
        return CodedProducts<decltype(chosen)::value>::inputs(all, pairs, values, scales, 3 * width, width, blocks, overlap, stream);
    });
}
#endif
