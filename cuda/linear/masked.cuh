// masked_ffn, for weights of fp16 and quantised ones: see sparse_ffn.cu.
#pragma once

#include "hopper.cuh"
#include "quant.cuh"

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
// lanes of a load meet no bank twice.
//
// Quantised rows are loaded as codes: of 16 columns, which are its rows of eight fragments, a lane has four units at a time.
constexpr int MASKED_WARPS = 8, UNITS = 32;
constexpr int PAIRS = 2;                                            // of steps whose values of hidden are on their way
constexpr int PAIR_BYTES = 2 * UNITS * 2, SWIZZLE = 8 * PAIR_BYTES;  // of a token; after which the copy engine's swizzle repeats
__host__ __device__ constexpr int values_bytes(int halves) { return MASKED_WARPS * PAIRS * halves * SWIZZLE; }

template <int FORMAT>
struct Masked {
    static constexpr bool NARROW = FORMAT != PLAIN && !wide_codes(FORMAT);
    static constexpr int COLUMNS = FORMAT == PLAIN ? 64 : 128, PART_PITCH = COLUMNS + 4;  // so that sums meet no bank twice
    static constexpr int ROW_BYTES = NARROW ? 64 : 128, SCALE_BYTES = grouped(FORMAT) ? 4 : 0;
    static constexpr int STAGE_BYTES = UNITS * (ROW_BYTES + SCALE_BYTES);
    static constexpr int AHEAD = NARROW ? 8 : 4, RING = AHEAD + 1;  // steps that are on their way
    static constexpr int RING_BYTES = MASKED_WARPS * RING * STAGE_BYTES;

    // Where a row of a stage lies, and how its pieces are turned.
    static __device__ __forceinline__ int place_of(int row) { return NARROW ? row ^ (row >> 4 & 1) : row; }
    static __device__ __forceinline__ int turn_of(int row) {
        return FORMAT == PLAIN ? row / 8 * 2 + row % 2 : NARROW ? (row >> 3 & 1) * 2 : row / 8 * 2;
    }
    // Bytes of so many neighbouring columns.
    static __host__ __device__ constexpr int bytes(int columns) {
        return FORMAT == PLAIN ? 2 * columns : lower_bytes(FORMAT, columns);
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int EARLY = 1;                // of those ahead, copied whole before the mask is known
constexpr int ROUND = 2 * MASKED_WARPS;  // steps of all warps in turn, two each

__device__ __forceinline__ void copy_if(uint32_t to, const uint8_t* from, uint32_t wanted) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n"
        "@wanted cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %3; }" ::"r"(to),
        "l"(from), "r"(wanted), "l"(READ_ONCE)
        : "memory");
}
__device__ __forceinline__ void copy_scales_if(uint32_t to, const __half* from, bool wanted) {  // two
    asm volatile("{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0; @wanted cp.async.ca.shared.global [%0], [%1], 4; }" ::"r"(to), "l"(from),
                 "r"(int(wanted))
                 : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t from, uint32_t (&v)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}
// The first unit of a warp's step, from that of its first one.
__device__ __forceinline__ int first_unit(int step) { return (step / 2 * ROUND + step % 2) * UNITS; }

__device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t scales) { return bits_of(__hmul2(halves_of(pair), halves_of(scales))); }

// sum [16 columns of eight fragments] += weights by x: of the units 4 * `part` and three more of a lane's eight of a stage.
template <int FORMAT, int HALVES>
__device__ __forceinline__ void multiply_codes(
    float (&sum)[8][HALVES][4], const uint8_t* stage, int part, const uint4 (&x)[HALVES], int group, int quarter
) {
    using M = Masked<FORMAT>;
    auto add = [&](int m, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
#pragma unroll
        for (int n = 0; n < HALVES; n++) mma(sum[m][n], a0, a1, a2, a3, part ? x[n].z : x[n].x, part ? x[n].w : x[n].y);
    };
    if constexpr (wide_codes(FORMAT)) {
        uint4 codes[4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const int row = 8 * quarter + 4 * part + u;
            codes[u] = *reinterpret_cast<const uint4*>(stage + row * M::ROW_BYTES + (group ^ M::turn_of(row)) * 16);
        }
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const uint32_t a = (&codes[0].x)[v], b = (&codes[1].x)[v], c = (&codes[2].x)[v], d = (&codes[3].x)[v];
            const uint2 first = decode_bytes<FORMAT>(permute(a, b, 0x5140)), second = decode_bytes<FORMAT>(permute(c, d, 0x5140));
            add(2 * v, first.x, first.y, second.x, second.y);
            const uint2 third = decode_bytes<FORMAT>(permute(a, b, 0x7362)), fourth = decode_bytes<FORMAT>(permute(c, d, 0x7362));
            add(2 * v + 1, third.x, third.y, fourth.x, fourth.y);
        }
    } else {
        uint2 codes[4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const int row = 8 * quarter + 4 * part + u;
            codes[u] = *reinterpret_cast<const uint2*>(stage + M::place_of(row) * M::ROW_BYTES +
                                                       (group / 2 ^ M::turn_of(row)) * 16 + group % 2 * 8);
        }
        // Each unit's scales of both groups of columns, of which this lane's are in one.
        const uint4 scale = *reinterpret_cast<const uint4*>(stage + UNITS * M::ROW_BYTES + (8 * quarter + 4 * part) * 4);
        const uint32_t side = group < 4 ? 0x5410 : 0x7632;
        const uint32_t low = permute(scale.x, scale.y, side), high = permute(scale.z, scale.w, side);
#pragma unroll
        for (int v = 0; v < 2; v++) {
            uint4 unit[4];
#pragma unroll
            for (int u = 0; u < 4; u++) unit[u] = decode_nibbles<FORMAT>((&codes[u].x)[v], 0, 0);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int even = i % 2 * 2;  // columns 2 i and the next: of the pairs (0, 4), (1, 5), (2, 6), (3, 7)
                const uint32_t which = i < 2 ? 0x5410 : 0x7632;
                auto pair = [&](int u, int c) { return permute((&unit[u].x)[c], (&unit[u + 1].x)[c], which); };
                add(4 * v + i, times(pair(0, even), low), times(pair(0, even + 1), low), times(pair(2, even), high),
                    times(pair(2, even + 1), high));
            }
        }
    }
}
#endif

template <int FORMAT, int HALVES>
__global__ __launch_bounds__(MASKED_WARPS * LANES, 1) void masked_ffn(const __grid_constant__ CUtensorMap hidden,
                                                                        const uint32_t* active_mask, const uint8_t* weight,
                                                                        const void* scales, __half* out, int num_tokens, int units,
                                                                        int width, int splits) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using M = Masked<FORMAT>;
    constexpr int TOKENS = 8 * HALVES, COLUMNS = M::COLUMNS, ROW_BYTES = M::ROW_BYTES, STAGE_BYTES = M::STAGE_BYTES;
    constexpr int AHEAD = M::AHEAD, RING = M::RING, RING_BYTES = M::RING_BYTES, PART_PITCH = M::PART_PITCH;
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

    constexpr int PIECES = ROW_BYTES / 16, ROWS_AT_ONCE = LANES / PIECES;  // to a row; rows that a warp copies at once
    const int piece = lane % PIECES, row = lane / PIECES, pitch = M::bytes(width);
    const uint8_t* const rows = weight + int64_t(begin * UNITS + row) * pitch + M::bytes(first_column) + piece * 16;
    const uint32_t turned = (piece ^ M::turn_of(row)) * 16;  // as rows at once are few, turn_of(i + row) = turn_of(i) ^ turn_of(row)
    auto copy = [&](int step, uint32_t on) {
        if (step < count) {
            const uint8_t* from = rows + int64_t(first_unit(step)) * pitch;
            const uint32_t to = ring + step % RING * STAGE_BYTES, own = on >> row;
#pragma unroll
            for (int i = 0; i < UNITS; i += ROWS_AT_ONCE)
                copy_if(to + M::place_of(i + row) * ROW_BYTES + (turned ^ M::turn_of(i) * 16), from + int64_t(i) * pitch,
                        own & 1u << i);
            if constexpr (grouped(FORMAT))
                copy_scales_if(to + UNITS * ROW_BYTES + lane * 4,
                               static_cast<const __half*>(scales) +
                                   (int64_t(begin * UNITS + first_unit(step) + lane) * width + first_column) / BLOCK,
                               on >> lane & 1);
        }
        end_of_copies();
    };
    uint8_t* const values = memory + RING_BYTES + warp * PAIRS * TOKENS * PAIR_BYTES;  // [PAIRS, TOKENS, 2 * UNITS] fp16
    // Beyond the last token and unit come zeros; where this block's units end within a pair, the rest is not used.
    auto load = [&](int pair) {
        if (2 * pair >= count || !elected()) return;
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
        if constexpr (FORMAT != PLAIN) {
            const uint8_t* const stage = memory + (warp * RING + step % RING) * STAGE_BYTES;
#pragma unroll
            for (int h = 0; h < 2; h++) multiply_codes<FORMAT, HALVES>(sum, stage, h, x, group, quarter);
            return;
        }
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
    const uint32_t* const mask = active_mask + begin;
    wait_for_previous_knowing(mask + first_unit(lane) / UNITS, mask + first_unit(LANES + lane) / UNITS, rows, pitch, int(turned));
    // The mask's words of LANES steps, one for each lane; those after them are on their way.
    auto words_of = [&](int step) { return step + lane < count ? mask[first_unit(step + lane) / UNITS] : 0u; };
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
        wait_for_copies<AHEAD>();
        __syncwarp();
        multiply(step);
        __syncwarp();  // all have read the stage, and the values
        if (step % 2) load(step / 2 + PAIRS);
    }
    wait_for_copies<0>();
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
            for (int c = 0; c < 4; c++) {
                const int column = FORMAT == PLAIN ? 16 * m + group + c / 2 * 8 : 16 * group + 2 * m + c / 2;
                parts[(warp * TOKENS + 8 * n + 2 * quarter + c % 2) * PART_PITCH + column] = sum[m][n][c];
            }
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
        if constexpr (FORMAT != PLAIN && !grouped(FORMAT)) {
            const float* const scale = static_cast<const float*>(scales) + first_column + i % (COLUMNS / 4) * 4;
            total.x *= unit<FORMAT>() * scale[0], total.y *= unit<FORMAT>() * scale[1];
            total.z *= unit<FORMAT>() * scale[2], total.w *= unit<FORMAT>() * scale[3];
        }
        const __half2 halves[2] = {__floats2half2_rn(total.x, total.y), __floats2half2_rn(total.z, total.w)};
        *reinterpret_cast<uint2*>(out + int64_t(token) * width + first_column + i % (COLUMNS / 4) * 4) =
            *reinterpret_cast<const uint2*>(halves);
    }
    __syncwarp();
    cluster_arrive_relaxed();  // this block's memory is read until all have got their sums
    cluster_wait();
#endif
}

// How many clusters of so many blocks run at once, or an error as a negative number: where a group of multiprocessors has an odd
// number, fewer than their count says.
template <int FORMAT, int HALVES>
int clusters_at_once(int size, int bytes) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(size), 1, 1};
    const cudaLaunchConfig_t config = {dim3(size), dim3(MASKED_WARPS * LANES), size_t(bytes), nullptr, &attribute, 1};
    int count = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, masked_ffn<FORMAT, HALVES>, &config);
    return error ? -int(error) : count;
}

// On a Hopper device, N <= 8 * HALVES, F a multiple of 32, C of 128.
template <int FORMAT, int HALVES>
int start_masked(const void* hidden, const void* active_mask, const void* weight, const void* scales, void* out, int num_tokens,
                 int units, int width, int overlap, void* stream) {
    using M = Masked<FORMAT>;
    constexpr int TOKENS = 8 * HALVES, BYTES = SWIZZLE + M::RING_BYTES + values_bytes(HALVES) + 2 * TOKENS * M::COLUMNS * 4;
    static_assert(MASKED_WARPS * TOKENS * M::PART_PITCH * 4 <= M::RING_BYTES, "the warps' sums lie in their rings");
    static_assert(M::RING_BYTES % SWIZZLE == 0, "values of hidden are copied to where the swizzle begins");
    if (!device().hopper) return cudaErrorNotSupported;
    if (num_tokens > TOKENS || units % UNITS || width % 128) return cudaErrorInvalidValue;
    const auto kernel = masked_ffn<FORMAT, HALVES>;
    static const cudaError_t prepared = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (prepared) return prepared;
    static const int room[] = {clusters_at_once<FORMAT, HALVES>(2, BYTES), clusters_at_once<FORMAT, HALVES>(4, BYTES),
                               clusters_at_once<FORMAT, HALVES>(8, BYTES)};
    const uint64_t row = 2 * uint64_t(units);
    const uint64_t sizes[] = {uint64_t(units), uint64_t(num_tokens), 1}, strides[] = {row, row * num_tokens};
    const uint32_t box[] = {2 * UNITS, TOKENS, 1};
    CUtensorMap map;
    if (const int error = describe_tensor(&map, hidden, 3, sizes, strides, box)) return error;
    const int tiles = width / M::COLUMNS;
    int splits = 1;
    for (int i = 0; i < 3 && tiles <= room[i]; i++) splits *= 2;
    return start(kernel, {unsigned(tiles * splits), MASKED_WARPS * LANES, cudaStream_t(stream), overlap, splits, BYTES}, map,
                 static_cast<const uint32_t*>(active_mask), static_cast<const uint8_t*>(weight), scales, static_cast<__half*>(out),
                 num_tokens, units, width, splits);
}

}  // namespace
}  // namespace rwkv
