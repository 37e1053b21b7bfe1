// Thin products of few columns: what adapters of single rows add to a product, and pairs of low rank.
//
//   down  hidden[n, c] = sum over k of x[n, k] down[c, k]          in parts of K, fp32
//   up    out[n, m] (+)= sum over c of hidden[n, c] up[c, m]       with what belongs behind it
//
// With a grouping each token has the columns of its own adapter: tokens are listed by adapter, so that the tensor cores multiply
// what belongs together and each adapter's columns are read once for every 16 or 32 tokens; those of adapters that no token has are
// not read at all. (Punica: Chen et al. 2023, "SGMV"; S-LoRA: Sheng et al. 2023.) Without one all tokens have all columns.
//
// All sums have a fixed order, which depends on K and on how many tokens the step has room for: a token's result depends neither on
// the other tokens and their adapters nor on where it stands. `down` sums each warp's part of a piece of K, then the warps', and
// `up` the pieces, as it reads them.
#include "../launch.cuh"

namespace rwkv {
namespace {

constexpr int STEP = 32;  // values of k that four lanes read with one 16-byte load each
constexpr int DOWN_WARPS = 8, UP_WARPS = 4;
constexpr int GROUPING_THREADS = 1024, GROUPING_WARPS = GROUPING_THREADS / LANES;
constexpr int MAX_COLUMNS = 2048;
constexpr int CHUNK = 32;                     // columns that `up` holds at a time
constexpr int SPAN = 8 * LANES;               // of m, to a block of it: 64 to a warp
constexpr int PITCH = SPAN + 8;               // halves between columns: reads by rows of a fragment then meet no bank twice
constexpr int HIDDEN_PITCH = CHUNK + 8;       // and between tokens
constexpr float LARGEST_HALF = 65504.f;
constexpr int NONE_COLUMN = -1;
constexpr int MAX_PARTS = 8;

// c [16, 8] += a [16, 16] b [16, 8]; a lane's parts as those of mma.m16n8k16.
__device__ __forceinline__ void multiply(
        float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#ifdef RWKV_HIP
    const int group = threadIdx.x % LANES / 4, quarter = threadIdx.x % 4;
    const auto add = [](float sum, uint32_t x, uint32_t y) {
        const float2 p = __half22float2(*reinterpret_cast<const __half2*>(&x));
        const float2 q = __half22float2(*reinterpret_cast<const __half2*>(&y));
        return fmaf(p.y, q.y, fmaf(p.x, q.x, sum));
    };
    for (int j = 0; j < 4; j++) {
        const int row = 4 * group + j;
        const uint32_t x0 = __shfl_sync(ALL, a0, row, LANES), x1 = __shfl_sync(ALL, a1, row, LANES);
        const uint32_t x2 = __shfl_sync(ALL, a2, row, LANES), x3 = __shfl_sync(ALL, a3, row, LANES);
        for (int i = 0; i < 2; i++) {
            const int column = 4 * (2 * quarter + i) + j;
            const uint32_t y0 = __shfl_sync(ALL, b0, column, LANES), y1 = __shfl_sync(ALL, b1, column, LANES);
            c[i] = add(add(c[i], x0, y0), x2, y1);
            c[2 + i] = add(add(c[2 + i], x1, y0), x3, y1);
        }
    }
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Weights pass by once: they stay out of L1. Zeros where not `wanted`.
__device__ __forceinline__ uint4 load_weights(const __half* p, bool wanted) {
    uint4 v = make_uint4(0, 0, 0, 0);
#ifdef RWKV_HIP
    if (wanted) v = *reinterpret_cast<const uint4*>(p);
#else
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n"
        "@wanted ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(p), "r"(int(wanted)));
#endif
    return v;
}

// 16 bytes into shared memory, on their way until `arrived`; zeros where not `wanted`.
__device__ __forceinline__ void copy16(__half* to, const __half* from, bool wanted) {
#ifdef RWKV_HIP
    *reinterpret_cast<uint4*>(to) = wanted ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from),
                 "r"(wanted ? 16 : 0)
                 : "memory");
#endif
}
__device__ __forceinline__ void end_copies() {
#ifndef RWKV_HIP
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All but the last LEFT groups of copies.
template <int LEFT>
__device__ __forceinline__ void arrived() {
#ifndef RWKV_HIP
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// The second operands of two neighbouring products of 16 columns, from column `c` and m `at` on: {first, first, second, second}.
__device__ __forceinline__ void load_up(uint32_t (&b)[4], const __half (*tile)[PITCH], int c, int at) {
    const int lane = threadIdx.x % LANES;
#ifdef RWKV_HIP
    for (int j = 0; j < 4; j++) {
        const int row = c + 2 * (lane % 4) + j % 2 * 8, m = at + lane / 4 + j / 2 * 8;
        __half2 pair;
        pair.x = tile[row][m], pair.y = tile[row + 1][m];
        b[j] = *reinterpret_cast<const uint32_t*>(&pair);
    }
#else
    const __half* from = &tile[c + lane % 8 + lane / 8 % 2 * 8][at + lane / 16 * 8];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(uint32_t(__cvta_generic_to_shared(from)))
                 : "memory");
#endif
}

// ---- Which tokens have which columns.

// Tables on the device, made anew for each step: `header` {units, tiles of tokens with columns, all tiles, tokens with columns},
// `tiles` and `units` {first place, tokens, first column in `columns`, columns}, of units with the first one's number within its
// adapter in the upper half of the last; `order`: the token at each place; `columns`: the columns of all adapters of the step.
struct Tables {
    int* header;
    uint4 *tiles, *units;
    int *order, *columns;
};

struct Grouping {
    const int64_t *slots, *of_slot, *owner;  // the adapter's number of each slot and of each column, 0 and -1 = none
    const int32_t* starts;                   // [rows + 1] of a prefill's tokens; null: one token a row
    int rows, tokens, num_columns;
    int tile_tokens, unit_columns;
    Tables to;
};

__device__ __forceinline__ int number_of(const Grouping& g, int token) {
    int row = token;
    if (g.starts) {
        if (token >= g.starts[g.rows]) return 0;
        int low = 0, high = g.rows;  // starts[low] <= token < starts[high]
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (g.starts[middle] <= token ? low : high) = middle;
        }
        row = low;
    }
    const int64_t slot = g.slots[row];
    return slot < 0 ? 0 : int(g.of_slot[slot]);
}

__device__ __forceinline__ int lane_scan_int(int v) {
    const int lane = threadIdx.x % LANES;
    for (int d = 1; d < LANES; d *= 2) {
        const int below = __shfl_up_sync(ALL, v, d, LANES);
        if (lane >= d) v += below;
    }
    return v;
}

// An adapter stands at the number of its first column. One block; tokens of an adapter come in any order, on which nothing depends.
// It does not let the next kernel start early, since those behind it read its tables before they wait.
__global__ void __launch_bounds__(GROUPING_THREADS) grouping_kernel(const __grid_constant__ Grouping g) {
    __shared__ __align__(16) int owners[MAX_COLUMNS];  // filled up to whole loads of eight
    __shared__ int place_of_column[MAX_COLUMNS];
    __shared__ int tokens_of[MAX_COLUMNS + 1], columns_of[MAX_COLUMNS];  // by place: counts, then where they begin
    __shared__ int sums[4][GROUPING_WARPS];
    const int columns = g.num_columns, lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    wait_for_previous();
    for (int c = threadIdx.x; c <= (columns + 7) / 8 * 8; c += GROUPING_THREADS) {
        if (c <= columns) tokens_of[c] = 0;
        if (c < columns) columns_of[c] = 0;
        if (c < MAX_COLUMNS) owners[c] = c < columns ? int(g.owner[c]) : NONE_COLUMN;
    }
    __syncthreads();
    const auto place_of = [&](int number) {  // of an adapter, `columns` = none
        if (number <= 0) return columns;
        for (int c = 0; c < columns; c += 8) {
            const uint4 low = *reinterpret_cast<const uint4*>(owners + c), high = *reinterpret_cast<const uint4*>(owners + c + 4);
            const uint32_t eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (int(eight[j]) == number) return c + j;
        }
        return columns;
    };
    for (int t = threadIdx.x; t < g.tokens; t += GROUPING_THREADS) atomicAdd(&tokens_of[place_of(number_of(g, t))], 1);
    for (int c = threadIdx.x; c < columns; c += GROUPING_THREADS) {
        const int place = place_of_column[c] = place_of(owners[c]);
        if (place < columns) atomicAdd(&columns_of[place], 1);
    }
    __syncthreads();

    const int share = (columns + GROUPING_THREADS - 1) / GROUPING_THREADS, first = threadIdx.x * share;
    int own[4] = {};  // tokens, columns, tiles, units of this thread's adapters, then where they begin
    for (int p = first; p < min(first + share, columns); p++) {
        if (!tokens_of[p]) continue;
        const int tiles = (tokens_of[p] + g.tile_tokens - 1) / g.tile_tokens;
        own[0] += tokens_of[p], own[1] += columns_of[p], own[2] += tiles;
        own[3] += tiles * ((columns_of[p] + g.unit_columns - 1) / g.unit_columns);
    }
    int through[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        through[j] = lane_scan_int(own[j]);
        if (lane == LANES - 1) sums[j][warp] = through[j];
    }
    __syncthreads();
    if (warp < 4) {
        const int v = lane < GROUPING_WARPS ? sums[warp][lane] : 0, sum = lane_scan_int(v);
        if (lane < GROUPING_WARPS) sums[warp][lane] = sum;
    }
    __syncthreads();
    int total[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        own[j] = through[j] - own[j] + (warp ? sums[j][warp - 1] : 0);
        total[j] = sums[j][GROUPING_WARPS - 1];
    }
    const auto write = [&](int count, int rank, int (&at)[4]) {
        for (int i = 0; i < count; i += g.tile_tokens) {
            const int tokens = min(g.tile_tokens, count - i);
            g.to.tiles[at[2]++] = make_uint4(at[0] + i, tokens, at[1], rank);
            for (int c = 0; c < rank; c += g.unit_columns)
                g.to.units[at[3]++] = make_uint4(at[0] + i, tokens, at[1] + c, c << 16 | min(g.unit_columns, rank - c));
        }
    };
    for (int p = first; p < min(first + share, columns); p++) {
        const int count = tokens_of[p], rank = columns_of[p];
        columns_of[p] = count ? own[1] : NONE_COLUMN;
        if (!count) continue;
        tokens_of[p] = own[0];
        write(count, rank, own);
        own[0] += count, own[1] += rank;
    }
    if (threadIdx.x == 0) {  // tokens without an adapter, behind the others
        int at[4] = {total[0], total[1], total[2], total[3]};
        const int count = tokens_of[columns];
        tokens_of[columns] = total[0];
        write(count, 0, at);
        g.to.header[0] = total[3], g.to.header[1] = total[2], g.to.header[2] = at[2], g.to.header[3] = total[0];
    }
    __syncthreads();
    for (int t = threadIdx.x; t < g.tokens; t += GROUPING_THREADS)
        g.to.order[atomicAdd(&tokens_of[place_of(number_of(g, t))], 1)] = t;
    for (int c = threadIdx.x; c < columns; c += GROUPING_THREADS) {
        const int place = place_of_column[c];
        if (place == columns || columns_of[place] == NONE_COLUMN) continue;
        int before = 0;
        for (int i = place; i < c; i++) before += owners[i] == owners[c];
        g.to.columns[columns_of[place] + before] = c;
    }
}

// ---- Down.

struct Down {
    const __half* x;     // [planes, tokens, width]
    const __half* down;  // [planes, columns, width]
    float* hidden;       // [parts, planes, tokens, pitch], tokens by place
    Tables tables;       // header null: all tokens have all columns
    int tokens, width, columns, pitch, pieces;  // pieces of K to a block
};

// A block takes a unit: up to 16 * TILES tokens and 8 * COLS columns, and of K some pieces of STEPS * 256 values.
template <int TILES, int COLS, int STEPS>
__global__ void __launch_bounds__(DOWN_WARPS* LANES, COLS > 1 ? 1 : STEPS > 4 ? 2 : 3) down_kernel(const __grid_constant__ Down d) {
    constexpr int VALUES = TILES * COLS * 4, PIECE = STEPS * DOWN_WARPS * STEP;
    __shared__ float parts[DOWN_WARPS][VALUES][LANES];
    release_next();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, group = lane / 4, quarter = lane % 4;
    const int plane = blockIdx.y, part = blockIdx.z;
    const int across = (d.columns + 8 * COLS - 1) / (8 * COLS);
    const int units = d.tables.header ? d.tables.header[0] : (d.tokens + 16 * TILES - 1) / (16 * TILES) * across;
    const __half* x = d.x + size_t(plane) * d.tokens * d.width + 8 * quarter;
    bool waiting = true;
    for (int u = blockIdx.x; u < units; u += gridDim.x) {
        int first, tokens, from, begin, count;  // of the unit: tokens by place, columns in the list
        if (d.tables.header) {
            const uint4 unit = d.tables.units[u];
            first = unit.x, tokens = unit.y, from = unit.z, begin = unit.w >> 16, count = unit.w & 0xffff;
        } else {
            first = u / across * 16 * TILES, tokens = min(16 * TILES, d.tokens - first);
            from = begin = u % across * 8 * COLS, count = min(8 * COLS, d.columns - begin);
        }
        const __half* weights[COLS];
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            int column = from + min(8 * c + group, count - 1);
            if (d.tables.header) column = d.tables.columns[column];
            weights[c] = d.down + (size_t(plane) * d.columns + column) * d.width + 8 * quarter;
        }
        int token[2 * TILES];  // -1 = none
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            const int at = 8 * i + group;
            token[i] = at >= tokens ? -1 : d.tables.header ? d.tables.order[first + at] : first + at;
        }
        float sum[TILES][COLS][4] = {};
        const auto load_tokens = [&](uint4(&a)[2 * TILES], int k) {
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                a[i] = make_uint4(0, 0, 0, 0);
                if (token[i] >= 0 && k < d.width) a[i] = *reinterpret_cast<const uint4*>(x + size_t(token[i]) * d.width + k);
            }
        };
        const auto multiply_step = [&](const uint4(&a)[2 * TILES], const uint4(&w)[COLS]) {
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int c = 0; c < COLS; c++) {  // a lane's 16 bytes are eight values of k, of which each product takes four
                    const uint4 &low = a[2 * t], &high = a[2 * t + 1];
                    multiply(sum[t][c], low.x, high.x, low.y, high.y, w[c].x, w[c].y);
                    multiply(sum[t][c], low.z, high.z, low.w, high.w, w[c].z, w[c].w);
                }
        };
        for (int piece = part * d.pieces; piece < (part + 1) * d.pieces; piece++) {
            const int start = piece * PIECE + warp * STEP;
            if (start - warp * STEP >= d.width) break;
            if constexpr (COLS == 1) {  // few tokens: all weights are asked for at once, and before the tokens are there
                uint4 w[STEPS][COLS];
#pragma unroll
                for (int s = 0; s < STEPS; s++) {
                    const int k = start + s * DOWN_WARPS * STEP;
                    w[s][0] = load_weights(weights[0] + k, k < d.width);
                }
                if (waiting) wait_for_previous();
                waiting = false;
                uint4 a[STEPS][2 * TILES];
#pragma unroll
                for (int s = 0; s < STEPS; s++) load_tokens(a[s], start + s * DOWN_WARPS * STEP);
#pragma unroll
                for (int s = 0; s < STEPS; s++) multiply_step(a[s], w[s]);
            } else {
                if (waiting) wait_for_previous();
                waiting = false;
#pragma unroll 2
                for (int s = 0; s < STEPS; s++) {
                    const int k = start + s * DOWN_WARPS * STEP;
                    uint4 w[COLS], a[2 * TILES];
#pragma unroll
                    for (int c = 0; c < COLS; c++) w[c] = load_weights(weights[c] + k, k < d.width);
                    load_tokens(a, k);
                    multiply_step(a, w);
                }
            }
        }
        if (waiting) wait_for_previous();
        waiting = false;
        if (u != int(blockIdx.x)) __syncthreads();  // the sums before these have been read
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int c = 0; c < COLS; c++)
#pragma unroll
                for (int j = 0; j < 4; j++) parts[warp][(t * COLS + c) * 4 + j][lane] = sum[t][c][j];
        __syncthreads();
        float* hidden = d.hidden + ((size_t(part) * gridDim.y + plane) * d.tokens + first) * d.pitch + begin;
        for (int i = threadIdx.x; i < VALUES * LANES; i += DOWN_WARPS * LANES) {
            const int value = i / LANES, l = i % LANES;
            const int at = value / (4 * COLS) * 16 + l / 4 + value % 4 / 2 * 8, column = value / 4 % COLS * 8 + l % 4 * 2 + value % 2;
            float total = 0.f;
#pragma unroll
            for (int w = 0; w < DOWN_WARPS; w++) total += parts[w][value][l];
            if (at < tokens && column < count) hidden[size_t(at) * d.pitch + column] = total;
        }
    }
    if (waiting && blockIdx.x == 0) wait_for_previous();  // others leave their places to blocks that have something to do
}

// ---- Up.

enum Behind : int {
    ADD = 0,           // to `out`, fp16
    ADD_SQUARE = 1,    // and the squared ReLU of that, of tokens without columns too
    BLEND = 2,         // out = from + (to - from) * (bias + sum), fp16
    BIAS = 3           // out = bias + sum, fp32
};

struct Up {
    const float* hidden;  // [parts, ...], see `part_step`
    const __half* up;     // [planes, columns, width]
    Tables tables;        // header null: all tokens have all columns
    void* out;            // [planes, tokens, width]
    const __half *from, *to;  // of BLEND, [tokens, width]
    const float* bias;        // [planes, width]
    int tokens, width, columns, pitch, parts;
    int plane_step;     // of hidden, between planes
    size_t part_step;   // and between parts
    int behind, tanh;   // tanh: of hidden, once it is summed
};

// A block takes up to 16 * TILES tokens and SPAN of m.
template <int TILES>
__global__ void __launch_bounds__(UP_WARPS* LANES) up_kernel(const __grid_constant__ Up u) {
    constexpr int TOKENS = 16 * TILES, THREADS = UP_WARPS * LANES;
    __shared__ __align__(16) __half tile[2][CHUNK][PITCH];
    __shared__ __align__(16) __half left[TOKENS][HIDDEN_PITCH];
    release_next();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, group = lane / 4, quarter = lane % 4;
    const int plane = blockIdx.z, begin = blockIdx.y * SPAN, own = begin + warp * 64;
    const int tiles = u.tables.header ? u.tables.header[u.behind == ADD_SQUARE ? 2 : 1] : (u.tokens + TOKENS - 1) / TOKENS;
    const __half* up = u.up + size_t(plane) * u.columns * u.width;
    bool waiting = true;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        int first = i * TOKENS, tokens = min(TOKENS, u.tokens - first), from = 0, rank = u.columns;
        if (u.tables.header) {
            const uint4 found = u.tables.tiles[i];
            first = found.x, tokens = found.y, from = found.z, rank = found.w;
        }
        const auto fetch = [&](int chunk) {  // each warp some columns, whose places its lanes look up together
            constexpr int OWN = CHUNK / UP_WARPS;
            const int column = chunk * CHUNK + warp * OWN + lane % OWN, m = begin + 8 * lane;
            int line = -1;
            if (column < rank) line = u.tables.header ? u.tables.columns[from + column] : column;
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                const int at = __shfl_sync(ALL, line, j, LANES);
                const bool wanted = at >= 0 && m < u.width;
                copy16(&tile[chunk % 2][warp * OWN + j][8 * lane], wanted ? up + size_t(at) * u.width + m : up, wanted);
            }
            end_copies();
        };
        int token[2 * TILES];  // -1 = none
#pragma unroll
        for (int t = 0; t < 2 * TILES; t++) {
            const int at = 8 * t + group;
            token[t] = at >= tokens || own >= u.width ? -1 : u.tables.header ? u.tables.order[first + at] : first + at;
        }
        if (i != int(blockIdx.x)) __syncthreads();
        if (rank) fetch(0);
        if (waiting) wait_for_previous();
        waiting = false;

        const auto place = [&](int t, int n) { return size_t(token[t]) * u.width + own + 8 * n + 2 * quarter; };
        const __half2 nothing = __floats2half2_rn(0.f, 0.f);
        __half2 before[2 * TILES][8];  // what is added to, or blended from
#pragma unroll
        for (int t = 0; t < 2 * TILES; t++)
#pragma unroll
            for (int n = 0; n < 8; n++) {
                before[t][n] = nothing;
                if (token[t] < 0 || u.behind == BIAS) continue;
                const __half* at = u.behind == BLEND ? u.from : static_cast<const __half*>(u.out) + size_t(plane) * u.tokens * u.width;
                before[t][n] = *reinterpret_cast<const __half2*>(at + place(t, n));
            }
        float sum[TILES][8][4] = {};
        const int chunks = (rank + CHUNK - 1) / CHUNK;
        for (int chunk = 0; chunk < chunks; chunk++) {
            if (chunk + 1 < chunks) fetch(chunk + 1);
            for (int j = threadIdx.x; j < TOKENS * CHUNK / 4; j += THREADS) {
                const int at = j / (CHUNK / 4), c = chunk * CHUNK + j % (CHUNK / 4) * 4;
                float v[4] = {};
                if (at < tokens && c < rank) {
                    const float* h = u.hidden + size_t(plane) * u.plane_step + size_t(first + at) * u.pitch + c;
                    float4 four[MAX_PARTS];  // all on their way together
#pragma unroll
                    for (int p = 0; p < MAX_PARTS; p++) {
                        four[p] = make_float4(0.f, 0.f, 0.f, 0.f);
                        if (p < u.parts) four[p] = *reinterpret_cast<const float4*>(h + p * u.part_step);
                    }
#pragma unroll
                    for (int p = 0; p < MAX_PARTS; p++) v[0] += four[p].x, v[1] += four[p].y, v[2] += four[p].z, v[3] += four[p].w;
#pragma unroll
                    for (int e = 0; e < 4; e++) v[e] = c + e >= rank ? 0.f : u.tanh ? tanhf(v[e]) : v[e];
                }
                __half2* to = reinterpret_cast<__half2*>(&left[at][j % (CHUNK / 4) * 4]);
                to[0] = __floats2half2_rn(v[0], v[1]), to[1] = __floats2half2_rn(v[2], v[3]);
            }
            if (chunk + 1 < chunks) arrived<1>();
            else arrived<0>();
            __syncthreads();
            if (own < u.width) {
#pragma unroll
                for (int c = 0; c < CHUNK; c += 16) {
                    uint32_t a[TILES][4];
#pragma unroll
                    for (int t = 0; t < TILES; t++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            a[t][j] = *reinterpret_cast<const uint32_t*>(
                                &left[16 * t + group + j % 2 * 8][c + 2 * quarter + j / 2 * 8]);
#pragma unroll
                    for (int n = 0; n < 8; n += 2) {
                        uint32_t b[4];
                        load_up(b, tile[chunk % 2], c, warp * 64 + 8 * n);
#pragma unroll
                        for (int t = 0; t < TILES; t++) {
                            multiply(sum[t][n], a[t][0], a[t][1], a[t][2], a[t][3], b[0], b[1]);
                            multiply(sum[t][n + 1], a[t][0], a[t][1], a[t][2], a[t][3], b[2], b[3]);
                        }
                    }
                }
            }
            if (chunk + 1 < chunks) __syncthreads();
        }
#pragma unroll
        for (int t = 0; t < 2 * TILES; t++)
#pragma unroll
            for (int n = 0; n < 8; n++) {
                if (token[t] < 0) continue;
                const size_t at = size_t(plane) * u.tokens * u.width + place(t, n);
                float2 v = make_float2(sum[t / 2][n][t % 2 * 2], sum[t / 2][n][t % 2 * 2 + 1]);
                const float2 old = __half22float2(before[t][n]);
                if (u.behind >= BLEND) {
                    const float2 bias = *reinterpret_cast<const float2*>(u.bias + size_t(plane) * u.width + own + 8 * n + 2 * quarter);
                    v.x += bias.x, v.y += bias.y;
                }
                if (u.behind == BIAS) {
                    *reinterpret_cast<float2*>(static_cast<float*>(u.out) + at) = v;
                    continue;
                }
                if (u.behind == BLEND) {
                    const float2 to = __half22float2(*reinterpret_cast<const __half2*>(u.to + place(t, n)));
                    v.x = fmaf(v.x, to.x - old.x, old.x), v.y = fmaf(v.y, to.y - old.y, old.y);
                } else {
                    v.x += old.x, v.y += old.y;
                }
                if (u.behind == ADD_SQUARE) {
                    v.x = fmaxf(v.x, 0.f), v.y = fmaxf(v.y, 0.f);
                    v.x = fminf(v.x * v.x, LARGEST_HALF), v.y = fminf(v.y * v.y, LARGEST_HALF);
                }
                *reinterpret_cast<__half2*>(static_cast<__half*>(u.out) + at) = __floats2half2_rn(v.x, v.y);
            }
    }
    if (waiting && blockIdx.x == 0) wait_for_previous();
}

Tables tables_at(int* at, int tokens, int columns, int max_tiles) {
    Tables t = {};
    if (!at) return t;
    t.header = at;
    t.tiles = reinterpret_cast<uint4*>(at + 4);
    t.order = at + 4 + 4 * max_tiles;
    t.columns = t.order + (tokens + 3) / 4 * 4;
    t.units = reinterpret_cast<uint4*>(t.columns + (columns + 3) / 4 * 4);
    return t;
}

}  // namespace
}  // namespace rwkv

// tables: see `Tables`; as long as `table_words` in Python says for so many tokens, columns and tiles.
RWKV_EXPORT int rwkv_group_tokens(const int64_t* slots, const int64_t* of_slot, const int64_t* owner, const int32_t* starts,
        int* tables, int rows, int tokens, int columns, int max_tiles, int tile_tokens, int unit_columns, cudaStream_t stream) {
    if (columns < 1 || columns > rwkv::MAX_COLUMNS || tokens < 1) return cudaErrorInvalidValue;
    const rwkv::Grouping g = {slots, of_slot, owner, starts, rows, tokens, columns, tile_tokens, unit_columns,
                              rwkv::tables_at(tables, tokens, columns, max_tiles)};
    return rwkv::start(rwkv::grouping_kernel, {dim3(1), dim3(rwkv::GROUPING_THREADS), stream}, g);
}

// tables null: all tokens have all columns. many: units of 32 tokens and 32 columns instead of 16 and 8; long_steps: pieces of 2048
// values of k instead of 1024; pieces: of them to a block, so many that `parts` blocks take all of K.
RWKV_EXPORT int rwkv_thin_down(const __half* x, const __half* down, float* hidden, int* tables, int planes, int tokens, int width,
        int columns, int pitch, int max_tiles, int many, int long_steps, int pieces, int parts, int blocks, int overlap,
        cudaStream_t stream) {
    if (width % 32 || blocks < 1 || planes < 1 || parts < 1) return cudaErrorInvalidValue;
    rwkv::Down d = {x, down, hidden, rwkv::tables_at(tables, tokens, columns, max_tiles), tokens, width, columns, pitch, pieces};
    const rwkv::Launch how = {dim3(blocks, planes, parts), dim3(rwkv::DOWN_WARPS * rwkv::LANES), stream, overlap};
    if (many) return rwkv::start(rwkv::down_kernel<2, 4, 4>, how, d);
    if (long_steps) return rwkv::start(rwkv::down_kernel<1, 1, 8>, how, d);
    return rwkv::start(rwkv::down_kernel<1, 1, 4>, how, d);
}

// behind: see `Behind`; apart: whether each plane has a hidden of its own, else `columns` of one that all share.
RWKV_EXPORT int rwkv_thin_up(const float* hidden, const __half* up, int* tables, void* out, const __half* from, const __half* to,
        const float* bias, int planes, int tokens, int width, int columns, int pitch, int max_tiles, int many, int parts, int apart,
        int behind, int tanh, int blocks, int overlap, cudaStream_t stream) {
    if (width % 64 || blocks < 1 || planes < 1 || parts < 1 || parts > rwkv::MAX_PARTS || pitch % 4 || columns % (apart ? 1 : 4)) return cudaErrorInvalidValue;
    const size_t plane = size_t(tokens) * pitch;
    const rwkv::Up u = {hidden, up, rwkv::tables_at(tables, tokens, columns, max_tiles), out, from, to, bias, tokens, width, columns,
                        pitch, parts, apart ? int(plane) : columns, apart ? planes * plane : plane, behind, tanh};
    const rwkv::Launch how = {dim3(blocks, (width + rwkv::SPAN - 1) / rwkv::SPAN, planes), dim3(rwkv::UP_WARPS * rwkv::LANES),
                              stream, overlap};
    return many ? rwkv::start(rwkv::up_kernel<2>, how, u) : rwkv::start(rwkv::up_kernel<1>, how, u);
}
