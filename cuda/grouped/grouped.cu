// Several products of many tokens in one launch (a grouped GEMM), each with inputs, bias, activation and output of its own, by
// Hopper's wgmma with the weights as its 64-high operand: the LoRA pairs.
//
// A tile is 64 or 128 rows of weights by BN tokens. One warp keeps a ring of shared-memory stages full through the copy engine, 64
// values of k a stage; a warpgroup for every 64 rows multiplies. Thread blocks go from tile to tile, and where two share a
// multiprocessor, one multiplies while the other writes: short sums (those with lora_up) take no longer than their results do.
// Where there are too few tiles for the device, a cluster of `splits` thread blocks shares each: every block sums a part of k,
// sends its sums to the blocks that finish them, and finishes those of its part of the tokens, adding in the order of k. A token's
// result depends on itself alone, and on `splits`.
//
// With programmatic dependent launch the first stages of weights are on their way before the preceding kernel has ended.
#include "grouped.cuh"

#include <algorithm>

namespace rwkv {
namespace {

constexpr int MAX_SPLITS = 8, MAX_BLOCKS = 4;
constexpr int MAX_GROUPED = 4;  // products
__host__ __device__ constexpr int sum_pitch(int bm) { return bm + 4; }  // fp32 row of partial sums

struct Grouped {
    CUtensorMap weight[MAX_GROUPED], x[MAX_GROUPED];
    Products all;
    int token_tiles, splits, stages;
};

__host__ __device__ constexpr int threads(int bm) { return consumers(bm) + LANES; }
// The tokens that each block of a cluster finishes.
__host__ __device__ constexpr int portion(int tokens, int splits) { return (tokens + splits - 1) / splits; }

// A thread block's part of the work: every `stride`-th tile from `first`, the `part`-th of `splits` parts of its k.
struct Work {
    int part = 0, splits = 1, first = blockIdx.x, stride = gridDim.x, tiles;
    __device__ Work(const Grouped& g, bool split) : tiles(g.all.tiles * g.token_tiles) {
        if (split) splits = g.splits, part = first % splits, first /= splits, stride /= splits;
    }
};
struct Tile {
    int item, row, token;  // product, first row of its weights, first token
    int k0, steps;         // stages of k
    __device__ Tile(int tile, const Grouped& g, const Work& work, int bm, int bn) {
        int rows = tile;
        token = 0;
        if (g.token_tiles > 1) {
            const int band = tile / (BAND * g.all.tiles) * BAND, breadth = min(BAND, g.token_tiles - band);
            const int within = tile % (BAND * g.all.tiles);
            rows = within / breadth, token = (band + within % breadth) * bn;
        }
        item = g.all.of(rows);
        row = (rows - g.all.first_tile[item]) * bm;
        const int all_steps = (g.all.item[item].width + BK - 1) / BK;
        k0 = work.part * all_steps / work.splits;
        steps = (work.part + 1) * all_steps / work.splits - k0;
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The loading warp, of which one thread works.
template <int BM, int BN, bool SPLIT>
__device__ __forceinline__ void load(const Grouped& g, const Work& work, char* stages, Barriers& barriers) {
    const uint64_t weight_policy = g.token_tiles == 1 ? READ_ONCE : READ_AGAIN;
    auto load_weight = [&](int stage, const Tile& tile, int i) {
        expect_bytes(&barriers.full[stage], stage_bytes(BM, BN));
        copy_box(stages + stage * stage_bytes(BM, BN), g.weight[tile.item], &barriers.full[stage], weight_policy,
                 (tile.k0 + i) * BK, tile.row, 0);
    };
    auto load_x = [&](int stage, const Tile& tile, int i) {
        copy_box(stages + stage * stage_bytes(BM, BN) + BM * BK * 2, g.x[tile.item], &barriers.full[stage], READ_AGAIN,
                 (tile.k0 + i) * BK, tile.token, 0);
    };
    Tile tile(work.first, g, work, BM, BN);
    const int early = min(g.stages, tile.steps);
    if (elected()) {
        prefetch_map(g.weight[tile.item]), prefetch_map(g.x[tile.item]);
#pragma unroll 1
        for (int i = 0; i < early; i++) load_weight(i, tile, i);
    }
    // The next kernel may ask for its weights when all of this one's are asked for.
    const bool one = SPLIT || work.first + work.stride >= work.tiles, all = early == tile.steps && one;
    if (all) release_next();
    __syncwarp();
    __syncthreads();
    if (!elected()) return;
    wait_for_previous();
    int i = 0;  // of the tile's steps
#pragma unroll 1
    for (; i < early; i++) load_x(i, tile, i);
    if (all) return;

    Ring ring;
    ring.advance(g.stages, early);
    for (int t = work.first;;) {
#pragma unroll 1
        for (; i < tile.steps; i++) {
            wait(&barriers.empty[ring.stage], ring.parity ^ 1);
            load_weight(ring.stage, tile, i);
            load_x(ring.stage, tile, i);
            ring.advance(g.stages);
        }
        if (SPLIT || (t += work.stride) >= work.tiles) break;
        tile = Tile(t, g, work, BM, BN), i = 0;
    }
    release_next();
}

// The tokens of a tile that each block of a cluster finishes.
struct Portions {
    int live, each;
    __device__ __forceinline__ Portions(int tokens, int splits) : live(tokens), each(portion(tokens, splits)) {}
    __device__ __forceinline__ int of(int rank) const { return max(0, min(each, live - rank * each)); }
};

// Add the sums of the blocks that split k, in its order, and write them: each block a part of the tokens. The sums take the
// place of the stages, behind them those that the others send. There is no bias.
template <int BM, int BN>
__device__ __forceinline__ void store_split(
    const float (&sums)[BN / 2], const Product& p, const Tile& tile, const Portions& portions, const Work& work, char* stages,
    Barriers& barriers
) {
    constexpr int CONSUMERS = consumers(BM), SUM_PITCH = sum_pitch(BM);
    const int splits = work.splits, part = work.part, each = portions.each;
    const int thread = threadIdx.x;
    float *const own = reinterpret_cast<float*>(stages), *const others = own + BN * SUM_PITCH;
    cluster_arrive_relaxed();    // this warp needs its stages no longer
    sync_threads(1, CONSUMERS);  // nor does another of this block
    spread_sums<BN, SUM_PITCH>(sums, own);
    publish_stores();
    sync_threads(1, CONSUMERS);
    cluster_wait();  // all blocks' stages are used up
    const int mine = portions.of(part);
    if (thread == part) {
        expect_bytes(&barriers.gathered, (splits - 1) * mine * SUM_PITCH * 4);
    } else if (thread < splits && portions.of(thread) > 0) {
        copy_to_block(thread, others + part * each * SUM_PITCH, own + thread * each * SUM_PITCH,
                      portions.of(thread) * SUM_PITCH * 4, &barriers.gathered);
    }
    wait(&barriers.gathered, 0);
#pragma unroll 1
    for (int i = thread; i < mine * (BM / 4); i += CONSUMERS) {
        const int n = i / (BM / 4), m = i % (BM / 4) * 4;
        if (tile.row + m >= p.rows) continue;
        float4 sum[MAX_SPLITS];  // all asked for before the first is added; a zero more changes no sum that began with one
#pragma unroll
        for (int s = 0; s < MAX_SPLITS; s++) {
            const float* from = s == part ? own + part * each * SUM_PITCH : others + s * each * SUM_PITCH;
            sum[s] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (s < splits) sum[s] = *reinterpret_cast<const float4*>(from + n * SUM_PITCH + m);
        }
        float v[4] = {};
#pragma unroll
        for (int s = 0; s < MAX_SPLITS; s++) v[0] += sum[s].x, v[1] += sum[s].y, v[2] += sum[s].z, v[3] += sum[s].w;
        if (p.activation == SIGMOID)
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = activate(SIGMOID, v[j]);
        if (p.activation == TANH)
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = tanhf(v[j]);
        const int64_t at = int64_t(tile.token + part * each + n) * p.out_stride + tile.row + m;  // a multiple of 4, as the rows are
        if (p.wide)
            *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = make_float4(v[0], v[1], v[2], v[3]);
        else
            *reinterpret_cast<uint2*>(static_cast<__half*>(p.out) + at) = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
    }
}

#endif

// SPLIT: clusters share tiles, and each has one.
template <int BM, int BN, bool SPLIT>
__global__ void __launch_bounds__(threads(BM), BM * BN <= 64 * 64 ? 4 : BN <= 64 ? 3 : BN == 128 && !SPLIT ? 2 : 1)
    grouped(const __grid_constant__ Grouped g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int CONSUMERS = consumers(BM);
    extern __shared__ char memory[];
    __shared__ Barriers barriers;
    char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const Work work(g, SPLIT);
    const int lane = threadIdx.x % LANES;
    if (threadIdx.x >= CONSUMERS) {
        if (lane < g.stages) init_barrier(&barriers.full[lane], 1), init_barrier(&barriers.empty[lane], CONSUMERS / LANES);
        if (lane == 0) init_barrier(&barriers.gathered, 1);
        publish_barriers();
        __syncwarp();
        load<BM, BN, SPLIT>(g, work, stages, barriers);
        if (SPLIT) {
            __syncwarp();
            cluster_arrive_relaxed();
            cluster_wait();
        }
    } else {
        __syncthreads();
        Ring ring;
        for (int t = work.first; t < work.tiles; t += work.stride) {
            const Tile tile(t, g, work, BM, BN);
            const Product& p = g.all.item[tile.item];
            const int row = tile.row + threadIdx.x / LANES * 16 + lane / 4;
            const float2 bias = {bias_of(p, row), bias_of(p, row + 8)};
            Portions portions(min(BN, g.all.num_tokens - tile.token), work.splits);
            if (SPLIT) asm volatile("" : "+r"(portions.each));  // divided here, before there are sums to finish
            float sums[BN / 2];
            accumulate<BM, BN>(sums, tile.steps, g.stages, stages, barriers, ring);
            char* const space = stages + g.stages * stage_bytes(BM, BN);
            if constexpr (SPLIT) {
                store_split<BM, BN>(sums, p, tile, portions, work, stages, barriers);
                break;
            }
            if (p.wide)
                store_floats<BN>(sums, p, tile.row, tile.token, g.all.num_tokens, bias);
            else
                store_halves<BN>(sums, p, tile.row, tile.token, g.all.num_tokens, bias, space);
        }
    }
    if (SPLIT) {  // this block's memory is read until all have got their sums
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
    }
#endif
}

template <int BM, int BN, bool SPLIT>
int start_tiles(Grouped& g, const GroupedCut& cut, int overlap, void* stream) {
    auto kernel = grouped<BM, BN, SPLIT>;
    constexpr int ROOM = MULTIPROCESSOR_BYTES - OTHER_BYTES;
    static const cudaError_t prepared = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ROOM);
    if (prepared) return prepared;
    const int room = MULTIPROCESSOR_BYTES / cut.blocks - OTHER_BYTES - 1024, space = SPLIT ? 0 : BM / 64 * SPACE;
    int longest = 2;
    for (int i = 0; i < g.all.count; i++) longest = std::max(longest, (g.all.item[i].width + BK * g.splits - 1) / (BK * g.splits));
    g.stages = std::min({(room - space) / stage_bytes(BM, BN), MAX_STAGES, longest});
    const int gathered = SPLIT ? (BN + g.splits * portion(BN, g.splits)) * sum_pitch(BM) * 4 : 0;
    if (g.stages < 2 || gathered > ROOM - 1024) return cudaErrorInvalidValue;
    const int tiles = g.all.tiles * g.token_tiles, grid = SPLIT ? tiles * g.splits : std::min(tiles, cut.blocks * processors());
    const int bytes = 1024 + std::max(g.stages * stage_bytes(BM, BN) + space, gathered);
    return start(kernel, {unsigned(grid), unsigned(threads(BM)), cudaStream_t(stream), overlap, g.splits, bytes}, g);
}

}  // namespace

int start_grouped(const Products& all, const GroupedCut& cut, int overlap, void* stream) {
    if (all.count > MAX_GROUPED || cut.tile < 1 || cut.tile > 256 || cut.blocks < 1 || cut.blocks > MAX_BLOCKS)
        return cudaErrorInvalidValue;
    if (cut.splits < 1 || cut.splits > MAX_SPLITS) return cudaErrorInvalidValue;
    Grouped g;
    g.all = all;
    g.token_tiles = (all.num_tokens + cut.tile - 1) / cut.tile, g.splits = cut.splits;
    for (int i = 0; i < all.count; i++) {
        const Product& p = all.item[i];
        if (p.rows % 32 || p.out_stride % 8 || cut.splits > 1 && (p.width < cut.splits * BK || p.bias))
            return cudaErrorInvalidValue;
        int error = describe_rows(&g.weight[i], p.weight, p.width, p.rows, p.width, cut.height);
        if (!error) error = describe_rows(&g.x[i], p.x, p.width, all.num_tokens, p.x_stride, cut.tile);
        if (error) return error;
    }
    const int split = cut.splits > 1 ? -1 : 1;
    if (cut.height == 64) switch (split * cut.tile) {
        case 32: return start_tiles<64, 32, false>(g, cut, overlap, stream);
        case 64: return start_tiles<64, 64, false>(g, cut, overlap, stream);
        case 128: return start_tiles<64, 128, false>(g, cut, overlap, stream);
        case -32: return start_tiles<64, 32, true>(g, cut, overlap, stream);
        case -64: return start_tiles<64, 64, true>(g, cut, overlap, stream);
    }
    if (cut.height == 128) switch (split * cut.tile) {
        case 32: return start_tiles<128, 32, false>(g, cut, overlap, stream);
        case 64: return start_tiles<128, 64, false>(g, cut, overlap, stream);
        case 128: return start_tiles<128, 128, false>(g, cut, overlap, stream);
        case 160: return start_tiles<128, 160, false>(g, cut, overlap, stream);
        case 256: return start_tiles<128, 256, false>(g, cut, overlap, stream);
        case -32: return start_tiles<128, 32, true>(g, cut, overlap, stream);
        case -64: return start_tiles<128, 64, true>(g, cut, overlap, stream);
        case -128: return start_tiles<128, 128, true>(g, cut, overlap, stream);
        case -160: return start_tiles<128, 160, true>(g, cut, overlap, stream);
    }
    return cudaErrorInvalidValue;
}

}  // namespace rwkv
