// Both products with the LoRA pairs of up to 16 tokens, by thread blocks beside those of a larger product in the same launch
// (`inputs` in gemm.cu), so that what they wait for passes while that one reads its weights.
//
// Every block has some tiles of 8 rows of lora_down, and of lora_up once all blocks have done with lora_down.
// They meet at a counter; all of them must be running, which `inputs` sees to. Of lora_down, whose sums are long, each warp
// has an eighth of k, and the warps' sums are added in their order; a tile of lora_up belongs to one warp. So the order
// of all sums depends on the shapes alone.
//
// A lane's 16 bytes are eight values of k of one row; the fragments of two mma take four each. That permutes k, the same way for
// x and weights.
#pragma once

#include "hopper.cuh"
#include "products.cuh"

namespace rwkv {

constexpr int PAIR_WARPS = 8, PAIR_ROWS = 8;  // PAIR_ROWS: of weights, to a tile
constexpr int PAIR_STEP = 32;                 // values of k that four lanes read with one 16-byte load each
constexpr int PAIR_SLICE = 512;               // values of k of a warp's part of lora_down, at most, and ranks of a pair
constexpr int PAIR_TILES = 3;                 // of lora_down, at once
constexpr int PAIR_BATCH = 8;                 // steps whose x is on its way at once

struct Pairs {
    Products lora_down, lora_up;  // with tiles of PAIR_ROWS; `lora_up` reads what `lora_down` writes
    const __half* hidden;
    unsigned long long* arrived;  // by how many blocks, ever; only launches with as many blocks count there
    int rank;                     // width of hidden
    int blocks;
};

// Rows of `bytes`, a multiple of 64, lie so far apart in shared memory that fragments meet no bank twice.
__host__ __device__ constexpr int pair_pitch(int bytes) { return bytes | 64; }

// Bytes of a block's shared memory: a stage for each warp and tile and all warps' sums, in whose place come hidden and then, in
// two rooms for each warp, weights of lora_up.
struct PairSpace {
    int stage, sums, hidden, room, total;
    __host__ __device__ PairSpace(int slice, int rank, int halves) {
        stage = PAIR_ROWS * pair_pitch(slice * 2);
        sums = PAIR_WARPS * PAIR_TILES * stage;
        hidden = 8 * halves * pair_pitch(rank * 2);
        const int least = hidden + PAIR_WARPS * 2 * PAIR_ROWS * PAIR_SLICE * 2;  // any tile has room
        total = max(sums + PAIR_TILES * PAIR_WARPS * halves * LANES * int(sizeof(float2)), least);
        room = (total - hidden) / (PAIR_WARPS * 2) / 128 * 128;
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Add to `sum` the products of weights and x at a lane's eight values of k, of tokens t and t + 8.
__device__ __forceinline__ void multiply_eight(float (&sum)[4], const uint4 (&x)[2], const uint4& w) {
    mma(sum, x[0].x, x[1].x, x[0].y, x[1].y, w.x, w.y);
    mma(sum, x[0].z, x[1].z, x[0].w, x[1].w, w.z, w.w);
}

// Some tiles of lora_up that a warp has asked for; four lanes know of one.
struct Coming {
    int count;  // how many
    int item, row, offset;  // of this lane's: its product, first row, and place in the warp's room
    float2 bias;
};

template <int HALVES>
__device__ __forceinline__ void lora_pairs(const Pairs& pairs, int block, uint8_t* memory) {
    __shared__ uint64_t full[PAIR_WARPS][PAIR_TILES], come[PAIR_WARPS][2];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, group = lane / 4, quarter = lane % 4;
    if (warp >= PAIR_WARPS) return;
    const auto sync = [] { sync_threads(1, PAIR_WARPS * LANES); };
    const Products &lora_down = pairs.lora_down, &lora_up = pairs.lora_up;
    const int num_tokens = lora_down.num_tokens, slice = lora_down.item[0].width / PAIR_WARPS;
    const PairSpace space(slice, pairs.rank, HALVES);
    if (lane < PAIR_TILES) init_barrier(&full[warp][lane], 1);
    if (lane < 2) init_barrier(&come[warp][lane], 1);
    publish_barriers();
    __syncwarp();

    const int first = block * lora_down.tiles / pairs.blocks, last = (block + 1) * lora_down.tiles / pairs.blocks;
    const int pitch = pair_pitch(slice * 2);
    uint8_t* const stages = memory + warp * PAIR_TILES * space.stage;
    auto fetch_down = [&](int from) {
        const int count = min(PAIR_TILES, last - from);
        if (lane < count) expect_bytes(&full[warp][lane], PAIR_ROWS * slice * 2);
        __syncwarp();
        const int t = lane / PAIR_ROWS, tile = from + t;
        if (t >= count) return;
        const int i = lora_down.of(tile), row = (tile - lora_down.first_tile[i]) * PAIR_ROWS + lane % PAIR_ROWS;
        copy_row(stages + t * space.stage + lane % PAIR_ROWS * pitch,
                 lora_down.item[i].weight + int64_t(row) * lora_down.item[i].width + warp * slice, slice * 2, &full[warp][t]);
    };
    // Tiles of lora_up are dealt out one by one, so that every block and warp gets its share of every pair.
    int next = block + warp * pairs.blocks;
    uint8_t* const rooms = memory + space.hidden + warp * 2 * space.room;
    auto fetch_up = [&](int side) {
        Coming c;
        const int tile = next + group * PAIR_WARPS * pairs.blocks;
        c.item = lora_up.of(min(tile, lora_up.tiles - 1)), c.row = (tile - lora_up.first_tile[c.item]) * PAIR_ROWS;
        const Product& p = lora_up.item[c.item];
        const int bytes = tile < lora_up.tiles ? PAIR_ROWS * p.width * 2 : space.room + 1;
        int end = bytes;
#pragma unroll
        for (int d = 4; d < LANES; d *= 2) {
            const int before = __shfl_up_sync(ALL, end, d);
            if (lane >= d) end += before;
        }
        c.count = __popc(__ballot_sync(ALL, end <= space.room)) / 4, c.offset = side * space.room + end - bytes;
        c.bias = make_float2(0.f, 0.f);
        if (c.count == 0) return c;
        const int all = __shfl_sync(ALL, end, c.count * 4 - 1);
        if (lane == 0) expect_bytes(&come[warp][side], all);
        __syncwarp();
        if (group < c.count) {
            if (quarter == 0) copy_row(rooms + c.offset, p.weight + int64_t(c.row) * p.width, bytes, &come[warp][side]);
            if (p.bias) c.bias = *reinterpret_cast<const float2*>(p.bias + c.row + 2 * quarter);
        }
        next += c.count * PAIR_WARPS * pairs.blocks;
        return c;
    };

    if (first < last) fetch_down(first);
    release_next();
    wait_for_previous();
    auto sums = reinterpret_cast<float2(*)[HALVES][PAIR_WARPS][LANES]>(memory + space.sums);  // of each tile
#pragma unroll 1
    for (int from = first, round = 0; from < last; from += PAIR_TILES, round++) {
        const int count = min(PAIR_TILES, last - from);
        if (round > 0) {
            sync();  // the sums before have been read
            fetch_down(from);
        }
        const __half* x[PAIR_TILES];
        float sum[PAIR_TILES][4] = {};
#pragma unroll
        for (int t = 0; t < PAIR_TILES; t++) {
            const Product& p = lora_down.item[lora_down.of(min(from + t, last - 1))];
            x[t] = p.x + int64_t(group) * p.x_stride + warp * slice + 8 * quarter;
        }
        const int64_t eight_tokens = int64_t(8) * lora_down.item[0].x_stride;
#pragma unroll 1
        for (int k = 0; k < slice; k += PAIR_BATCH * PAIR_STEP) {
            uint4 v[PAIR_BATCH][2];
#pragma unroll
            for (int t = 0; t < PAIR_TILES; t++) {
                if (t >= count) break;
                if (t == 0 || x[t] != x[t - 1])
#pragma unroll
                    for (int s = 0; s < PAIR_BATCH; s++)
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            v[s][h] = make_uint4(0, 0, 0, 0);
                            if (h < HALVES && group + 8 * h < num_tokens && k + s * PAIR_STEP < slice)
                                v[s][h] = *reinterpret_cast<const uint4*>(x[t] + h * eight_tokens + k + s * PAIR_STEP);
                        }
                if (k == 0) wait(&full[warp][t], round & 1);
                const uint8_t* const row = stages + t * space.stage + group * pitch + quarter * 16 + k * 2;
#pragma unroll
                for (int s = 0; s < PAIR_BATCH; s++) {
                    if (k + s * PAIR_STEP >= slice) break;
                    multiply_eight(sum[t], v[s], *reinterpret_cast<const uint4*>(row + s * PAIR_STEP * 2));
                }
            }
        }
#pragma unroll
        for (int t = 0; t < PAIR_TILES; t++)
#pragma unroll
            for (int h = 0; h < HALVES; h++) sums[t][h][warp][lane] = make_float2(sum[t][2 * h], sum[t][2 * h + 1]);
        sync();
        const int t = warp / HALVES, token = group + warp % HALVES * 8;  // which this warp finishes
        if (t < count && token < num_tokens) {
            float v[2] = {};
#pragma unroll
            for (int w = 0; w < PAIR_WARPS; w++) {
                const float2 part = sums[t][warp % HALVES][w][lane];
                v[0] += part.x, v[1] += part.y;
            }
            const int i = lora_down.of(from + t);
            store<2>(lora_down.item[i], token, (from + t - lora_down.first_tile[i]) * PAIR_ROWS + 2 * quarter, v);
        }
    }

    publish_stores();  // sums lie where weights come
    sync();            // hidden is written, stages and sums are used up
    unsigned long long before = 0;
    if (threadIdx.x == 0)
        asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(pairs.arrived) : "memory");
    Coming coming[2] = {fetch_up(0), fetch_up(1)};
    if (threadIdx.x == 0) {
        const unsigned long long all = (before / pairs.blocks + 1) * pairs.blocks;
        unsigned long long now;
        do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(pairs.arrived) : "memory");
        while (now < all);
    }
    sync();
    const int eights = pairs.rank / 8, hidden_pitch = pair_pitch(pairs.rank * 2);
#pragma unroll 4
    for (int i = threadIdx.x; i < num_tokens * eights; i += PAIR_WARPS * LANES)
        *reinterpret_cast<uint4*>(memory + i / eights * hidden_pitch + i % eights * 16) =
            __ldcg(reinterpret_cast<const uint4*>(pairs.hidden) + i);
    sync();
    for (int phase = 0; coming[0].count > 0; phase ^= 1) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
            Coming& c = coming[side];
            if (c.count == 0) break;
            wait(&come[warp][side], phase);
#pragma unroll 1
            for (int j = 0; j < c.count; j++) {
                const Product& p = lora_up.item[__shfl_sync(ALL, c.item, j * 4)];
                const int row = __shfl_sync(ALL, c.row, j * 4) + 2 * quarter, width = p.width;
                const float2 bias{__shfl_sync(ALL, c.bias.x, j * 4 + quarter), __shfl_sync(ALL, c.bias.y, j * 4 + quarter)};
                const uint8_t* const x = memory + group * hidden_pitch + (p.x - pairs.hidden) * 2 + quarter * 16;
                const uint8_t* const w = rooms + __shfl_sync(ALL, c.offset, j * 4) + group * width * 2 + quarter * 16;
                float sum[4] = {};
#pragma unroll 4
                for (int k = 0; k < width * 2; k += PAIR_STEP * 2) {
                    uint4 v[2] = {};
#pragma unroll
                    for (int h = 0; h < HALVES; h++) v[h] = *reinterpret_cast<const uint4*>(x + 8 * h * hidden_pitch + k);
                    multiply_eight(sum, v, *reinterpret_cast<const uint4*>(w + k));
                }
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    float v[2] = {sum[2 * h] + bias.x, sum[2 * h + 1] + bias.y};
                    if (group + 8 * h < num_tokens) store<2>(p, group + 8 * h, row, v);
                }
            }
            __syncwarp();
            c = fetch_up(side);
        }
    }
}

#endif

}  // namespace rwkv
