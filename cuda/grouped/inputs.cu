// All that the recurrence of more than 16 tokens needs, in one launch: r, k and v, and both halves of the low-rank pairs (LoRA).
//
// Tiles and stages as in grouped.cu; two threads of a thread block keep its stages full by turns. The tiles of the pairs' first
// halves come first, then those of r, k and v, then those of the second halves. These read what the first ones have written, so
// they wait until a counter says that all of it is there. Thread blocks begin in the order of their numbers, and go through their
// tiles in order, so whoever waits does so for tiles that are at work. The last one to have waited sets the counter back, so such
// launches must come one after another. A token's result depends on itself alone.
//
// Beside two launches, or another stream, nothing stands still while the first halves are on their way to the second.
#include "grouped.cuh"

#include <algorithm>

namespace rwkv {
namespace {

constexpr int PAIRS = 4, PLANES = 6;
constexpr int LOADERS = 2;                 // threads that ask the copy engine, see gemm.cu
enum Kind : int { DOWN, RKV, UP, KINDS };  // first halves; r, k and v; second halves

struct Inputs {
    CUtensorMap mixed, rkv, down;          // [6, N, C]; [3, M, C]; [R, C]
    CUtensorMap up[PAIRS], hidden[PAIRS];  // [M, rank]; [N, rank]
    Products of[KINDS];
    int plane[PAIRS], first_row[PAIRS];  // of the first halves: plane of `mixed`, first row of `down`
    const char* tiled;                   // the weights of r, k, v as `Shape::tiled` in gemm.cu; or null
    unsigned* written;                   // [2]: tiles of first halves that are written, threads that have waited for all of them
    unsigned waiting;                    // threads that will
    int token_tiles, k_steps, stages;
};

__host__ __device__ constexpr int threads(int bm) { return consumers(bm) + LOADERS * LANES; }

struct Tile {
    int kind = 0, item, row, token, steps;  // product of its kind, first row of its weights, first token, stages of k
    __device__ Tile(int tile, const Inputs& g, int bm, int bn) : token(0) {
#pragma unroll
        for (int i = 0; i < KINDS - 1; i++) {
            const int all = g.of[i].tiles * g.token_tiles;
            if (kind == i && tile >= all) tile -= all, kind++;
        }
        const Products& products = g.of[kind];
        int rows = tile;
        if (g.token_tiles > 1) {
            const int of_band = BAND * products.tiles, band = tile / of_band * BAND, breadth = min(BAND, g.token_tiles - band);
            const int within = tile % of_band;
            rows = within / breadth, token = (band + within % breadth) * bn;
        }
        item = products.of(rows);
        row = (rows - products.first_tile[item]) * bm;
        steps = (products.item[item].width + BK - 1) / BK;
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int PIECE = 64 * BK * 2;  // bytes of 64 weight rows of a stage, which lie together in tiled weights

// A loading warp, of which one thread works: every LOADERS-th stage is its own.
template <int BM, int BN>
__device__ __forceinline__ void load(const Inputs& g, int tiles, char* stages, Barriers& barriers, int loader) {
    const uint64_t weight_policy = g.token_tiles == 1 ? READ_ONCE : READ_AGAIN;
    const auto load_weight = [&](int stage, const Tile& tile, int k) {
        char* const to = stages + stage * stage_bytes(BM, BN);
        uint64_t* const full = &barriers.full[stage];
        if (tile.kind == RKV && g.tiled) {  // what a tile has beyond the last row stays as it was
            const int rows = g.of[RKV].item[0].rows;
            const bool whole = BM == 64 || tile.row + 64 < rows;
            const char* const from = g.tiled + (size_t(tile.item * rows + tile.row) / 64 * g.k_steps + k) * PIECE;
            expect_bytes(full, stage_bytes(BM, BN) - (whole ? 0 : PIECE));
            copy_row(to, from, PIECE, full, weight_policy);
            if (BM > 64 && whole) copy_row(to + PIECE, from + size_t(g.k_steps) * PIECE, PIECE, full, weight_policy);
            return;
        }
        expect_bytes(full, stage_bytes(BM, BN));
        if (tile.kind == RKV)
            copy_box(to, g.rkv, full, weight_policy, k * BK, tile.row, tile.item);
        else if (tile.kind == DOWN)
            copy_box(to, g.down, full, weight_policy, k * BK, g.first_row[tile.item] + tile.row, 0);
        else
            copy_box(to, g.up[tile.item], full, weight_policy, k * BK, tile.row, 0);
    };
    const auto load_x = [&](int stage, const Tile& tile, int k) {
        char* const to = stages + stage * stage_bytes(BM, BN) + BM * BK * 2;
        uint64_t* const full = &barriers.full[stage];
        if (tile.kind == UP)
            copy_box(to, g.hidden[tile.item], full, READ_AGAIN, k * BK, tile.token, 0);
        else
            copy_box(to, g.mixed, full, READ_AGAIN, k * BK, tile.token, tile.kind == RKV ? tile.item : g.plane[tile.item]);
    };
    Tile tile(blockIdx.x, g, BM, BN);
    const int early = min(g.stages, tile.steps);
    if (elected()) {
        prefetch_map(tile.kind == UP ? g.hidden[tile.item] : g.mixed);
#pragma unroll 1
        for (int i = loader; i < early; i += LOADERS) load_weight(i, tile, i);
    }
    // The next kernel may ask for its weights when all of this one's are asked for.
    const bool all = early == tile.steps && blockIdx.x + gridDim.x >= tiles;
    if (all && loader == 0) release_next();
    __syncwarp();
    __syncthreads();
    if (!elected()) return;
    wait_for_previous();

    bool waited = false;
    const auto wait_for_first_halves = [&] {
        waited = true;
        const unsigned written = g.of[DOWN].tiles * g.token_tiles;
        unsigned now;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(g.written) : "memory");
        while (now < written);
        asm volatile("fence.proxy.async.global;" ::: "memory");  // what was stored is read by the copy engine
        if (atomicInc(g.written + 1, g.waiting - 1) == g.waiting - 1) *g.written = 0;
    };
    if (tile.kind == UP) wait_for_first_halves();
    int i = loader;  // of the tile's steps
#pragma unroll 1
    for (; i < early; i += LOADERS) load_x(i, tile, i);

    Ring ring;
    ring.advance(g.stages, i);
    for (int t = blockIdx.x;;) {
#pragma unroll 1
        for (; i < tile.steps; i += LOADERS) {
            wait(&barriers.empty[ring.stage], ring.parity ^ 1);
            load_weight(ring.stage, tile, i);
            load_x(ring.stage, tile, i);
            ring.advance(g.stages, LOADERS);
        }
        i -= tile.steps;
        if ((t += gridDim.x) >= tiles) break;
        tile = Tile(t, g, BM, BN);
        if (tile.kind == UP && !waited) wait_for_first_halves();
    }
    if (!all && loader == 0) release_next();
}

#endif

constexpr int most_blocks(int bm, int bn) { return bn <= 64 ? bm * bn <= 64 * 64 ? 3 : 2 : bm * bn <= 64 * 128 ? 2 : 1; }

template <int BM, int BN>
__global__ void __launch_bounds__(threads(BM), most_blocks(BM, BN)) inputs(const __grid_constant__ Inputs g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char memory[];
    __shared__ Barriers barriers;
    char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const int tiles = (g.of[DOWN].tiles + g.of[RKV].tiles + g.of[UP].tiles) * g.token_tiles;
    const int lane = threadIdx.x % LANES, loader = int(threadIdx.x - consumers(BM)) / LANES;
    if (threadIdx.x >= consumers(BM)) {
        if (elected()) {  // each makes the barriers of the stages that it is the first to use
            for (int i = loader; i < g.stages; i += LOADERS)
                init_barrier(&barriers.full[i], 1), init_barrier(&barriers.empty[i], consumers(BM) / LANES);
            publish_barriers();
        }
        __syncwarp();
        load<BM, BN>(g, tiles, stages, barriers, loader);
        return;
    }
    __syncthreads();
    char* const space = stages + g.stages * stage_bytes(BM, BN);
    Ring ring;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile(t, g, BM, BN);
        const Product& p = g.of[tile.kind].item[tile.item];
        const int num_tokens = g.of[RKV].num_tokens, row = tile.row + threadIdx.x / LANES * 16 + lane / 4;
        const float2 bias = {bias_of(p, row), bias_of(p, row + 8)};
        float sums[BN / 2];
        accumulate<BM, BN>(sums, tile.steps, g.stages, stages, barriers, ring);
        if (p.wide)
            store_floats<BN>(sums, p, tile.row, tile.token, num_tokens, bias);
        else
            store_halves<BN>(sums, p, tile.row, tile.token, num_tokens, bias, space);
        if (tile.kind != DOWN) continue;
        asm volatile("fence.proxy.async.global;" ::: "memory");
        __threadfence();
        sync_threads(3, consumers(BM));  // 1 and 2 are of `store_halves`
        if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(g.written) : "memory");
    }
#endif
}

template <int BM, int BN>
int start_inputs(Inputs& g, int blocks, int overlap, cudaStream_t stream) {
    constexpr int ROOM = MULTIPROCESSOR_BYTES - OTHER_BYTES;
    static const cudaError_t prepared =
        cudaFuncSetAttribute(inputs<BM, BN>, cudaFuncAttributeMaxDynamicSharedMemorySize, ROOM);
    if (prepared) return prepared;
    const int bytes = 1024 + g.stages * stage_bytes(BM, BN) + BM / 64 * SPACE;
    if (bytes > ROOM) return cudaErrorInvalidValue;
    return start(inputs<BM, BN>, {unsigned(blocks), unsigned(threads(BM)), stream, overlap, 1, bytes}, g);
}

// One of the matrices that lie after one another, [count, rows, width], in boxes of `high` rows.
int describe_planes(CUtensorMap* map, const void* first, int width, int rows, int count, int high) {
    const uint64_t sizes[] = {uint64_t(width), uint64_t(rows), uint64_t(count)};
    const uint64_t strides[] = {uint64_t(width) * 2, uint64_t(width) * 2 * rows};
    const uint32_t box[] = {BK, uint32_t(high), 1};
    return describe_tensor(map, first, 3, sizes, strides, box);
}

}  // namespace
}  // namespace rwkv

using namespace rwkv;

// rkv [3, N, M], hidden [N, R] and w_raw, a, v_mix, gate [N, M] from mixed [6, N, C], weight [3, M, C], lora_down [R, C] and
// lora_up: [M, rank] of w, a, v, g one after another. N > 0, C and M multiples of 64.
//   tiled    weight as `rwkv_gemm` has it, or null
//   written  [2], zeros before the first launch
//   height   rows of weights of a tile: 64, 128
//   tile     tokens of a tile: 32, 64, 128; where `height` is 128, also 160, 256
//   blocks   thread blocks; no more are started than there are tiles
RWKV_EXPORT int rwkv_inputs(const void* mixed, const void* weight, const void* tiled, const void* lora_down, const void* lora_up,
                            const void* w0, const void* a0, const void* v0, void* rkv, void* hidden, void* w_raw, void* a,
                            void* v_mix, void* gate, void* written, int num_tokens, int width, int rows, int rank_w, int rank_a,
                            int rank_v, int rank_g, int height, int tile, int stages, int blocks, int overlap, void* stream) {
    if (num_tokens < 1 || width % BK || rows % 64 || stages < 2 || stages > MAX_STAGES || (height != 64 && height != 128))
        return cudaErrorInvalidValue;
    if (tile != 32 && tile != 64 && tile != 128 && (height == 64 || (tile != 160 && tile != 256))) return cudaErrorInvalidValue;
    const LoraRanks ranks{rank_w, rank_a, rank_v, rank_g};
    const auto* const in = static_cast<const __half*>(mixed);
    const auto* const down = static_cast<const __half*>(lora_down);
    Inputs g;
    for (Products& each : g.of) each.num_tokens = num_tokens;
    add_lora_down(g.of[DOWN], in, down, static_cast<__half*>(hidden), width, ranks, height);
    for (int i = 0; i < 3; i++)
        g.of[RKV].add({nullptr, nullptr, nullptr, static_cast<__half*>(rkv) + int64_t(i) * num_tokens * rows, width, rows, rows, width,
                       NONE, false},
                      height);
    add_lora_up(g.of[UP], static_cast<const __half*>(hidden), static_cast<const __half*>(lora_up), {w0, a0, v0},
                {w_raw, a, v_mix, gate}, rows, ranks, height);
    g.tiled = static_cast<const char*>(tiled), g.written = static_cast<unsigned*>(written);
    g.token_tiles = (num_tokens + tile - 1) / tile, g.k_steps = width / BK, g.stages = stages;
    int all = 0;
    for (const Products& each : g.of) all += each.tiles * g.token_tiles;
    if (blocks < 1) return cudaErrorInvalidValue;
    blocks = std::min(blocks, all);
    g.waiting = LOADERS * std::min(blocks, g.of[UP].tiles * g.token_tiles);

    int error = describe_planes(&g.mixed, mixed, width, num_tokens, PLANES, tile);
    if (!error) error = describe_planes(&g.rkv, weight, width, rows, 3, height);
    if (!error) error = describe_planes(&g.down, lora_down, width, ranks.total(), 1, height);
    for (int i = 0; i < g.of[DOWN].count; i++) {
        const Product& p = g.of[DOWN].item[i];
        g.plane[i] = int((p.x - in) / (int64_t(num_tokens) * width)), g.first_row[i] = int((p.weight - down) / width);
    }
    for (int i = 0; i < g.of[UP].count && !error; i++) {
        const Product& p = g.of[UP].item[i];
        error = describe_rows(&g.up[i], p.weight, p.width, p.rows, p.width, height);
        if (!error) error = describe_rows(&g.hidden[i], p.x, p.width, num_tokens, p.x_stride, tile);
    }
    if (error) return error;
    const auto to = cudaStream_t(stream);
    switch (height * 1000 + tile) {
        case 64032: return start_inputs<64, 32>(g, blocks, overlap, to);
        case 64064: return start_inputs<64, 64>(g, blocks, overlap, to);
        case 64128: return start_inputs<64, 128>(g, blocks, overlap, to);
        case 128032: return start_inputs<128, 32>(g, blocks, overlap, to);
        case 128064: return start_inputs<128, 64>(g, blocks, overlap, to);
        case 128128: return start_inputs<128, 128>(g, blocks, overlap, to);
        case 128160: return start_inputs<128, 160>(g, blocks, overlap, to);
        case 128256: return start_inputs<128, 256>(g, blocks, overlap, to);
    }
    return cudaErrorInvalidValue;
}
