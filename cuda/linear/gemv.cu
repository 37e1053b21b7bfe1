// The matrix products that no library does well: of few tokens, and with LoRA pairs. Those of sparse tokens: sparse_ffn.cu.
//
// All products are out[n, j] = activation(bias[j] + sum_k x[n, k] weight[j, k]) with fp16 operands and fp32 sums, several
// matrices to a launch. Sums have a fixed order that depends on the shapes alone, so a token's result depends neither on the
// other tokens nor on its place; up to 16 tokens it does not depend on their number either.
//
//   stream_weights  up to 16 tokens, K up to 4096 (Hopper): bulk copies of weights keep the memory busy at all times
//   few_ranks       up to 16 tokens, K up to 512
//   few_tokens      all other cases; LoRA pairs of more than 16 tokens on Hopper: grouped.cu
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

// As load_weights_if, but not a load of constants, which the compiler would move behind the wait for previous kernels.
__device__ __forceinline__ uint4 load_ahead_if(const __half* p, bool wanted) {
    uint4 v;
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n"
        "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
        "@wanted ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(p), "r"(int(wanted))
        : "memory");
    return v;
}

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
    for (int s = 0; s < MAX_RANK_STEPS; s++) w[s] = load_ahead_if(row + s * STEP, s * STEP < width);
    const int out_row = first_row + 2 * quarter;
    const float bias[2] = {bias_of(p, out_row), bias_of(p, out_row + 1)};
    const int token = threadIdx.x / THREADS;
    const __half* const own = p.x + int64_t(token) * p.x_stride + threadIdx.x % THREADS * 8;
    wait_for_previous_knowing(own, out_row);
    uint4 x[MAX_RANK_STEPS * STEP / 8 / THREADS];
#pragma unroll
    for (int j = 0; j < MAX_RANK_STEPS * STEP / 8 / THREADS; j++) {
        const int k = (j * THREADS + threadIdx.x % THREADS) * 8;
        x[j] = make_uint4(0, 0, 0, 0);
        if (token < all.num_tokens && k < width) x[j] = *reinterpret_cast<const uint4*>(own + j * THREADS * 8);
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
    // x of this lane: k = 256 s + 32 warp + 8 quarter and seven more; lanes without a token have the last one's.
    uint4 a[4 * PIECES][2];
#pragma unroll
    for (int s = 0; s < 4 * PIECES; s++) a[s][1] = make_uint4(0, 0, 0, 0);
    int loaded = -1, flip = 0;
    for (int tile = first; tile < last; tile++) {
        const int i = all.of(tile);
        const Product& p = all.item[i];
        const int width = p.width;
        if (i != loaded) {
            loaded = i;
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                const int token = min(group + 8 * h, all.num_tokens - 1);
                const __half* const x = p.x + int64_t(token) * p.x_stride + warp * STEP + 8 * quarter;
#pragma unroll
                for (int s = 0; s < 4 * PIECES; s++)
                    if (s * WARPS * STEP + warp * STEP < width) a[s][h] = *reinterpret_cast<const uint4*>(x + s * WARPS * STEP);
            }
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
    if (all.num_tokens < 1) return cudaSuccess;  // of a step without logits; lanes without a token read the last one's
    int longest = 0;
    for (int i = 0; i < all.count; i++) longest = max(longest, all.item[i].width);
    if (!device().hopper || longest > PIECES * PIECE) return start_few<WARPS>(all, overlap, stream);
    return all.num_tokens <= 8 ? start_ring<1, 4>(all, overlap, stream) : start_ring<2, 4>(all, overlap, stream);
}

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

// hidden [N, R] from mixed [6, N, C] and lora_down [R, C]. tile, splits, blocks, height: see `GroupedCut`; without a tile, as is
// best for few tokens.
RWKV_EXPORT int rwkv_lora_down(const void* mixed, const void* lora_down, void* hidden, int num_tokens, int width, int rank_w,
                               int rank_a, int rank_v, int rank_g, int tile, int splits, int blocks, int height,
                               int overlap, void* stream) {
    Products all;
    all.num_tokens = num_tokens;
    add_lora_down(all, static_cast<const __half*>(mixed), static_cast<const __half*>(lora_down), static_cast<__half*>(hidden),
                  width, {rank_w, rank_a, rank_v, rank_g}, tile ? height : ROWS);
    if (tile) return start_grouped(all, {tile, splits, blocks, height}, overlap, stream);
    if (num_tokens <= MAX_FEW) return start_stream(all, overlap, stream);
    return start_few<WARPS>(all, overlap, stream);
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

// w_raw, a, v_mix, gate [N, C] from hidden [N, R]; lora_up holds [C, rank] of w, a, v, g one after another. tile and the
// like: as above, splits 1.
RWKV_EXPORT int rwkv_lora_up(const void* hidden, const void* lora_up, const void* w0, const void* a0, const void* v0,
                             void* w_raw, void* a, void* v_mix, void* gate, int num_tokens, int width, int rank_w,
                             int rank_a, int rank_v, int rank_g, int tile, int splits, int blocks, int height,
                             int overlap, void* stream) {
    const int longest = max(max(rank_w, rank_a), max(rank_v, rank_g));
    const bool short_sums = num_tokens <= MAX_FEW && longest <= MAX_RANK_STEPS * STEP;
    Products all;
    all.num_tokens = num_tokens;
    add_lora_up(all, static_cast<const __half*>(hidden), static_cast<const __half*>(lora_up), {w0, a0, v0},
                {w_raw, a, v_mix, gate}, width, {rank_w, rank_a, rank_v, rank_g},
                tile ? height : short_sums ? ROWS * WARPS : ROWS);
    if (tile) return start_grouped(all, {tile, splits, blocks, height}, overlap, stream);
    if (short_sums)
        return start(num_tokens <= 8 ? few_ranks<1> : few_ranks<2>,
                     {unsigned(all.tiles), WARPS * LANES, cudaStream_t(stream), overlap}, all);
    return start_few<1>(all, overlap, stream);
}

// In place on 8 * eights values.
RWKV_EXPORT int rwkv_relu_square(void* hidden, int eights, int overlap, void* stream) {
    const unsigned blocks = (eights + 255) / 256;
    return start(relu_square, {blocks, 256, cudaStream_t(stream), overlap}, static_cast<__half*>(hidden), eights);
}
