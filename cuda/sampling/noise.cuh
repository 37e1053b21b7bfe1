// The column with the largest logit after noise, Gumbel's or uniform, by one pass over the row.
#pragma once

#include "row.cuh"

namespace rwkv {

constexpr float GUMBEL_MAX = 9.6885f;  // above all Gumbel numbers

__device__ __forceinline__ float noise_of(uint32_t word, float width) { return __fmul_rn(width, uniform(word)); }
__device__ __forceinline__ float gumbel_of(uint32_t word) { return -logf(fmaxf(-logf(uniform(word)), 6.2e-5f)); }

// The larger ones of two pairs of halves, or NaN when one is.
__device__ __forceinline__ uint32_t max_of_pairs(uint32_t a, uint32_t b) {
#ifdef RWKV_HIP
    const float2 x = floats_of(a), y = floats_of(b);
    return halves_of(max_or_nan(x.x, y.x), max_or_nan(x.y, y.y));
#else
    uint32_t most;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
#endif
}
// Whether each of a pair of halves is at least as large as those of another; a NaN is not.
struct Both {
    bool first, second;
};
__device__ __forceinline__ Both at_least(uint32_t pair, uint32_t bar) {
    const float2 a = floats_of(pair), b = floats_of(bar);
    return {a.x >= b.x, a.y >= b.y};
}
constexpr float MIN_HALF = -65504.f;  // above -inf, which cannot win
// A value twice as a half, rounded down.
__device__ __forceinline__ uint32_t half_below(float x) {
    const float below = -to_float(__float2half_ru(-x));
    return halves_of(below, below);
}
// The first halves of two pairs, and the second ones.
__device__ __forceinline__ uint32_t first_halves(uint32_t a, uint32_t b) { return (a & 0xffff) | b << 16; }
__device__ __forceinline__ uint32_t second_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000); }

// The column with the largest x = value / temperature after noise, the lowest of several; none when a logit is NaN, or the
// largest x is not finite. A single pass over the row, which nothing needs to be known of before.
//
// Columns go in fours, which share a call of the generator. Most fours cannot win: they are too far below the largest found so
// far, whatever their noise. The others wait in the warp's queue until there is one for each lane. From the largest number of
// four the noise is bounded: logarithms are left to the few that may win.
template <bool DENSE, class R>
struct NoisyMax {
    static constexpr int AHEAD = DENSE ? 1 : 2;  // parts that are on their way while as many are worked on
    const R& row;
    const Controls controls;
    const bool gumbel, in_fours;  // four neighbouring columns share one call of the generator
    const uint32_t first_block;   // of token ids, should they share it
    const float inverse, reach;   // no noise is above `reach`
    uint32_t* const queue;        // of the warp: a four's largest value, rounded up to a half, and its number below
    int queued = 0;
    float least = -INFINITY;  // what a bound must reach, see `least_of`; as of the last look at what was found
    float own = -INFINITY;  // the largest found by the thread
    int own_column = NONE;

    __device__ __forceinline__ explicit NoisyMax(const R& row)
        : row(row),
          controls(shared().controls),
          gumbel(controls.method == GUMBEL),
          in_fours(!row.a.ids && row.a.first_id % 4 == 0),
          first_block(uint32_t(row.a.first_id / 4)),
          inverse(1 / controls.temperature),
          reach(gumbel ? GUMBEL_MAX : controls.noise),
          queue(shared().queues[threadIdx.x / LANES]) {}

    // The largest found by the block.
    __device__ __forceinline__ float found() const {
        return value_of(__shfl_sync(ALL, threadIdx.x % LANES == 0 ? atomicMax(&shared().found, 0u) : 0u, 0, LANES));
    }
    // What a bound must reach to be at least `best`; with room for rounding.
    __device__ __forceinline__ float least_of(float best) const { return best - 1e-5f * (fabsf(best) + reach + 1.f); }

    // The largest values of a vector's two fours as halves, rounded up; `broken` when a logit is NaN or +inf. FINAL: but for the end
    // token, the columns in memory are halves and final.
    template <bool FINAL, class P>
    __device__ __forceinline__ uint32_t highs_of(int vector, P raw, bool& broken) const {
        if constexpr (FINAL) {
            if (vector == 0 && row.end_masked) raw.words[0] = first_halves(MINUS_INFINITY_HALVES, raw.words[0] >> 16);
            const uint32_t a = max_of_pairs(raw.words[0], raw.words[1]), b = max_of_pairs(raw.words[2], raw.words[3]);
            const uint32_t highs = max_of_pairs(first_halves(a, b), second_halves(a, b));
            const float2 both = floats_of(highs);
            broken |= !(both.x < INFINITY) | !(both.y < INFINITY);
            return highs;
        } else {
            float v[8];
            row.finish(vector, raw.unpack(), v);
            const float a = max_or_nan(max_or_nan(v[0], v[1]), max_or_nan(v[2], v[3]));
            const float b = max_or_nan(max_or_nan(v[4], v[5]), max_or_nan(v[6], v[7]));
            broken |= !(max_or_nan(a, b) < INFINITY);
            return halves_of(to_float(__float2half_ru(a)), to_float(__float2half_ru(b)));
        }
    }

    // The same for vectors that cannot be read at once. No call is made for them: what is on its method would go to local memory.
    __device__ __forceinline__ uint32_t highs_one_by_one(int vector, bool& broken) const {
        float highs[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int first = 8 * vector + 4 * i;
            if (row.plain && first + 4 <= row.a.num_columns) {
                const auto* four = row.logits + first;
                highs[i] = max_or_nan(max_or_nan(to_float(four[0]), to_float(four[1])),
                                      max_or_nan(to_float(four[2]), to_float(four[3])));
            } else {
                highs[i] = -INFINITY;
#pragma unroll
                for (int j = 0; j < 4; j++) highs[i] = max_or_nan(highs[i], row.value(first + j));
            }
            broken |= !(highs[i] < INFINITY);
        }
        return halves_of(to_float(__float2half_ru(highs[0])), to_float(__float2half_ru(highs[1])));
    }

    // For the whole warp: try one four of each lane, where it is `mine`. Whether it was necessary to look at all its noise.
    __device__ __forceinline__ bool try_fours(bool mine, uint32_t four) {
        const int first = 4 * (four & 0xffff);
        uint32_t words[4] = {0, 0, 0, 0};
        if (in_fours) {
            const uint4 all = controls.column_numbers(first_block + (four & 0xffff));
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        } else if (mine) {
#pragma unroll 1
            for (int j = 0; j < 4; j++) {
                if (first + j >= row.a.num_columns) continue;
                const int64_t id = row.a.ids ? row.a.ids[first + j] : row.a.first_id + first + j;
                const uint4 all = controls.column_numbers(uint32_t(id / 4));
                const uint32_t word = id % 4 == 0 ? all.x : id % 4 == 1 ? all.y : id % 4 == 2 ? all.z : all.w;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (i == j) words[i] = word;
            }
        }
        const float u = uniform(max(max(words[0], words[1]), max(words[2], words[3])));
        // -log u is at least 1 - u; the subtraction is exact
        const float most = gumbel ? -LN2 * log2_of(1.f - u) : controls.noise * u;
        if (!mine || !(__fmaf_rn(floats_of(four).y, inverse, most) >= least)) return false;
        float v[8];
        if (!DENSE) row.load_vector(first / 8, v);
        constexpr int TOGETHER = DENSE ? 1 : 4;  // columns, as there are registers
#pragma unroll TOGETHER
        for (int j = 0; j < 4; j++) {
            const float value = DENSE ? row.value(first + j) : first & 4 ? v[4 + j] : v[j];
            const float y = __fadd_rn(__fdiv_rn(value, controls.temperature),
                                      gumbel ? gumbel_of(words[0]) : noise_of(words[0], controls.noise));
            words[0] = words[1], words[1] = words[2], words[2] = words[3];
            if (y > own || (y == own && first + j < own_column)) own = y, own_column = first + j;
        }
        atomicMax(&shared().found, key_of(own));
        return true;
    }
    // Put the fours of a part's vectors that may win into the queue, and try them as far as there is one for each lane.
    __device__ __forceinline__ void take(int part, uint32_t highs) {
        const int lane = threadIdx.x % LANES;
        const uint32_t below = (1u << lane) - 1, number = 2 * (part * LANES + lane);
        const float lowest = (least - reach) * controls.temperature;
        const Both able = at_least(highs, half_below(lowest < MIN_HALF ? MIN_HALF : lowest));
        const uint32_t first = lane_ballot(able.first), second = lane_ballot(able.second);
        const int between = queued + __popc(first);
        if (able.first) queue[queued + __popc(first & below)] = highs << 16 | number;
        if (able.second) queue[between + __popc(second & below)] = (highs & 0xffff0000) | (number + 1);
        queued = between + __popc(second);
        __syncwarp();
#pragma unroll 1
        for (; queued >= LANES; queued -= LANES)
            if (lane_ballot(try_fours(true, queue[queued - LANES + lane]))) least = least_of(found());
        __syncwarp();
    }

    // The pass over the block's share, AHEAD parts at a time, the next ones on their way; whether a logit is NaN or +inf.
    template <bool FINAL>
    __device__ __forceinline__ bool pass() {
        const int lane = threadIdx.x % LANES, step = row.size * num_warps(), num_parts = row.num_parts();
        bool broken = false;
        decltype(row.fetch_packed(0)) raw[AHEAD];
        const auto vector_of = [&](int part, int i) { return min(part + i * step, num_parts - 1) * LANES + lane; };
        const auto whole = [&](int part) { return (vector_of(part, AHEAD - 1) | (LANES - 1)) < row.whole; };
        const auto fetch = [&](int part) {
            if (!whole(part)) return;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) raw[i] = row.read_packed(vector_of(part, i));
        };
        int part = row.rank * num_warps() + threadIdx.x / LANES;
        fetch(part);
#pragma unroll 1
        for (; part < num_parts; part += AHEAD * step) {
            uint32_t highs[AHEAD];
            if (whole(part)) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++) highs[i] = highs_of<FINAL>(vector_of(part, i), raw[i], broken);
            } else {
#pragma unroll 1
                for (int i = 0; i < AHEAD; i++) {
                    const uint32_t some = highs_one_by_one(vector_of(part, i), broken);
#pragma unroll
                    for (int k = 0; k < AHEAD; k++)
                        if (k == i) highs[k] = some;
                }
            }
            fetch(part + AHEAD * step);
            least = least_of(found());
#pragma unroll 1
            for (int i = 0; i < AHEAD && part + i * step < num_parts; i++) take(part + i * step, i ? highs[AHEAD - 1] : highs[0]);
        }
        if (queued) try_fours(lane < queued, queue[min(lane, queued - 1)]);
        return broken;
    }

    // The column, or -1; the work of all blocks.
    __device__ __forceinline__ int column() {
        Shared& sh = shared();
        if (threadIdx.x == 0) sh.found = key_of(-INFINITY), sh.column = NONE;
        __syncthreads();
        bool broken;
        if constexpr (R::HALVES) {
            broken = shared().allowed || row.num_bias ? pass<false>() : pass<true>();
        } else {
            broken = pass<false>();
        }
        if (broken) atomicMax(&sh.found, BROKEN);
        __syncthreads();
        if (own_column != NONE && key_of(own) == sh.found) atomicMin(&sh.column, own_column);
        __syncthreads();
        const auto result = [](uint32_t key, int column) {
            return key > key_of(-INFINITY) && key < key_of(INFINITY) && column != NONE ? column : -1;
        };
        if (row.size == 1) return result(sh.found, sh.column);
        if (threadIdx.x < row.size) {
            Shared& to = *remote(&sh, threadIdx.x);
            to.winners[0][row.rank] = sh.found, to.winners[1][row.rank] = uint32_t(sh.column);
        }
        row.sync();
        uint32_t key = 0, column = NONE;
        for (int r = 0; r < row.size; r++) {
            if (sh.winners[0][r] > key || (sh.winners[0][r] == key && sh.winners[1][r] < column))
                key = sh.winners[0][r], column = sh.winners[1][r];
        }
        return result(key, int(column));
    }
};

// See `NoisyMax`.
template <bool DENSE, class R>
__device__ __noinline__ int noisy_argmax(const R row) {
    return NoisyMax<DENSE, R>(row).column();
}

}  // namespace rwkv
