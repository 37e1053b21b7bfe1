// The sparse half of the channel mix: out [N, C] = hidden [N, F] weight [F, C], where most units of hidden are off (zero) and
// their rows of weights need not be read.
//
//   sparse_ffn         each token reads the rows that are on in it
//   masked_ffn         up to 16 tokens read the rows that are on in any of them, once (Hopper)
//   build_active_mask  tells which those are, where the product that made hidden did not
//
// In both products a token's result depends neither on the other tokens nor on how many there are. fp16 operands, fp32 sums in an
// order that depends on the shapes alone; split sums are put together inside a cluster of blocks, in the order of their ranks.

#include "sparse.cuh"

namespace rwkv {
namespace {

// A warp takes 32 units at a time of 64 columns. It copies the rows that are on in some token into a ring of its own, and
// multiplies all 32 on tensor cores: what lies in the ring for the other rows, weights too, meets zeros. So the sums are those of
// the whole product, bit by bit, whichever rows are passed over.
//
// Which are on is told by `active_mask`, a bit for each unit, so rows are asked for long before the values of hidden, 256 times as
// many, have come. The first stage is copied whole before either. The values come by the copy engine into a second ring, those of
// two steps at a time: a warp's own loads would be served behind the rows that were asked for before.
//
// In each step of 32 units a lane has eight neighbouring ones of a token; the fragments of two mma take four each. That permutes
// the units, the same way for both operands. Piece i of 16 bytes of a row in the ring lies at i ^ `turn_of` the row, so that the
// eight rows of a fragment meet no bank twice.
constexpr int MASKED_WARPS = 8, UNITS = 32, COLUMNS = 64;
constexpr int AHEAD = 4, RING = AHEAD + 1;  // steps that are on their way
constexpr int PAIRS = 2;                    // of steps whose values of hidden are on their way
constexpr int ROW_BYTES = COLUMNS * 2, STAGE_BYTES = UNITS * ROW_BYTES, RING_BYTES = MASKED_WARPS * RING * STAGE_BYTES;
constexpr int PAIR_BYTES = 2 * UNITS * 2, SWIZZLE = 8 * PAIR_BYTES;  // of a token; after which the copy engine's swizzle repeats
__host__ __device__ constexpr int values_bytes(int halves) { return MASKED_WARPS * PAIRS * halves * SWIZZLE; }
constexpr int PART_PITCH = COLUMNS + 4;  // floats between the tokens of a warp's sums: no bank is met twice

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int EARLY = 1;                // of those ahead, copied whole before the mask is known
constexpr int ROUND = 2 * MASKED_WARPS;  // steps of all warps in turn, two each

__device__ __forceinline__ void copy_if(uint32_t to, const __half* from, bool wanted) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n"
        "@wanted cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %3; }" ::"r"(to),
        "l"(from), "r"(int(wanted)), "l"(READ_ONCE)
        : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t from, uint32_t (&v)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}
// The first unit of a warp's step, from that of its first one.
__device__ __forceinline__ int first_unit(int step) { return (step / 2 * ROUND + step % 2) * UNITS; }
__device__ __forceinline__ int turn_of(int row) { return row / 8 * 2 + row % 2; }
#endif

template <int HALVES>
__global__ __launch_bounds__(MASKED_WARPS * LANES, 1) void masked_ffn(const __grid_constant__ CUtensorMap hidden,
                                                                        const uint32_t* active_mask, const __half* weight, __half* out,
                                                                        int num_tokens, int units, int width, int splits) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int TOKENS = 8 * HALVES;
    extern __shared__ uint8_t unaligned[];
    uint8_t* const memory = unaligned + (SWIZZLE - shared_address(unaligned) % SWIZZLE) % SWIZZLE;
    __shared__ uint64_t complete, arrived[MASKED_WARPS][PAIRS];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, group = lane / 4, quarter = lane % 4;
    release_next();
    if (lane == 0) {
        prefetch_map(hidden);
        if (warp == 0) init_barrier(&complete, 1);
        for (int i = 0; i < PAIRS; i++) init_barrier(&arrived[warp][i], 1);
        publish_barriers();
    }
    __syncwarp();
    cluster_arrive_relaxed();
    const int rank = blockIdx.x % splits, first_column = blockIdx.x / splits * COLUMNS;
    const int steps = units / UNITS, begin = rank * steps / splits + 2 * warp, end = (rank + 1) * steps / splits;
    const int rest = max(end - begin, 0), count = rest / ROUND * 2 + min(rest % ROUND, 2);  // of this warp
    const uint32_t ring = shared_address(memory) + warp * RING * STAGE_BYTES;

    constexpr int PIECES = COLUMNS / 8, ROWS_AT_ONCE = LANES / PIECES;  // of 16 bytes to a row; rows that a warp copies at once
    const int piece = lane % PIECES, row = lane / PIECES;
    const __half* const rows = weight + int64_t(begin * UNITS + row) * width + first_column + piece * 8;
    auto copy = [&](int step, uint32_t on) {
        if (step < count) {
            const __half* from = rows + int64_t(first_unit(step)) * width;
            const uint32_t to = ring + step % RING * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < UNITS; i += ROWS_AT_ONCE)
                copy_if(to + (i + row) * ROW_BYTES + (piece ^ turn_of(i + row)) * 16, from + int64_t(i) * width, on >> (i + row) & 1);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    uint8_t* const values = memory + RING_BYTES + warp * PAIRS * TOKENS * PAIR_BYTES;  // [PAIRS, TOKENS, 2 * UNITS] fp16
    // Beyond the last token and unit come zeros; where this block's units end within a pair, the rest is not used.
    auto load = [&](int pair) {
        if (lane > 0 || 2 * pair >= count) return;
        uint64_t* const barrier = &arrived[warp][pair % PAIRS];
        expect_bytes(barrier, TOKENS * PAIR_BYTES);
        copy_box(values + pair % PAIRS * TOKENS * PAIR_BYTES, hidden, barrier, READ_AGAIN, begin * UNITS + first_unit(2 * pair), 0, 0);
    };
    float sum[COLUMNS / 16][HALVES][4] = {};
    const int slot = lane % 8, right = lane / 8 % 2;  // of the fragments' rows, and which 8 columns
    auto multiply = [&](int step) {
        const int pair = step / 2, piece = step % 2 * 4 + quarter;
        if (step % 2 == 0) wait(&arrived[warp][pair % PAIRS], pair / PAIRS % 2);
        const uint8_t* const from = values + (pair % PAIRS * TOKENS + group) * PAIR_BYTES + (piece ^ group) * 16;
        uint4 x[HALVES];
#pragma unroll
        for (int n = 0; n < HALVES; n++) x[n] = *reinterpret_cast<const uint4*>(from + n * SWIZZLE);
        const uint32_t stage = ring + step % RING * STAGE_BYTES;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t fragment = stage + (slot / 2 * 8 + 4 * h + lane / 16 * 2 + slot % 2) * ROW_BYTES;
#pragma unroll
            for (int m = 0; m < COLUMNS / 16; m++) {
                uint32_t a[4];
                load_transposed(fragment + ((2 * m + right) ^ slot) * 16, a);
#pragma unroll
                for (int n = 0; n < HALVES; n++) mma(sum[m][n], a[0], a[1], a[2], a[3], h ? x[n].z : x[n].x, h ? x[n].w : x[n].y);
            }
        }
    };

#pragma unroll
    for (int i = 0; i < EARLY; i++) copy(i, ALL);
    for (int i = EARLY * STAGE_BYTES + lane * 16; i < RING * STAGE_BYTES; i += LANES * 16)
        *reinterpret_cast<uint4*>(memory + warp * RING * STAGE_BYTES + i) = make_uint4(0, 0, 0, 0);
    __syncwarp();
    wait_for_previous();
    // The mask's words of LANES steps, one for each lane; those after them are on their way.
    auto words_of = [&](int step) { return step + lane < count ? active_mask[begin + first_unit(step + lane) / UNITS] : 0u; };
    uint32_t word = words_of(0), word_next = words_of(LANES);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) load(i);
#pragma unroll
    for (int i = EARLY; i < AHEAD; i++) copy(i, __shfl_sync(ALL, word, i));
#pragma unroll 2
    for (int step = 0; step < count; step++) {
        const int coming = step + AHEAD;
        if (coming % LANES == 0) word = word_next, word_next = words_of(coming + LANES);
        copy(coming, __shfl_sync(ALL, word, coming % LANES));
        asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD) : "memory");
        __syncwarp();
        multiply(step);
        __syncwarp();  // all have read the stage, and the values
        if (step % 2) load(step / 2 + PAIRS);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    // Add up the warps, then the blocks of the cluster, which get equal parts of the tokens.
    float* const parts = reinterpret_cast<float*>(memory);  // [MASKED_WARPS, TOKENS, PART_PITCH]
    // [TOKENS, COLUMNS] each; behind the rings, since other blocks may send while this one still multiplies
    float *const own = reinterpret_cast<float*>(memory + RING_BYTES + values_bytes(HALVES)), *const others = own + TOKENS * COLUMNS;
#pragma unroll
    for (int m = 0; m < COLUMNS / 16; m++)
#pragma unroll
        for (int n = 0; n < HALVES; n++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                parts[(warp * TOKENS + 8 * n + 2 * quarter + c % 2) * PART_PITCH + 16 * m + group + c / 2 * 8] = sum[m][n][c];
    __syncthreads();
    for (int i = threadIdx.x; i < TOKENS * COLUMNS / 4; i += MASKED_WARPS * LANES) {
        const float* from = parts + i / (COLUMNS / 4) * PART_PITCH + i % (COLUMNS / 4) * 4;
        float4 total = *reinterpret_cast<const float4*>(from);
#pragma unroll
        for (int w = 1; w < MASKED_WARPS; w++) {
            const float4 v = *reinterpret_cast<const float4*>(from + w * TOKENS * PART_PITCH);
            total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        reinterpret_cast<float4*>(own)[i] = total;
    }
    publish_stores();
    __syncthreads();
    cluster_wait();  // the others have begun
    const int each = TOKENS / splits * COLUMNS;
    if (threadIdx.x < splits) {
        if (threadIdx.x == rank) {
            expect_bytes(&complete, (splits - 1) * each * 4);
        } else {
            copy_to_block(threadIdx.x, others + rank * each, own + threadIdx.x * each, each * 4, &complete);
        }
    }
    wait(&complete, 0);
    for (int i = threadIdx.x; i < each / 4; i += MASKED_WARPS * LANES) {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int s = 0; s < splits; s++) {
            const float4 v = reinterpret_cast<const float4*>((s == rank ? own : others) + s * each)[i];
            total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        const int token = rank * (TOKENS / splits) + i / (COLUMNS / 4);
        if (token >= num_tokens) continue;
        const __half2 halves[2] = {__floats2half2_rn(total.x, total.y), __floats2half2_rn(total.z, total.w)};
        *reinterpret_cast<uint2*>(out + int64_t(token) * width + first_column + i % (COLUMNS / 4) * 4) =
            *reinterpret_cast<const uint2*>(halves);
    }
    __syncwarp();
    cluster_arrive_relaxed();  // this block's memory is read until all have got their sums
    cluster_wait();
#endif
}

// A thread looks at a unit of all tokens.
constexpr int MASK_THREADS = 128;
__global__ void __launch_bounds__(MASK_THREADS)
    build_active_mask(const __half* hidden, uint32_t* active_mask, int num_tokens, int units) {
    const int unit = blockIdx.x * MASK_THREADS + threadIdx.x;
    release_next();
    wait_for_previous();
    bool on = false;
    for (int token = 0; token < num_tokens && unit < units; token++)
        on |= (__half_as_ushort(hidden[int64_t(token) * units + unit]) & 0x7fff) != 0;
    const uint32_t word = __ballot_sync(ALL, on);
    if (threadIdx.x % LANES == 0 && unit < units) active_mask[unit / LANES] = word;
}

// How many clusters of so many blocks run at once, or an error as a negative number: where a group of multiprocessors has an odd
// number, fewer than their count says.
template <int HALVES>
int clusters_at_once(int size, int bytes) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(size), 1, 1};
    const cudaLaunchConfig_t config = {dim3(size), dim3(MASKED_WARPS * LANES), size_t(bytes), nullptr, &attribute, 1};
    int count = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, masked_ffn<HALVES>, &config);
    return error ? -int(error) : count;
}

template <int HALVES>
cudaError_t start_masked(const __half* hidden, const uint32_t* active_mask, const __half* weight, __half* out, int num_tokens,
                         int units, int width, int overlap, void* stream) {
    constexpr int TOKENS = 8 * HALVES, BYTES = SWIZZLE + RING_BYTES + values_bytes(HALVES) + 2 * TOKENS * COLUMNS * 4;
    static_assert(MASKED_WARPS * TOKENS * PART_PITCH * 4 <= RING_BYTES, "the warps' sums lie in their rings");
    static_assert(RING_BYTES % SWIZZLE == 0, "values of hidden are copied to where the swizzle begins");
    const auto kernel = masked_ffn<HALVES>;
    static const cudaError_t prepared = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (prepared) return prepared;
    static const int room[] = {clusters_at_once<HALVES>(2, BYTES), clusters_at_once<HALVES>(4, BYTES),
                               clusters_at_once<HALVES>(8, BYTES)};
    const uint64_t row = 2 * uint64_t(units);
    const uint64_t sizes[] = {uint64_t(units), uint64_t(num_tokens), 1}, strides[] = {row, row * num_tokens};
    const uint32_t box[] = {2 * UNITS, TOKENS, 1};
    CUtensorMap map;
    if (const int error = describe_tensor(&map, hidden, 3, sizes, strides, box)) return cudaError_t(error);
    const int tiles = width / COLUMNS;
    int splits = 1;
    for (int i = 0; i < 3 && tiles <= room[i]; i++) splits *= 2;
    return start(kernel, {unsigned(tiles * splits), MASKED_WARPS * LANES, cudaStream_t(stream), overlap, splits, BYTES}, map,
                 active_mask, weight, out, num_tokens, units, width, splits);
}

}  // namespace
}  // namespace rwkv

using namespace rwkv;

// out [N, C] = hidden [N, F] weight [F, C], F a multiple of 4, C of 64.
RWKV_EXPORT int rwkv_sparse_ffn(const void* hidden, const void* weight, void* out, int num_tokens, int units, int width,
                                int overlap, void* stream) {
    return start_sparse<PLAIN>(hidden, weight, nullptr, out, num_tokens, units, width, overlap, stream);
}

// The same on Hopper, N <= 16, F a multiple of 32, C of 128. active_mask [F / 32] 32 bits: bit i of word w says whether unit
// 32 w + i is on in some token; written by rwkv_gemm or rwkv_build_active_mask.
RWKV_EXPORT int rwkv_masked_ffn(const void* hidden, const void* active_mask, const void* weight, void* out, int num_tokens,
                                int units, int width, int overlap, void* stream) {
    if (!device().hopper) return cudaErrorNotSupported;
    if (num_tokens > 16 || units % UNITS || width % 128) return cudaErrorInvalidValue;
    return (num_tokens <= 8 ? start_masked<1> : start_masked<2>)(
        static_cast<const __half*>(hidden), static_cast<const uint32_t*>(active_mask), static_cast<const __half*>(weight),
        static_cast<__half*>(out), num_tokens, units, width, overlap, stream);
}

// That mask of hidden [N, F], F a multiple of 32.
RWKV_EXPORT int rwkv_build_active_mask(const void* hidden, void* active_mask, int num_tokens, int units, int overlap,
                                       void* stream) {
    if (units % LANES) return cudaErrorInvalidValue;
    const unsigned blocks = (units + MASK_THREADS - 1) / MASK_THREADS;
    return start(build_active_mask, {blocks, MASK_THREADS, cudaStream_t(stream), overlap}, static_cast<const __half*>(hidden),
                 static_cast<uint32_t*>(active_mask), num_tokens, units);
}
