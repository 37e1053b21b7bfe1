// The matrix products that no library does well: of few tokens, and with LoRA pairs. Those of sparse tokens: sparse_ffn.cu.
//
// All products are out[n, j] = activation(bias[j] + sum_k x[n, k] weight[j, k]) with fp16 operands and fp32 sums, several
// matrices to a launch. Sums have a fixed order that depends on the shapes alone, so a token's result depends neither on the
// other tokens nor on its place; up to 16 tokens it does not depend on their number either.
//
//   stream_weights  up to 16 tokens, K up to 4096 (Hopper): bulk copies of weights keep the memory busy at all times
//   few_ranks       up to 16 tokens, K up to 512
//   many_tokens     more than 16 tokens (Hopper); LoRA pairs of many more: grouped.cu
//   few_tokens      all other cases
//
// Split sums are put together inside a cluster of blocks, in the order of their ranks. Devices without clusters do not split.
// Programmatic dependent launch: weights are fetched before griddepcontrol.wait, all else is touched after it.

#include "hopper.cuh"
#include "products.cuh"

namespace rwkv {
namespace {

constexpr int ROWS = 8;    // of the weights, to a tile of the kernels for few tokens
constexpr int STEP = 32;   // values of k that four lanes read with one 16-byte load each
constexpr int WARPS = 8;   // that multiply, to a block of these kernels
constexpr int MAX_FEW = 16;  // tokens

constexpr int DEPTH = 8;  // loads that a lane keeps in flight

// 8 * HALVES tokens to a block. SPLIT warps share the K of a tile of 8 rows of weights; a block has 8 / SPLIT tiles at a time.
//
// A lane's 16 bytes are eight values of k of one row; the fragments of two mma take four each. That permutes k, the same way
// for x and weights. The loads run DEPTH steps ahead of their use, across the borders of tiles.
template <int HALVES, int SPLIT>
__global__ __launch_bounds__(WARPS * LANES, 3) void few_tokens(const __grid_constant__ Products all) {
    static_assert(SPLIT == 1 || SPLIT == WARPS);
    __shared__ float2 parts[2][WARPS][HALVES][LANES];
    release_next();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int group = lane / 4, quarter = lane % 4;
    const int token = blockIdx.y * 8 * HALVES + group;
    const int own = SPLIT == 1 ? 0 : warp * STEP;  // where this warp's part of a step begins
    const int first = SPLIT == 1 ? blockIdx.x * WARPS + warp : blockIdx.x;
    const int stride = SPLIT == 1 ? gridDim.x * WARPS : gridDim.x;

    int ahead = first, ahead_k = own, ahead_width = 0;
    const __half* ahead_row = nullptr;
    auto aim = [&] {
        if (ahead >= all.tiles) return;
        const int i = all.of(ahead);
        const Product& p = all.item[i];
        const int row = min((ahead - all.first_tile[i]) * ROWS + group, p.rows - 1);
        ahead_row = p.weight + int64_t(row) * p.width + 8 * quarter;
        ahead_width = p.width;
        ahead_k = own;
    };
    auto fetch = [&] {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (ahead >= all.tiles) return v;
        if (ahead_k < ahead_width) v = load_weights(ahead_row + ahead_k);
        ahead_k += SPLIT * STEP;
        if (ahead_k - own >= ahead_width) {
            ahead += stride;
            aim();
        }
        return v;
    };

    uint4 w[DEPTH];
    aim();
#pragma unroll
    for (int d = 0; d < DEPTH; d++) w[d] = fetch();
    wait_for_previous();

    float sum[4] = {};
    int flip = 0;
    int tile = first, k = own;
    const Product* p = nullptr;
    int first_row = 0;
    const __half* x[HALVES];
    auto enter = [&] {
        if (tile >= all.tiles) return;
        const int i = all.of(tile);
        p = &all.item[i];
        first_row = (tile - all.first_tile[i]) * ROWS;
#pragma unroll
        for (int h = 0; h < HALVES; h++) x[h] = p->x + int64_t(token + 8 * h) * p->x_stride + 8 * quarter;
    };
    enter();
    while (tile < all.tiles) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (tile >= all.tiles) break;
            if (k < p->width) {
                uint4 a[2] = {};
#pragma unroll
                for (int h = 0; h < HALVES; h++)
                    if (token + 8 * h < all.num_tokens) a[h] = *reinterpret_cast<const uint4*>(x[h] + k);
                mma(sum, a[0].x, a[1].x, a[0].y, a[1].y, w[d].x, w[d].y);
                mma(sum, a[0].z, a[1].z, a[0].w, a[1].w, w[d].z, w[d].w);
            }
            w[d] = fetch();
            k += SPLIT * STEP;
            if (k - own < p->width) continue;

            const int row = first_row + 2 * quarter;
            if constexpr (SPLIT == 1) {
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    float v[2] = {sum[2 * h] + bias_of(*p, row), sum[2 * h + 1] + bias_of(*p, row + 1)};
                    if (token + 8 * h < all.num_tokens) store<2>(*p, token + 8 * h, row, v);
                }
            } else {
#pragma unroll
                for (int h = 0; h < HALVES; h++) parts[flip][warp][h][lane] = make_float2(sum[2 * h], sum[2 * h + 1]);
                __syncthreads();
                if (warp < HALVES && token + 8 * warp < all.num_tokens) {
                    float v[2] = {};  // products that many warps share have no bias
#pragma unroll
                    for (int s = 0; s < SPLIT; s++) {
                        const float2 part = parts[flip][s][warp][lane];
                        v[0] += part.x, v[1] += part.y;
                    }
                    store<2>(*p, token + 8 * warp, row, v);
                }
                flip ^= 1;
            }
            sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
            k = own;
            tile += stride;
            enter();
        }
    }
}

// Products with short sums: a warp has a whole tile of 8 rows and asks for all its weights at once; a block's 8 tiles are of one
// product and share its x.
constexpr int MAX_RANK_STEPS = 16;
constexpr int RANK_PITCH = MAX_RANK_STEPS * STEP + 32;  // halves between tokens: fragments then meet no bank twice

template <int HALVES>
__global__ __launch_bounds__(WARPS * LANES) void few_ranks(const __grid_constant__ Products all) {
    constexpr int TOKENS = 8 * HALVES, THREADS = WARPS * LANES / TOKENS;  // to a token, that fetch it
    __shared__ __align__(16) __half staged[TOKENS][RANK_PITCH];
    release_next();
    const int lane = threadIdx.x % LANES, group = lane / 4, quarter = lane % 4;
    const int i = all.of(blockIdx.x);
    const Product& p = all.item[i];
    const int first_row = (blockIdx.x - all.first_tile[i]) * ROWS * WARPS + threadIdx.x / LANES * ROWS, width = p.width;
    const __half* row = p.weight + int64_t(min(first_row + group, p.rows - 1)) * width + 8 * quarter;
    uint4 w[MAX_RANK_STEPS];
#pragma unroll
    for (int s = 0; s < MAX_RANK_STEPS; s++) w[s] = load_weights_if(row + s * STEP, s * STEP < width);
    const int out_row = first_row + 2 * quarter;
    const float bias[2] = {bias_of(p, out_row), bias_of(p, out_row + 1)};
    wait_for_previous();
    const int token = threadIdx.x / THREADS;
    uint4 x[MAX_RANK_STEPS * STEP / 8 / THREADS];
#pragma unroll
    for (int j = 0; j < MAX_RANK_STEPS * STEP / 8 / THREADS; j++) {
        const int k = (j * THREADS + threadIdx.x % THREADS) * 8;
        x[j] = make_uint4(0, 0, 0, 0);
        if (token < all.num_tokens && k < width) x[j] = *reinterpret_cast<const uint4*>(p.x + int64_t(token) * p.x_stride + k);
    }
#pragma unroll
    for (int j = 0; j < MAX_RANK_STEPS * STEP / 8 / THREADS; j++)
        *reinterpret_cast<uint4*>(&staged[token][(j * THREADS + threadIdx.x % THREADS) * 8]) = x[j];
    __syncthreads();
    float sum[4] = {};
#pragma unroll
    for (int s = 0; s < MAX_RANK_STEPS; s++) {
        if (s * STEP >= width) break;
        uint4 a[2] = {};
#pragma unroll
        for (int h = 0; h < HALVES; h++) a[h] = *reinterpret_cast<const uint4*>(&staged[group + 8 * h][s * STEP + 8 * quarter]);
        mma(sum, a[0].x, a[1].x, a[0].y, a[1].y, w[s].x, w[s].y);
        mma(sum, a[0].z, a[1].z, a[0].w, a[1].w, w[s].z, w[s].w);
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        float v[2] = {sum[2 * h] + bias[0], sum[2 * h + 1] + bias[1]};
        if (group + 8 * h < all.num_tokens) store<2>(p, group + 8 * h, out_row, v);
    }
}

// One block a multiprocessor, every one with its share of the tiles of 8 rows. A warp copies the rows into a ring of stages;
// the others share each stage's k, keep their part of x in registers, and add up their sums at a tile's end.
constexpr int PIECE = 1024;                       // values of k to a stage
constexpr int PITCH = PIECE * 2 + 64;             // bytes between its rows: fragments then meet no bank twice
constexpr int PIECES = 4;                         // to a tile, at most
constexpr int STAGE_BYTES = ROWS * PITCH;

template <int HALVES, int STAGES>
__global__ __launch_bounds__((WARPS + 1) * LANES, HALVES == 1 && STAGES * STAGE_BYTES < 110000 ? 2 : 1)  //
    void stream_weights(const __grid_constant__ Products all) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ float2 parts[2][WARPS][HALVES][LANES];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    release_next();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, group = lane / 4, quarter = lane % 4;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) init_barrier(full + s, 1), init_barrier(empty + s, WARPS);
        publish_barriers();
    }
    __syncthreads();
    const int first = blockIdx.x * all.tiles / gridDim.x, last = (blockIdx.x + 1) * all.tiles / gridDim.x;
    int stage = 0, parity = 0;
    auto advance = [&] {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    };

    if (warp == WARPS) {
        for (int tile = first; tile < last; tile++) {
            const int i = all.of(tile), width = all.item[i].width;
            const int row = min((tile - all.first_tile[i]) * ROWS + lane % ROWS, all.item[i].rows - 1);
            const __half* from = all.item[i].weight + int64_t(row) * width;
            for (int k = 0; k < width; k += PIECE) {
                const int bytes = min(PIECE, width - k) * 2;
                wait(empty + stage, parity ^ 1);
                if (lane == 0) expect_bytes(full + stage, bytes * ROWS);
                __syncwarp();
                if (lane < ROWS) copy_row(ring + (stage * ROWS + lane) * PITCH, from + k, bytes, full + stage);
                advance();
            }
        }
        wait_for_previous();
        return;
    }
    wait_for_previous();
    uint4 a[4 * PIECES][2] = {};  // x of this lane: k = 256 s + 32 warp + 8 quarter and seven more
    int loaded = -1, flip = 0;
    for (int tile = first; tile < last; tile++) {
        const int i = all.of(tile);
        const Product& p = all.item[i];
        const int width = p.width;
        if (i != loaded) {
            loaded = i;
#pragma unroll
            for (int s = 0; s < 4 * PIECES; s++)
#pragma unroll
                for (int h = 0; h < HALVES; h++)
                    if (group + 8 * h < all.num_tokens && s * WARPS * STEP + warp * STEP < width)
                        a[s][h] = *reinterpret_cast<const uint4*>(p.x + int64_t(group + 8 * h) * p.x_stride + s * WARPS * STEP +
                                                                  warp * STEP + 8 * quarter);
        }
        float sum[4] = {};
#pragma unroll
        for (int c = 0; c < PIECES; c++) {
            if (c * PIECE >= width) break;
            wait(full + stage, parity);
            const uint8_t* rows = ring + (stage * ROWS + group) * PITCH + (warp * STEP + 8 * quarter) * 2;
#pragma unroll
            for (int s = 4 * c; s < 4 * c + 4; s++) {
                if (s * WARPS * STEP + warp * STEP >= width) break;
                const uint4 w = *reinterpret_cast<const uint4*>(rows + s % 4 * WARPS * STEP * 2);
                mma(sum, a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y, w.x, w.y);
                mma(sum, a[s][0].z, a[s][1].z, a[s][0].w, a[s][1].w, w.z, w.w);
            }
            __syncwarp();
            if (lane == 0) arrive(empty + stage);
            advance();
        }
#pragma unroll
        for (int h = 0; h < HALVES; h++) parts[flip][warp][h][lane] = make_float2(sum[2 * h], sum[2 * h + 1]);
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * LANES) : "memory");
        // Another warp in turn finishes the tile while the rest go on.
        const int half = (warp - (tile - first) * HALVES) & (WARPS - 1);
        if (half < HALVES && group + 8 * half < all.num_tokens) {
            float v[2] = {};
#pragma unroll
            for (int s = 0; s < WARPS; s++) v[0] += parts[flip][s][half][lane].x, v[1] += parts[flip][s][half][lane].y;
            store<2>(p, group + 8 * half, (tile - all.first_tile[i]) * ROWS + 2 * quarter, v);
        }
        flip ^= 1;
    }
#endif
}

constexpr int SLICE = 64;  // values of k to a stage: 128 bytes, the width of a swizzled row

// A tile of 64 * HIGH * GROUPS tokens by TILE_ROWS rows of weights; `splits` blocks, a cluster, share its K. Each of GROUPS
// warpgroups has 64 * HIGH tokens. Rows of weights are dealt out in shared memory so that a lane ends up with 8 neighbouring ones.
template <int GROUPS, int HIGH, int TILE_ROWS, int STAGES>
struct Many {
    static constexpr int THREADS = GROUPS * 128, TOKENS = GROUPS * HIGH * 64;
    static constexpr int STAGE_BYTES = (TOKENS + TILE_ROWS) * SLICE * 2;
    static constexpr int BYTES = 1024 + STAGES * STAGE_BYTES;
    static constexpr int SUM_PITCH = TILE_ROWS + 4;                 // four floats on, so that tokens' sums lie in other banks
    static_assert(STAGES * STAGE_BYTES >= TOKENS * SUM_PITCH * 4);  // the sums come there at the end
};

template <int GROUPS, int HIGH, int TILE_ROWS, int STAGES>
__global__ __launch_bounds__(GROUPS * 128) void many_tokens(const __grid_constant__ Products all, int splits) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Shape = Many<GROUPS, HIGH, TILE_ROWS, STAGES>;
    constexpr int THREADS = Shape::THREADS, TOKENS = Shape::TOKENS, STAGE_BYTES = Shape::STAGE_BYTES, AHEAD = STAGES - 1;
    extern __shared__ uint8_t unaligned[];
    __shared__ float bias[TILE_ROWS];
    release_next();
    const uint32_t base = (shared_address(unaligned) + 1023) / 1024 * 1024;  // where the swizzle repeats
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int tile = blockIdx.x / splits, rank = blockIdx.x % splits, item = all.of(tile);
    const Product& p = all.item[item];
    const int first_row = (tile - all.first_tile[item]) * TILE_ROWS, first_token = blockIdx.y * TOKENS;
    const int slices = (p.width + SLICE - 1) / SLICE, begin = rank * slices / splits, end = (rank + 1) * slices / splits;

    auto copy = [](uint32_t to, const __half* from, bool inside) {  // zeros outside
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0));
    };
    // Every thread copies the same 8 values of k of several rows.
    constexpr int STRIDE = THREADS / 8;
    const int copy_k = threadIdx.x % 8 * 8;
    const __half* x_rows[TOKENS / STRIDE];
    const __half* weight_rows[TILE_ROWS / STRIDE];
#pragma unroll
    for (int i = 0; i < TOKENS / STRIDE; i++) {
        const int token = min(first_token + int(threadIdx.x) / 8 + i * STRIDE, all.num_tokens - 1);
        x_rows[i] = p.x + int64_t(token) * p.x_stride;
    }
#pragma unroll
    for (int i = 0; i < TILE_ROWS / STRIDE; i++) {
        const int at = threadIdx.x / 8 + i * STRIDE, row = at / 32 * 32 + at % 8 / 2 * 8 + at % 32 / 8 * 2 + at % 2;
        weight_rows[i] = p.weight + int64_t(min(first_row + row, p.rows - 1)) * p.width;
    }
    const uint32_t first_chunk = base + threadIdx.x / 8 * 128 + (threadIdx.x % 8 ^ threadIdx.x / 8 % 8) * 16;
    auto load_x = [&](int slice) {
        if (slice >= end) return;
        const int k = slice * SLICE + copy_k;
        const uint32_t to = first_chunk + (slice - begin) % STAGES * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < TOKENS / STRIDE; i++) copy(to + i * STRIDE * 128, x_rows[i] + (k < p.width ? k : 0), k < p.width);
    };
    auto load_weight = [&](int slice) {
        if (slice >= end) return;
        const int k = slice * SLICE + copy_k;
        const uint32_t to = first_chunk + (slice - begin) % STAGES * STAGE_BYTES + TOKENS * 128;
#pragma unroll
        for (int i = 0; i < TILE_ROWS / STRIDE; i++)
            copy(to + i * STRIDE * 128, weight_rows[i] + (k < p.width ? k : 0), k < p.width);
    };

#pragma unroll
    for (int s = 0; s < AHEAD; s++) load_weight(begin + s);
    const float own_bias = threadIdx.x < TILE_ROWS ? bias_of(p, first_row + threadIdx.x) : 0.f;
    wait_for_previous();
#pragma unroll
    for (int s = 0; s < AHEAD; s++) {
        load_x(begin + s);
        asm volatile("cp.async.commit_group;");
    }
    if (threadIdx.x < TILE_ROWS) bias[threadIdx.x] = own_bias;
    float sum[HIGH][TILE_ROWS / 2] = {};
    for (int slice = begin; slice < end; slice++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1));
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncthreads();  // this slice has arrived for all, and all have finished with the stage to fill
        load_weight(slice + AHEAD);
        load_x(slice + AHEAD);
        asm volatile("cp.async.commit_group;");
        const uint32_t stage = base + (slice - begin) % STAGES * STAGE_BYTES;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < SLICE / 16; k++)
#pragma unroll
            for (int i = 0; i < HIGH; i++)
                Wgmma<TILE_ROWS, false>::multiply(
                    sum[i], describe(stage + (warp / 4 * HIGH + i) * 64 * 128 + k * 32), describe(stage + TOKENS * 128 + k * 32), 1
                );
        wgmma_commit();
        wgmma_wait<0>();
    }

    // The sums go through shared memory, which now is free, so that neighbouring threads write neighbouring rows.
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    constexpr int PITCH = Shape::SUM_PITCH, QUADS = TILE_ROWS / 4;
    float* const sums = reinterpret_cast<float*>(unaligned + (base - shared_address(unaligned)));  // [TOKENS, PITCH]
#pragma unroll
    for (int i = 0; i < HIGH; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int b = 0; b < TILE_ROWS / 32; b++) {
                const int token = (warp / 4 * HIGH + i) * 64 + warp % 4 * 16 + 8 * h + lane / 4;
                float4* to = reinterpret_cast<float4*>(sums + token * PITCH + b * 32 + lane % 4 * 8);
                const float* from = sum[i] + b * 16 + h * 2;
                to[0] = make_float4(from[0], from[1], from[4], from[5]);
                to[1] = make_float4(from[8], from[9], from[12], from[13]);
            }
    const auto meet = [] { __cluster_barrier_arrive(), __cluster_barrier_wait(); };
    if (splits > 1) meet();
    else __syncthreads();
    const int each = TOKENS * QUADS / splits;
#pragma unroll 2
    for (int unit = rank * each + threadIdx.x; unit < (rank + 1) * each; unit += THREADS) {
        const int token = unit / QUADS, at = unit % QUADS * 4;
        if (first_token + token >= all.num_tokens || first_row + at >= p.rows) continue;
        float4* const own = reinterpret_cast<float4*>(sums + token * PITCH + at);
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        if (splits == 1) total = *own;
        else {
            float4 parts[CLUSTER];
#pragma unroll
            for (int s = 0; s < CLUSTER; s++)
                if (s < splits) parts[s] = *static_cast<float4*>(__cluster_map_shared_rank(own, s));
#pragma unroll
            for (int s = 0; s < CLUSTER; s++)
                if (s < splits) total.x += parts[s].x, total.y += parts[s].y, total.z += parts[s].z, total.w += parts[s].w;
        }
        float v[4] = {total.x + bias[at], total.y + bias[at + 1], total.z + bias[at + 2], total.w + bias[at + 3]};
        store<4>(p, first_token + token, first_row + at, v);
    }
    if (splits > 1) meet();  // the others' shared memory stays until all have read it
#endif
}

__global__ void relu_square(__half* hidden, int eights) {
    release_next();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= eights) return;
    float v[8];
    load8(hidden + 8 * int64_t(i), v);
    alignas(16) __half result[8];
#pragma unroll
    for (int j = 0; j < 8; j++) result[j] = __float2half_rn(activate(RELU_SQUARE, v[j]));
    reinterpret_cast<uint4*>(hidden)[i] = *reinterpret_cast<uint4*>(result);
}

template <int SPLIT>
int start_few(const Products& all, int overlap, void* stream) {
    const unsigned blocks = SPLIT == 1 ? (all.tiles + WARPS - 1) / WARPS : all.tiles, portion = all.num_tokens <= 8 ? 8 : 16;
    const dim3 grid(min(blocks, 3u * device().processors), (all.num_tokens + portion - 1) / portion);
    auto kernel = portion == 8 ? few_tokens<1, SPLIT> : few_tokens<2, SPLIT>;
    return start(kernel, {grid, WARPS * LANES, cudaStream_t(stream), overlap}, all);
}

template <int HALVES, int STAGES>
int start_ring(const Products& all, int overlap, void* stream) {
    auto kernel = stream_weights<HALVES, STAGES>;
    constexpr int BYTES = STAGES * STAGE_BYTES;
    static const cudaError_t prepared = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (prepared) return prepared;
    const unsigned blocks = min(all.tiles, device().processors);
    return start(kernel, {blocks, (WARPS + 1) * LANES, cudaStream_t(stream), overlap, 1, BYTES}, all);
}

// Products of at most 16 tokens.
int start_stream(const Products& all, int overlap, void* stream) {
    int longest = 0;
    for (int i = 0; i < all.count; i++) longest = max(longest, all.item[i].width);
    if (!device().hopper || longest > PIECES * PIECE) return start_few<WARPS>(all, overlap, stream);
    return all.num_tokens <= 8 ? start_ring<1, 4>(all, overlap, stream) : start_ring<2, 4>(all, overlap, stream);
}

template <int GROUPS, int HIGH, int TILE_ROWS, int STAGES>
int start_many(const Products& all, int splits, int overlap, void* stream) {
    using Shape = Many<GROUPS, HIGH, TILE_ROWS, STAGES>;
    auto kernel = many_tokens<GROUPS, HIGH, TILE_ROWS, STAGES>;
    static const cudaError_t prepared =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::BYTES);
    if (prepared) return prepared;
    const dim3 grid(all.tiles * splits, (all.num_tokens + Shape::TOKENS - 1) / Shape::TOKENS);
    return start(kernel, {grid, Shape::THREADS, cudaStream_t(stream), overlap, splits, Shape::BYTES}, all, splits);
}

constexpr int SMALL_DOWN = 128, SMALL_UP = 256;  // tokens up to which products with lora_down and lora_up have tiles of 64 rows

// Rows of weights to a tile of the kernel that a number of tokens gets.
int tile_rows(int num_tokens, int small) {
    return num_tokens <= MAX_FEW || !device().hopper ? ROWS : num_tokens <= small ? 64 : 128;
}

// How many blocks share the K of a tile with lora_down.
int lora_down_splits(int num_tokens) { return num_tokens <= 512 ? 8 : num_tokens <= 1024 ? 4 : num_tokens <= 2048 ? 2 : 1; }

}  // namespace
}  // namespace rwkv

using namespace rwkv;

// out [P, N, M] = x [P, N, K] weight [P, M, K]^T, N <= 16.
RWKV_EXPORT int rwkv_gemv(const void* x, const void* weight, void* out, int problems, int num_tokens, int rows, int width,
                          int activation, int overlap, void* stream) {
    if (num_tokens > MAX_FEW || problems > MAX_PRODUCTS || width % STEP) return cudaErrorInvalidValue;
    Products all;
    all.num_tokens = num_tokens;
    for (int64_t i = 0; i < problems; i++)
        all.add({static_cast<const __half*>(x) + i * num_tokens * width, static_cast<const __half*>(weight) + i * rows * width,
                 nullptr, static_cast<__half*>(out) + i * num_tokens * rows, width, rows, rows, width, activation, false},
                ROWS);
    return start_stream(all, overlap, stream);
}

// hidden [N, R] from mixed [6, N, C] and lora_down [R, C]. tile, splits, blocks: of `start_grouped`; without a tile, as is best
// for few tokens.
RWKV_EXPORT int rwkv_lora_down(const void* mixed, const void* lora_down, void* hidden, int num_tokens, int width, int rank_w,
                               int rank_a, int rank_v, int rank_g, int tile, int splits, int blocks, int overlap,
                               void* stream) {
    Products all;
    all.num_tokens = num_tokens;
    add_lora_down(all, static_cast<const __half*>(mixed), static_cast<const __half*>(lora_down), static_cast<__half*>(hidden),
                  width, {rank_w, rank_a, rank_v, rank_g}, tile ? GROUPED_ROWS : tile_rows(num_tokens, SMALL_DOWN));
    if (tile) return start_grouped(all, tile, splits, blocks, overlap, stream);
    if (num_tokens <= MAX_FEW) return start_stream(all, overlap, stream);
    if (!device().hopper) return start_few<WARPS>(all, overlap, stream);
    splits = lora_down_splits(num_tokens);
    if (num_tokens <= 64) return start_many<1, 1, 64, 8>(all, splits, overlap, stream);
    if (num_tokens <= SMALL_DOWN) return start_many<2, 1, 64, 4>(all, splits, overlap, stream);
    return start_many<2, 1, 128, 3>(all, splits, overlap, stream);
}

// rkv [3, N, C] and hidden [N, R] in one launch, N <= 16: mixed [6, N, C], weight [3, C, C], lora_down [R, C].
RWKV_EXPORT int rwkv_project(const void* mixed, const void* weight, const void* lora_down, void* rkv, void* hidden, int num_tokens,
                             int width, int rank_w, int rank_a, int rank_v, int rank_g, int overlap, void* stream) {
    if (num_tokens > MAX_FEW) return cudaErrorInvalidValue;
    Products all;
    all.num_tokens = num_tokens;
    for (int64_t i = 0; i < 3; i++)
        all.add({static_cast<const __half*>(mixed) + i * num_tokens * width, static_cast<const __half*>(weight) + i * width * width,
                 nullptr, static_cast<__half*>(rkv) + i * num_tokens * width, width, width, width, width, NONE, false},
                ROWS);
    add_lora_down(all, static_cast<const __half*>(mixed), static_cast<const __half*>(lora_down), static_cast<__half*>(hidden),
                  width, {rank_w, rank_a, rank_v, rank_g}, ROWS);
    return start_stream(all, overlap, stream);
}

// w_raw, a, v_mix, gate [N, C] from hidden [N, R]; lora_up holds [C, rank] of w, a, v, g one after another. tile, blocks: as
// above.
RWKV_EXPORT int rwkv_lora_up(const void* hidden, const void* lora_up, const void* w0, const void* a0, const void* v0,
                             void* w_raw, void* a, void* v_mix, void* gate, int num_tokens, int width, int rank_w,
                             int rank_a, int rank_v, int rank_g, int tile, int blocks, int overlap, void* stream) {
    const int longest = max(max(rank_w, rank_a), max(rank_v, rank_g));
    const bool short_sums = num_tokens <= MAX_FEW && longest <= MAX_RANK_STEPS * STEP;
    Products all;
    all.num_tokens = num_tokens;
    add_lora_up(all, static_cast<const __half*>(hidden), static_cast<const __half*>(lora_up), {w0, a0, v0},
                {w_raw, a, v_mix, gate}, width, {rank_w, rank_a, rank_v, rank_g},
                tile ? GROUPED_ROWS : short_sums ? ROWS * WARPS : tile_rows(num_tokens, SMALL_UP));
    if (tile) return start_grouped(all, tile, 1, blocks, overlap, stream);
    if (short_sums)
        return start(num_tokens <= 8 ? few_ranks<1> : few_ranks<2>,
                     {unsigned(all.tiles), WARPS * LANES, cudaStream_t(stream), overlap}, all);
    if (num_tokens <= MAX_FEW || !device().hopper) return start_few<1>(all, overlap, stream);
    if (num_tokens <= 64) return start_many<1, 1, 64, 4>(all, 1, overlap, stream);
    if (num_tokens <= SMALL_UP) return start_many<2, 1, 64, 4>(all, 1, overlap, stream);
    return start_many<2, 1, 128, 3>(all, 1, overlap, stream);
}

// In place on 8 * eights values.
RWKV_EXPORT int rwkv_relu_square(void* hidden, int eights, int overlap, void* stream) {
    const unsigned blocks = (eights + 255) / 256;
    return start(relu_square, {blocks, 256, cudaStream_t(stream), overlap}, static_cast<__half*>(hidden), eights);
}
