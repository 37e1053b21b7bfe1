// out[n, m] = sum over k of W[m, k] x[n, k] for few to many rows n, by Hopper's wgmma with the weights as its 64-high operand.
//
// A tile is BM rows of W by BN rows of x. One warp keeps a ring of shared-memory stages full through the copy engine (TMA,
// 128-byte swizzle), 64 values of k a stage; a warpgroup for every 64 weight rows multiplies and keeps fp32 sums in registers.
// Where there are too few tiles for the device, a cluster of `split` thread blocks shares a tile, each summing a part of k; then
// each gets the others' sums for its part of the rows of x into shared memory and adds them in the order of k. A row's result
// depends on neither its position nor the other rows, nor on how many there are while `split` stays the same.
//
// With programmatic dependent launch the first stages of weights are on their way before the preceding kernel has ended.
#include "hopper.cuh"
#include "lora.cuh"

#include <algorithm>
#include <type_traits>

namespace rwkv {
namespace {

constexpr int BK = 64;  // k of a stage: 128 bytes, the width of a swizzled row
constexpr int PIECE = 64 * BK * 2;  // bytes of 64 weight rows of a stage, which lie together in tiled weights
constexpr int MAX_STAGES = 16;
constexpr int MAX_SPLIT = 8;        // thread blocks of a cluster on every device
constexpr int BAND = 8;             // tiles of rows of x that go with all weights before the next: they stay in the L2 cache
constexpr int MAX_MASKED = 16;      // rows of x of which an active mask is made
constexpr int HALF_PITCH = 64 + 8;  // fp16 row of the staged output of one warpgroup: 16 bytes apart modulo 128

// Weights beside the main ones in the same launch: rows first[i] to first[i + 1] - 1 go with a plane of x of their own.
constexpr int GROUPS = 4;
struct Beside {
    __half* out;            // [N, first[GROUPS]]
    int first[GROUPS + 1];  // multiples of 8
    int tile[GROUPS + 1];   // number of each group's first tile
};
// Of the groups, which are w, a, v, g of the LoRA pairs.
__constant__ const int PLANE[GROUPS] = {3, 4, 2, 5}, ACTIVATION[GROUPS] = {TANH, NONE, NONE, SIGMOID};

struct Shape {
    __half* out;  // [batch, N, M]
    int N, M, k_blocks, m_tiles, n_tiles, batch, split, log_split, stages;
    int first_block, blocks;  // of the thread blocks, those that multiply
    bool transposed;
    const char* tiled;  // W in pieces as they lie in a stage, those of 64 rows after one another: [batch, M / 64, k_blocks]; or null
    int activation;
    uint16_t* active_mask;  // [M / 16] or null: bit i of word w says whether weight row 16 w + i has a result that is not zero
    Beside beside;
    __host__ __device__ int weight_tiles() const { return m_tiles * batch + beside.tile[GROUPS]; }
};

// Thread blocks of wide tiles have a whole loading warpgroup, whose registers the others get; else one warp for each loader.
constexpr int LOADERS = 2;  // threads that ask the copy engine: one alone does not keep the memory busy
__host__ __device__ constexpr int threads(int bm, int bn, int loaders = LOADERS) {
    return bm * 2 + (bn <= 64 ? 32 * loaders : 128);
}
__host__ __device__ constexpr int stage_bytes(int bm, int bn) { return (bm + bn) * BK * 2; }
__host__ __device__ constexpr int epilogue_tokens(int bn) { return bn < 64 ? bn : 64; }
__host__ __device__ constexpr int float_pitch(int bm) { return bm + 4; }  // fp32 row of the partial sums
constexpr int shared_bytes(int bm, int bn, int split, int stages) {
    const int staged = split > 1 ? float_pitch(bm) * 4 : bm / 64 * HALF_PITCH * 2;  // for each row of x
    return 1024 + stages * stage_bytes(bm, bn) + epilogue_tokens(bn) * staged;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// max(a, 0)^2 that fits into fp16; NaN stays.
__device__ __forceinline__ float relu_squared(float a) {
    a = a < 0.f ? 0.f : a * a;
    return a > 65504.f ? 65504.f : a;
}
// Rare, and long: not to be repeated for every sum.
__device__ __noinline__ float curve(float a, int activation) {
    return activation == TANH ? tanhf(a) : __fdividef(1.f, 1.f + __expf(-a));
}
// Two results as fp16.
__device__ __forceinline__ uint32_t finish(float a, float b, int activation) {
    if (activation == RELU_SQUARE) a = relu_squared(a), b = relu_squared(b);
    if (activation > RELU_SQUARE) a = curve(a, activation), b = curve(b, activation);
    const __half2 pair = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(pair);
}

// A thread block's part of the work: every `stride`-th tile from `first`, k blocks k0 to k0 + steps - 1 of each.
struct Work {
    int part, first, stride, tiles, k0, steps;
    __device__ explicit Work(const Shape& p) {
        const int block = blockIdx.x - p.first_block;
        part = block & (p.split - 1);
        first = block >> p.log_split, stride = p.blocks >> p.log_split;
        tiles = p.weight_tiles() * p.n_tiles;
        k0 = part * p.k_blocks >> p.log_split;
        steps = ((part + 1) * p.k_blocks >> p.log_split) - k0;
    }
};
struct Tile {
    int m, n = 0, plane = 0;  // first weight row, first row of x and its plane
    int end, activation;      // of the weights that belong together
    bool beside = false;
    __device__ Tile(int tile, const Shape& p, int bm, int bn) : end(p.M), activation(p.activation) {
        if (p.n_tiles > 1) {
            const int of_band = BAND * p.weight_tiles(), first = tile / of_band * BAND;
            const int breadth = min(BAND, p.n_tiles - first);
            tile %= of_band;
            n = (first + tile % breadth) * bn, tile /= breadth;
        }
        const int others = tile - p.m_tiles * p.batch;
        if (others >= 0) {
            int group = 0;
            while (others >= p.beside.tile[group + 1]) group++;
            m = p.beside.first[group] + (others - p.beside.tile[group]) * bm, end = p.beside.first[group + 1];
            plane = PLANE[group], activation = ACTIVATION[group], beside = true;
            return;
        }
        if (p.batch > 1) plane = tile / p.m_tiles, tile %= p.m_tiles;
        m = tile * bm;
    }
    // Where the results of a row of x begin.
    __device__ __half* out(const Shape& p, int row) const {
        return beside ? p.beside.out + size_t(row) * p.beside.first[GROUPS] : p.out + (size_t(plane) * p.N + row) * p.M;
    }
};

struct Ring {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance(int stages, int by = 1) {  // at most once past the end
        if ((stage += by) >= stages) stage -= stages, parity ^= 1;
    }
};

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES], shown, seen;  // shown: the others' sums are here; seen: were read
};

enum Source : int { STRAIGHT, TRANSPOSED, TILED, BESIDE };  // of weights: [M, K], [K, M], pieces, those beside the main ones

// A loading warp, of which one thread works: every ALL-th stage is its own.
template <int BM, int BN, int ALL>
__device__ __forceinline__ void load(
    const CUtensorMap& w_map, const CUtensorMap& x_map, const CUtensorMap& beside_map, const Shape& p, const Work& work,
    char* stages, Barriers& barriers, int loader
) {
    // Up to 16 rows share the L2 cache with the sparse product (cuda/sparse.cu), which says so of its weights: whole steps were
    // slower on an H200 where all weights were to leave first.
    const uint64_t w_policy = p.n_tiles == 1 && BN > 16 ? READ_ONCE : READ_AGAIN;
    const auto load_w = [&](auto source, int stage, const Tile& tile, int k) {
        constexpr Source SOURCE = decltype(source)::value;
        char* to = stages + stage * stage_bytes(BM, BN);
        if constexpr (SOURCE == TILED) {  // what a tile has beyond the last row stays as it was
            const bool whole = BM == 64 || tile.m + 64 < p.M;
            const char* from = p.tiled + (size_t(tile.plane * p.M + tile.m) / 64 * p.k_blocks + k) * PIECE;
            expect_bytes(&barriers.full[stage], stage_bytes(BM, BN) - (whole ? 0 : PIECE));
            copy_row(to, from, PIECE, &barriers.full[stage], w_policy);
            if (BM > 64 && whole)
                copy_row(to + PIECE, from + size_t(p.k_blocks) * PIECE, PIECE, &barriers.full[stage], w_policy);
            return;
        }
        expect_bytes(&barriers.full[stage], stage_bytes(BM, BN));
        if (SOURCE == BESIDE)
            copy_box(to, beside_map, &barriers.full[stage], w_policy, k * BK, tile.m, 0);
        else if (SOURCE == TRANSPOSED)
            copy_box(to, w_map, &barriers.full[stage], w_policy, 0, k * BK, tile.m / 64, tile.plane);
        else
            copy_box(to, w_map, &barriers.full[stage], w_policy, k * BK, tile.m, tile.plane);
    };
    // Call a function with the source of a tile as a type: loops do not ask about it.
    const auto with_source = [&](const Tile& tile, auto function) {
        if (tile.beside) function(std::integral_constant<Source, BESIDE>());
        else if (p.tiled) function(std::integral_constant<Source, TILED>());
        else if (p.transposed) function(std::integral_constant<Source, TRANSPOSED>());
        else function(std::integral_constant<Source, STRAIGHT>());
    };
    const auto load_x = [&](int stage, const Tile& tile, int k) {
        char* to = stages + stage * stage_bytes(BM, BN) + BM * BK * 2;
        copy_box(to, x_map, &barriers.full[stage], READ_AGAIN, k * BK, tile.n, tile.plane);
    };
    const int early = min(p.stages, work.steps);
    const Tile first(work.first, p, BM, BN);
    if (elected())
        with_source(first, [&](auto source) {
#pragma unroll 1
            for (int i = loader; i < early; i += ALL) load_w(source, i, first, work.k0 + i);
        });
    // The next kernel may ask for its weights when all of this one's are asked for.
    const bool all = early == work.steps && work.first + work.stride >= work.tiles;
    if (all && loader == 0) release_next();
    __syncwarp();
    __syncthreads();
    if (p.split > 1) cluster_wait();
    if (!elected()) return;
    wait_for_previous();
    int i = loader;  // of the tile's steps
    for (; i < early; i += ALL) load_x(i, first, work.k0 + i);

    Ring ring;
    ring.advance(p.stages, i);
    for (int t = work.first; t < work.tiles; t += work.stride, i -= work.steps) {
        const Tile tile(t, p, BM, BN);
        with_source(tile, [&](auto source) {
#pragma unroll 1
            for (; i < work.steps; i += ALL) {
                wait(&barriers.empty[ring.stage], ring.parity ^ 1);
                load_w(source, ring.stage, tile, work.k0 + i);
                load_x(ring.stage, tile, work.k0 + i);
                ring.advance(p.stages, ALL);
            }
        });
    }
    if (!all && loader == 0) release_next();
}

// This warpgroup's number: the first lane's, so that the compiler knows it for the same in all and keeps addresses where wgmma
// wants them.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(0xffffffff, threadIdx.x / 128, 0); }

// One warpgroup's sums of a tile, over this thread block's part of k.
template <int BM, int BN, bool TURNED>
__device__ __forceinline__ void accumulate(
    float (&sums)[BN / 2], const Shape& p, const Work& work, const char* stages, Barriers& barriers, Ring& ring
) {
    const int group = warpgroup();
    auto release = [&](int stage) {
        if (threadIdx.x % 32 == 0) arrive(&barriers.empty[stage]);
    };
    int last = 0;
#pragma unroll 1
    for (int i = 0; i < work.steps; i++) {
        wait(&barriers.full[ring.stage], ring.parity);
        const char* const stage = stages + ring.stage * stage_bytes(BM, BN);
        const uint64_t a = describe(stage + group * 64 * BK * 2), b = describe(stage + BM * BK * 2);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / 16; k++)
            Wgmma<BN, TURNED>::multiply(sums, a + k * (TURNED ? 128 : 2), b + k * 2, i + k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0) release(last);
        last = ring.stage;
        ring.advance(p.stages);
    }
    wgmma_wait<0>();
    release(last);
}

// Write one warpgroup's sums of 64 weight rows as fp16, 64 rows of x at a time through shared memory.
template <int BM, int BN>
__device__ __forceinline__ void store(const float (&sums)[BN / 2], const Shape& p, const Tile& tile, char* space) {
    constexpr int TOKENS = epilogue_tokens(BN);
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    __half* const staged = reinterpret_cast<__half*>(space) + group * TOKENS * HALF_PITCH;
    const int m0 = tile.m + group * 64;
    uint32_t low = 0, high = 0;  // all results of two weight rows, or'ed
#pragma unroll
    for (int n0 = 0; n0 < BN; n0 += TOKENS) {
        sync_threads(1 + group, 128);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
            if (n0 + j * 8 >= BN) break;
            const float* s = sums + (n0 / 8 + j) * 4;
            // Fragments are [m, n]; the transposing store writes rows of 8 neighbouring m.
            __half* to = staged + (j * 8 + lane % 8) * HALF_PITCH + warp * 16 + lane / 8 % 2 * 8;
            const uint32_t a = finish(s[0], s[1], tile.activation), b = finish(s[2], s[3], tile.activation);
            if (BN <= MAX_MASKED) low |= a, high |= b;
            store_transposed(to, a, b);
        }
        sync_threads(1 + group, 128);
#pragma unroll
        for (int i = threadIdx.x % 128; i < TOKENS * 8; i += 128) {
            const int n = n0 + i / 8, row = tile.n + n, m = m0 + i % 8 * 8;
            if (n < BN && row < p.N && m < tile.end)
                *reinterpret_cast<uint4*>(tile.out(p, row) + m) =
                    *reinterpret_cast<const uint4*>(staged + i / 8 * HALF_PITCH + i % 8 * 8);
        }
    }
    if (BN <= MAX_MASKED && p.active_mask) {
        const auto bit = [](uint32_t pair, int at) { return uint32_t((pair & 0x7fff7fff) != 0) << at; };
        const uint32_t active_mask = __reduce_or_sync(0xffffffff, bit(low, lane / 4) | bit(high, lane / 4 + 8));
        if (lane == 0 && m0 < tile.end) p.active_mask[m0 / 16 + warp] = uint16_t(active_mask);
    }
}

// Add the sums of the blocks that split k, in its order, and write them: each block an equal part of the rows of x, 64 rows at a
// time. This block's sums go where the stages were.
template <int BM, int BN>
__device__ __forceinline__ void store_shared(
    const float (&sums)[BN / 2], const Shape& p, const Tile& tile, char* stages, char* space, const Work& work, Barriers& barriers
) {
    constexpr int TOKENS = epilogue_tokens(BN), PITCH = float_pitch(BM), WIDTH = BM / 4;
    const int thread = threadIdx.x;
    float *const own = reinterpret_cast<float*>(stages), *const others = reinterpret_cast<float*>(space);
    sync_threads(1, BM * 2);  // all of the stages are used up
    spread_sums<BN, PITCH>(sums, own);
    publish_stores();
    sync_threads(1, BM * 2);
#pragma unroll 1
    for (int n0 = 0, round = 0; n0 < BN && tile.n + n0 < p.N; n0 += TOKENS, round++) {
        const int tokens = min(TOKENS, BN - n0) >> p.log_split, bytes = tokens * PITCH * 4;
        if (thread < p.split) {
            if (round > 0) wait(&barriers.seen, (round - 1) & 1);
            if (thread == work.part)
                expect_bytes(&barriers.shown, (p.split - 1) * bytes);
            else
                copy_to_block(
                    thread, others + work.part * tokens * PITCH, own + (n0 + thread * tokens) * PITCH, bytes,
                    &barriers.shown
                );
        }
        wait(&barriers.shown, round & 1);
        const float* const mine = own + (n0 + work.part * tokens) * PITCH;
#pragma unroll 1
        for (int i = thread; i < tokens * WIDTH; i += BM * 2) {
            const int n = i / WIDTH, m = i % WIDTH * 4, row = tile.n + n0 + work.part * tokens + n;
            if (row >= p.N || tile.m + m >= tile.end) continue;
            float4 sum{};
#pragma unroll
            for (int part = 0; part < MAX_SPLIT; part++) {
                if (part >= p.split) break;
                const float* from = part == work.part ? mine : others + part * tokens * PITCH;
                const float4 v = *reinterpret_cast<const float4*>(from + n * PITCH + m);
                sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
            }
            *reinterpret_cast<uint2*>(tile.out(p, row) + tile.m + m) =
                make_uint2(finish(sum.x, sum.y, tile.activation), finish(sum.z, sum.w, tile.activation));
        }
        if (n0 + TOKENS < BN && tile.n + n0 + TOKENS < p.N) {
            sync_threads(1, BM * 2);
            if (thread < p.split) arrive_relaxed_at(&barriers.seen, thread);
        }
    }
}

// All tiles of one thread block.
template <int BM, int BN, int ALL = LOADERS>
__device__ __forceinline__ void multiply_tiles(
    const CUtensorMap& w_map, const CUtensorMap& x_map, const CUtensorMap& beside_map, const Shape& p, char* memory
) {
    __shared__ Barriers barriers;
    constexpr int CONSUMERS = BM * 2;
    char* const stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    char* const space = stages + p.stages * stage_bytes(BM, BN);
    const Work work(p);

    const int loader = int(threadIdx.x) / 32 - CONSUMERS / 32;
    const bool loads = loader >= 0 && loader < ALL, clustered = p.split > 1;
    if (loads && elected()) {  // each makes the barriers of the stages that it is the first to use, before the block has met
        for (int i = loader; i < p.stages; i += ALL)
            init_barrier(&barriers.full[i], 1), init_barrier(&barriers.empty[i], CONSUMERS / 32);
        if (loader == 0) init_barrier(&barriers.shown, 1), init_barrier(&barriers.seen, p.split);
        publish_barriers();
        if (loader == 0) prefetch_map(x_map);  // whose first use comes late
    }
    __syncwarp();
    if (clustered) cluster_arrive_relaxed();
    if (threadIdx.x < CONSUMERS) {
        if (BN > 64) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        __syncthreads();
        if (clustered) cluster_wait();  // the others have begun
        Ring ring;
        for (int t = work.first; t < work.tiles; t += work.stride) {
            float sums[BN / 2];
            if (p.transposed && !p.tiled)
                accumulate<BM, BN, true>(sums, p, work, stages, barriers, ring);
            else
                accumulate<BM, BN, false>(sums, p, work, stages, barriers, ring);
            const Tile tile(t, p, BM, BN);
            if (p.split > 1) {
                store_shared<BM, BN>(sums, p, tile, stages, space, work, barriers);
                break;  // all tiles are at work at once; with a way back from here, wgmma's addresses would be elsewhere
            }
            store<BM, BN>(sums, p, tile, space);
        }
    } else {
        if (BN > 64) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (loads) {
            load<BM, BN, ALL>(w_map, x_map, beside_map, p, work, stages, barriers, loader);
        } else {
            __syncthreads();
            if (clustered) cluster_wait();
        }
    }
    if (clustered) {  // this block's memory is read until all have got their sums
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
    }
}

#endif

template <int BM, int BN>
__global__ void __launch_bounds__(threads(BM, BN), BN <= 64 ? 2 : 1)
    gemm(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
         const __grid_constant__ CUtensorMap beside_map, const __grid_constant__ Shape p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char memory[];
    multiply_tiles<BM, BN>(w_map, x_map, beside_map, p, memory);
#endif
}

// A product and, in the first blocks, the LoRA pairs. All blocks run at once: one to a multiprocessor, and no more than those.
constexpr int INPUTS_THREADS = PAIR_WARPS * LANES + 32;
template <int BM, int BN>
__global__ void __launch_bounds__(INPUTS_THREADS, 1)
    inputs(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ Shape p,
           const __grid_constant__ Pairs pairs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    static_assert(threads(BM, BN, 1) <= INPUTS_THREADS);
    extern __shared__ __align__(128) char memory[];
    if (int(blockIdx.x) < pairs.blocks)
        lora_pairs<BN / 8>(pairs, blockIdx.x, reinterpret_cast<uint8_t*>(memory));
    else if (threadIdx.x < threads(BM, BN, 1))
        multiply_tiles<BM, BN, 1>(w_map, x_map, x_map, p, memory);
#endif
}

using Kernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, Shape);
struct Variant {
    int bm, bn;
    Kernel kernel;
};
template <int BM, int BN>
constexpr Variant variant() {
    return {BM, BN, gemm<BM, BN>};
}
const Variant VARIANTS[] = {variant<64, 8>(),   variant<64, 16>(),  variant<64, 32>(),  variant<64, 64>(),
                            variant<64, 128>(), variant<128, 8>(),  variant<128, 16>(), variant<128, 32>(),
                            variant<128, 64>(), variant<128, 128>(), variant<128, 160>(), variant<128, 256>()};

using InputsKernel = void (*)(CUtensorMap, CUtensorMap, Shape, Pairs);
struct InputsVariant {
    int bm, bn;
    InputsKernel kernel;
};
const InputsVariant INPUTS[] = {
    {64, 8, inputs<64, 8>}, {64, 16, inputs<64, 16>}, {128, 8, inputs<128, 8>}, {128, 16, inputs<128, 16>}
};

// How a product is cut up: the boxes of the maps, and see the top of the file.
struct Cut {
    int bm, bn, split, stages, clusters, overlap;
};

cudaError_t launch(const void* w_map, const void* x_map, const void* beside_map, Shape p, int K, const Cut& cut, void* stream) {
    p.split = cut.split, p.stages = cut.stages, p.k_blocks = K / BK;
    p.log_split = cut.split >= MAX_SPLIT ? 3 : cut.split / 2;  // of 1, 2, 4, 8
    if (p.N < 1 || p.M < 64 || p.M % 64 || K < p.split * BK || K % BK || p.split != 1 << p.log_split) return cudaErrorInvalidValue;
    const int fewest = p.split > 1 ? 3 : 2;  // three hold a tile's sums
    if (cut.clusters < 1 || p.stages < fewest || p.stages > MAX_STAGES) return cudaErrorInvalidValue;
    for (const Variant& v : VARIANTS) {
        if (v.bm != cut.bm || v.bn != cut.bn) continue;
        p.m_tiles = (p.M + v.bm - 1) / v.bm, p.n_tiles = (p.N + v.bn - 1) / v.bn;
        for (int i = 0; i < GROUPS; i++)
            p.beside.tile[i + 1] = p.beside.tile[i] + (p.beside.first[i + 1] - p.beside.first[i] + v.bm - 1) / v.bm;
        const int tiles = p.weight_tiles() * p.n_tiles, clusters = p.split > 1 ? tiles : std::min(cut.clusters, tiles);
        const int shared = shared_bytes(v.bm, v.bn, p.split, p.stages);
        p.blocks = clusters * p.split;
        const Launch how = {dim3(clusters * p.split), dim3(threads(v.bm, v.bn)), cudaStream_t(stream), cut.overlap, p.split,
                            shared};
        const auto map = [](const void* at) { return *static_cast<const CUtensorMap*>(at); };
        return start(v.kernel, how, map(w_map), map(x_map), map(beside_map), p);
    }
    return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace rwkv

// 0 where this library's matrix product runs on the current device, cudaErrorNotSupported elsewhere. Call once per device.
RWKV_EXPORT int rwkv_gemm_setup() {
    int device, major, bytes;
    cudaError_t error = cudaGetDevice(&device);
    if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (!error) error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (!error && !(rwkv::FOR_HOPPER && major == 9)) return cudaErrorNotSupported;
    for (const rwkv::Variant& v : rwkv::VARIANTS)
        if (!error) error = cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes - 1024);
    for (const rwkv::InputsVariant& v : rwkv::INPUTS)
        if (!error) error = cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes - 1024);
    return error;
}

// Describe a contiguous fp16 tensor, sizes innermost first, and the box that one copy takes of it; `map` has 128 bytes.
RWKV_EXPORT int rwkv_gemm_map(
    void* map, void* tensor, int rank, const uint64_t* sizes, const uint64_t* strides, const uint32_t* box
) {
    return rwkv::describe_tensor(static_cast<CUtensorMap*>(map), tensor, rank, sizes, strides, box);
}

// out [batch, N, M] fp16 = x [batch, N, K] times W [batch, M, K] (transposed: [batch, K, M]), as described by their maps.
// tiled: the same W in pieces, see Shape, which is then read instead; or null.
// bm, bn: rows of W and of x of a tile, the boxes of their maps; split: see the top, a power of 2; clusters: tiles worked on at
// once, all where split > 1; overlap: see launch.cuh.
// active_mask: null, or where to write M bits, 32 to a word, that say which columns of out are not all zeros; split and batch 1,
// N <= 16.
RWKV_EXPORT int rwkv_gemm(
    const void* w_map, const void* tiled, const void* x_map, void* out, void* active_mask, int N, int M, int K, int batch, int transposed,
    int relu_square, int bm, int bn, int split, int stages, int clusters, int overlap, void* stream
) {
    using namespace rwkv;
    Shape p{static_cast<__half*>(out), N, M};
    if (active_mask && (split != 1 || batch != 1 || N > bn || bn > MAX_MASKED)) return cudaErrorInvalidValue;
    p.batch = batch, p.transposed = transposed, p.activation = relu_square ? RELU_SQUARE : NONE;
    p.tiled = static_cast<const char*>(tiled);
    p.active_mask = static_cast<uint16_t*>(active_mask);
    return launch(w_map, x_map, w_map, p, K, {bm, bn, split, stages, clusters, overlap}, stream);
}

// The same for the first three planes of x [6, N, K], and hidden [N, R] = the products with lora_down of the LoRA pairs: rank_w,
// _a, _v and _g rows of a second weight [R, K], multiples of 8, with the planes and activations above.
RWKV_EXPORT int rwkv_gemm_project(
    const void* w_map, const void* tiled, const void* x_map, const void* lora_down_map, void* out, void* hidden, int N, int M, int K, int rank_w,
    int rank_a, int rank_v, int rank_g, int bm, int bn, int split, int stages, int clusters, int overlap, void* stream
) {
    using namespace rwkv;
    Shape p{static_cast<__half*>(out), N, M};
    p.batch = 3, p.tiled = static_cast<const char*>(tiled);
    p.beside.out = static_cast<__half*>(hidden);
    const int ranks[GROUPS] = {rank_w, rank_a, rank_v, rank_g};
    for (int i = 0; i < GROUPS; i++) {
        if (ranks[i] < 0 || ranks[i] % 8) return cudaErrorInvalidValue;
        p.beside.first[i + 1] = p.beside.first[i] + ranks[i];
    }
    return launch(w_map, x_map, lora_down_map, p, K, {bm, bn, split, stages, clusters, overlap}, stream);
}

// All that the attention's recurrence takes, in one launch, of mixed [6, N, C], N <= 16: rkv [3, N, C] of three weights [C, C] and
// the LoRA pairs' w_raw, a, v_mix, gate [N, C], as rwkv_gemm_project and rwkv_lora_up say, with hidden [N, R] between.
// arrived: a zero for each number of thread blocks, kept between launches. clusters: thread blocks of r, k, v; the pairs get the
// rest of the multiprocessors. LoraRanks are multiples of 32, at most 512; C of 256, at most 4096; bn is 8 or 16.
RWKV_EXPORT int rwkv_gemm_inputs(
    const void* w_map, const void* tiled, const void* x_map, const void* mixed, const void* lora_down, const void* lora_up, const void* w0,
    const void* a0, const void* v0, void* rkv, void* hidden, void* w_raw, void* a, void* v_mix, void* gate, void* arrived, int N,
    int C, int rank_w, int rank_a, int rank_v, int rank_g, int bm, int bn, int split, int stages, int clusters, int overlap, void* stream
) {
    using namespace rwkv;
    const LoraRanks ranks{rank_w, rank_a, rank_v, rank_g};
    for (const int rank : {rank_w, rank_a, rank_v, rank_g})
        if (rank < 0 || rank > PAIR_SLICE || rank % PAIR_STEP) return cudaErrorInvalidValue;
    if (N < 1 || N > bn || C % (PAIR_WARPS * PAIR_STEP) || C > PAIR_WARPS * PAIR_SLICE || split != 1) return cudaErrorInvalidValue;
    Pairs pairs{};
    pairs.rank = ranks.total(), pairs.blocks = device().processors - clusters;
    if (clusters < 1 || pairs.blocks < 1 || ranks.total() == 0 || stages < 2 || stages > MAX_STAGES) return cudaErrorInvalidValue;
    pairs.hidden = static_cast<const __half*>(hidden), pairs.arrived = static_cast<unsigned long long*>(arrived) + pairs.blocks;
    pairs.lora_down.num_tokens = pairs.lora_up.num_tokens = N;
    add_lora_down(pairs.lora_down, static_cast<const __half*>(mixed), static_cast<const __half*>(lora_down),
                  static_cast<__half*>(hidden), C, ranks, PAIR_ROWS);
    add_lora_up(pairs.lora_up, pairs.hidden, static_cast<const __half*>(lora_up), {w0, a0, v0}, {w_raw, a, v_mix, gate}, C, ranks,
                PAIR_ROWS);
    Shape p{static_cast<__half*>(rkv), N, C};
    p.tiled = static_cast<const char*>(tiled);
    p.k_blocks = C / BK, p.m_tiles = (C + bm - 1) / bm, p.n_tiles = 1, p.batch = 3, p.split = 1, p.stages = stages;
    p.first_block = pairs.blocks, p.blocks = std::min(clusters, p.weight_tiles());
    for (const InputsVariant& v : INPUTS) {
        if (v.bm != bm || v.bn != bn) continue;
        const int shared = std::max(shared_bytes(bm, bn, 1, stages), PairSpace(C / PAIR_WARPS, pairs.rank, bn / 8).total);
        const Launch how = {dim3(pairs.blocks + p.blocks), dim3(INPUTS_THREADS), cudaStream_t(stream), overlap, 1, shared};
        const auto map = [](const void* at) { return *static_cast<const CUtensorMap*>(at); };
        return start(v.kernel, how, map(w_map), map(x_map), p, pairs);
    }
    return cudaErrorInvalidValue;
}
