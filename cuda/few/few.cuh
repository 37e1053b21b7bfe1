// What the kernels of decode steps of few rows share.
//
// A launch in such a step does little, so what it costs beside its data counts: the instructions behind its wait above all, which run
// but once and have to be fetched, some cycles each. So these kernels do what they can before they wait, and what follows is short.
#pragma once

#include "../linear/hopper.cuh"
#include "../linear/products.cuh"
#include "../norm.cuh"

namespace rwkv {

constexpr int FEW = 8;           // rows, at most
constexpr int FEW_WARPS = 8;     // that multiply; one more loads
constexpr int FEW_STEP = 32;     // values of k that four lanes read with one 16-byte load each
constexpr int EACH_STEP = FEW_WARPS * FEW_STEP;
constexpr int FEW_PIECE = 1024;  // values of k to a stage
constexpr int FEW_TILE = 8;      // rows of weights, to a tile
constexpr int FEW_BATCH = 4;     // tiles whose sums are added up at once
constexpr int FEW_STAGES = 16;   // at most
constexpr int FEW_THREADS = (FEW_WARPS + 1) * LANES;
constexpr int FEW_SHARED = 200 << 10;  // bytes of dynamic shared memory, at most

// Rows of `bytes`, a multiple of 64, lie so far apart in shared memory that fragments meet no bank twice.
__host__ __device__ constexpr int pitch_of(int bytes) { return bytes | 64; }
__host__ __device__ constexpr int pieces_of(int width) { return (width + FEW_PIECE - 1) / FEW_PIECE; }
__host__ __device__ constexpr int stage_pitch(int width) { return pitch_of((width < FEW_PIECE ? width : FEW_PIECE) * 2); }

// Products of the same K, each done by thread blocks of its own.
struct FewProducts {
    Products all;
    int first_block[MAX_PRODUCTS + 1];
    int width, stages;  // stages: of weights that are on the way at once

    // Deals out so many blocks, so that none has more tiles than need be. Gives how many have some.
    int deal(int blocks, int most_stages) {
        int most = (all.tiles + blocks - 1) / blocks;  // tiles of a block; behind the loop one more
        const auto tiles = [&](int i) { return all.first_tile[i + 1] - all.first_tile[i]; };
        for (int needed = blocks + 1; needed > blocks; most++) {
            needed = 0;
            for (int i = 0; i < MAX_PRODUCTS; i++) {
                first_block[i] = needed;
                needed += (tiles(i) + most - 1) / most;
            }
            first_block[MAX_PRODUCTS] = needed;
        }
        stages = min(min(most_stages, FEW_STAGES), max(2, (most - 1) * pieces_of(width)));
        return first_block[MAX_PRODUCTS];
    }
    __host__ __device__ int ring_bytes() const { return stages * FEW_TILE * stage_pitch(width); }
};

#if __CUDA_ARCH__ >= 900

// A block's part: tiles `first` to `last` - 1 of one product.
struct FewShare {
    int item, first, last;
    __device__ __forceinline__ explicit FewShare(const FewProducts& p) {
        const int block = blockIdx.x;
        item = 0;
#pragma unroll
        for (int i = 1; i < MAX_PRODUCTS; i++) item += block >= p.first_block[i];
        const int from = p.first_block[item], blocks = p.first_block[item + 1] - from;
        const int tiles = p.all.first_tile[item + 1] - p.all.first_tile[item];
        first = (block - from) * tiles / blocks, last = (block - from + 1) * tiles / blocks;
    }
};

struct FewRing {
    uint64_t full[FEW_STAGES], empty[FEW_STAGES];

    __device__ __forceinline__ void init(int stages) {
        for (int s = 0; s < stages; s++) init_barrier(full + s, 1), init_barrier(empty + s, FEW_WARPS);
        publish_barriers();
    }
};
struct FewPlace {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// What the loading warp does: all weights of the block's tiles; `then` once as many are under way as there are stages.
template <class Then>
__device__ __forceinline__ void load_tiles(const FewProducts& p, const FewShare& share, uint8_t* memory, FewRing& ring, Then then) {
    const int lane = threadIdx.x % LANES, pitch = stage_pitch(p.width);
    const __half* from = p.all.item[share.item].weight + (int64_t(share.first) * FEW_TILE + lane % FEW_TILE) * p.width;
    FewPlace at;
    int left = p.stages;
#pragma unroll 1
    for (int tile = share.first; tile < share.last; tile++, from += FEW_TILE * p.width)
#pragma unroll 1
        for (int k = 0; k < p.width; k += FEW_PIECE) {
            if (left-- == 0) then();
            const int bytes = min(FEW_PIECE, p.width - k) * 2;
            wait(ring.empty + at.stage, at.parity ^ 1);
            if (lane == 0) expect_bytes(ring.full + at.stage, bytes * FEW_TILE);
            __syncwarp();
            if (lane < FEW_TILE) copy_row(memory + (at.stage * FEW_TILE + lane) * pitch, from + k, bytes, ring.full + at.stage);
            at.advance(p.stages);
        }
    if (left >= 0) then();
}

// Tanh or sigmoid: long, and not to be repeated for every sum.
static __device__ __noinline__ float curve(float v, int activation) { return activate(activation, v); }

// What becomes of a tile's sums, of which eight warps have a part each.
struct FewResults {
    __half* to;  // of this lane: of token lane / 4, row lane % 4 * 2 of the block's first tile; null without such a token
    int activation;
    uint8_t* active_mask;  // of the block's first tile, or null: see rwkv_normed_product

    __device__ __forceinline__ FewResults(const FewProducts& p, const FewShare& share, uint8_t* mask) {
        const Product& q = p.all.item[share.item];
        const int lane = threadIdx.x % LANES;
        to = static_cast<__half*>(q.out) + lane / 4 * q.out_stride + share.first * FEW_TILE + lane % 4 * 2;
        if (lane / 4 >= p.all.num_tokens) to = nullptr;
        activation = q.activation, active_mask = mask ? mask + share.first : nullptr;
    }
    // One warp does it for tile `tile` of the block.
    __device__ __forceinline__ void store(const float2 (&sums)[FEW_WARPS][LANES], int tile) const {
        const int lane = threadIdx.x % LANES;
        float v[2] = {};
#pragma unroll
        for (int w = 0; w < FEW_WARPS; w++) v[0] += sums[w][lane].x, v[1] += sums[w][lane].y;
        if (activation == RELU_SQUARE) v[0] = activate(RELU_SQUARE, v[0]), v[1] = activate(RELU_SQUARE, v[1]);
        if (activation > RELU_SQUARE) v[0] = curve(v[0], activation), v[1] = curve(v[1], activation);
        const __half2 pair = __floats2half2_rn(v[0], v[1]);
        if (to) *reinterpret_cast<__half2*>(to + tile * FEW_TILE) = pair;
        if (!active_mask) return;
        const uint32_t bits = *reinterpret_cast<const uint32_t*>(&pair);
        unsigned even = __ballot_sync(ALL, (bits & 0x7fff) != 0), odd = __ballot_sync(ALL, (bits & 0x7fff0000) != 0);
        even |= even >> 16, odd |= odd >> 16, even |= even >> 8, odd |= odd >> 8, even |= even >> 4, odd |= odd >> 4;
        const auto spread = [](unsigned v) { return (v & 1) | (v & 2) << 1 | (v & 4) << 2 | (v & 8) << 3; };
        const unsigned on = spread(even) | spread(odd) << 1;
        if (lane == 0) active_mask[tile] = uint8_t(on);
    }
};

using FewSums = float2[2][FEW_BATCH][FEW_WARPS][LANES];

// All tiles of a block, by the warps that multiply. multiply(sum, next, done): add a tile's products to `sum`, where next() gives where
// this lane's weights of the next piece begin, and done() leaves it.
template <class Multiply>
__device__ __forceinline__ void multiply_tiles(
    const FewProducts& p, const FewShare& share, uint8_t* memory, FewRing& ring, FewSums& sums, const FewResults& results,
    Multiply multiply
) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, pitch = stage_pitch(p.width), tiles = share.last - share.first;
    const uint8_t* const own = memory + lane / 4 * pitch + (warp * FEW_STEP + lane % 4 * 8) * 2;
    FewPlace at;
#pragma unroll 1
    for (int from = 0, flip = 0; from < tiles; from += FEW_BATCH, flip ^= 1) {
        const int count = min(FEW_BATCH, tiles - from);
#pragma unroll 1
        for (int t = 0; t < count; t++) {
            float sum[2][4] = {};  // in two parts, so that a product need not wait for the one before
            multiply(sum, [&] {  // the next piece's rows, once they are here
                wait(ring.full + at.stage, at.parity);
                return own + at.stage * FEW_TILE * pitch;
            }, [&] {  // they have been read
                __syncwarp();
                if (lane == 0) arrive(ring.empty + at.stage);
                at.advance(p.stages);
            });
            sums[flip][t][warp][lane] = make_float2(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1]);
        }
        sync_threads(1, FEW_WARPS * LANES);
        const int t = (warp - FEW_BATCH * flip) & (FEW_WARPS - 1);  // of the tiles, which this warp finishes
        if (t < count) results.store(sums[flip][t], from + t);
    }
}

// The same with what is multiplied in shared memory: rows of `width` values, `pitch_of` their bytes apart.
__device__ __forceinline__ void multiply_staged(
    const FewProducts& p, const FewShare& share, uint8_t* memory, FewRing& ring, FewSums& sums, const FewResults& results,
    const uint8_t* x
) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, group = lane / 4, width = p.width;
    const uint8_t* const own = x + group * pitch_of(width * 2) + (warp * FEW_STEP + lane % 4 * 8) * 2;
    multiply_tiles(p, share, memory, ring, sums, results, [&](float (&sum)[2][4], auto next, auto done) {
#pragma unroll 1
        for (int k = 0; k < width; k += FEW_PIECE) {
            const uint8_t* const rows = next();
#pragma unroll
            for (int s = 0; s < FEW_PIECE / EACH_STEP; s++) {
                if (k + warp * FEW_STEP + s * EACH_STEP >= width) break;
                uint4 a = make_uint4(0, 0, 0, 0);
                if (group < p.all.num_tokens) a = *reinterpret_cast<const uint4*>(own + (k + s * EACH_STEP) * 2);
                const uint4 w = *reinterpret_cast<const uint4*>(rows + s * EACH_STEP * 2);
                mma(sum[0], a.x, 0, a.y, 0, w.x, w.y);
                mma(sum[1], a.z, 0, a.w, 0, w.z, w.w);
            }
            done();
        }
    });
}

#endif

}  // namespace rwkv
