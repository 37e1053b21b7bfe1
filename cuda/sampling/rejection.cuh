// Draws from all columns until top_p keeps one, as in FlashInfer's rejection sampling: no boundary is looked for.
#pragma once

#include "draw.cuh"

namespace rwkv {

constexpr int MAX_DRAWN = 128 * CANDIDATES;  // never reached: at least one of four is kept on average

// A candidate of a row drawn by rejection; a warp's work. `own` is the mass of the lane's parts, `total` that of all.
template <class R>
__device__ __forceinline__ Candidate draw_candidate(const R& row, const Softmax& softmax, float own, float total, int index) {
    const Shared& sh = shared();
    const uint4 words = sh.controls.draw_numbers(index);
    const float target = uniform(words.x) * total;
    float before;
    const int part = pick(row.each(), own, target, [&](int i) { return row.part_mass(i, softmax); }, before);
    Candidate c;
    c.column = pick_column(row, part, before, target, [&](float v) { return softmax.weight(v); }, &c.value);
    c.number = uniform(words.y);
    // In front of it are, of a part that has larger values, the largest one at least, and at most all.
    c.least = c.most = 0;
    for (int i = 0; i < row.each(); i++) {
        const int at = i * LANES + threadIdx.x % LANES;
        const float largest = value_of(sh.part_keys[at]);
        if (!(largest >= c.value)) continue;
        const float weight = softmax.weight(largest) * (largest > c.value ? 1.f : c.number);
        c.least += weight, c.most += sh.part_masses[at] * weight;
    }
    c.least = lane_sum(c.least), c.most = lane_sum(c.most);
    return c;
}

// What a pair of halves is compared with instead of a value that need not be a half: the next one up, and the one equal to it.
struct HalfMark {
    uint32_t at_least, equal;
    __device__ __forceinline__ void set(float mark) {
        const float next = to_float(__float2half_ru(mark));
        at_least = halves_of(next, next), equal = next == mark ? at_least : NAN_HALVES;
    }
};
// What a lane has seen beside a mark: the mass of columns at least as large, and the number of those equal to it.
struct Marked {
    float at_least = 0, equal = 0;
    uint32_t equals = 0;  // those among pairs of halves: for each, 0xffff has been added to its half of the word
    __device__ __forceinline__ void add(float v, float weight, float mark) {
        if (v >= mark) at_least += weight;
        if (v == mark) equal += 1;
    }
    __device__ __forceinline__ void add(uint32_t pair, float2 weights, const HalfMark& mark) {
#ifdef RWKV_HIP
        const float2 v = floats_of(pair);
        const float least = floats_of(mark.at_least).x, same = floats_of(mark.equal).x;
        if (v.x >= least) at_least += weights.x;
        if (v.y >= least) at_least += weights.y;
        equals += (v.x == same ? 0xffffu : 0u) + (v.y == same ? 0xffff0000u : 0u);
#else
        asm("{\n\t.reg .pred p, q;\n\t.reg .b32 same;\n\t"
            "setp.ge.f16x2 p|q, %2, %3;\n\t@p add.f32 %0, %0, %5;\n\t@q add.f32 %0, %0, %6;\n\t"
            "set.eq.u32.f16x2 same, %2, %4;\n\tadd.u32 %1, %1, same;\n\t}"
            : "+f"(at_least), "+r"(equals)
            : "r"(pair), "r"(mark.at_least), "r"(mark.equal), "f"(weights.x), "f"(weights.y));
#endif
    }
    __device__ __forceinline__ float num_equal() const {
        const uint32_t low = -equals & 0xffff, high = -(equals + low) >> 16;  // `high`: less what `low` borrowed from it
        return equal + float(low + ((high + low) & 0xffff));
    }
};

// A pass over the block's share of the row. Sum 2 i is the mass of columns at least as large as mark i, sum 2 i + 1 the number of
// those equal to it, by groups of parts; marks ascend, and groups whose columns are all below the first are left unread. All
// blocks of the cluster are told. With HALVES columns are compared as they are in memory; the few special vectors, which are not
// final there, are left out and then dealt out to the lanes anew: a lane that holds one would keep the other 31 waiting.
template <int MARKS, bool HALVES, class R>
__device__ __forceinline__ void measure(const R& row, const Softmax& softmax, const float (&marks)[MEASURED], int turn) {
    Shared& sh = shared();
    constexpr int NUM_SUMS = MARKS == 1 ? 2 : MARKS == 2 ? 4 : SUMS, COPIES = LANES / NUM_SUMS;  // lanes that get the same sum
    const int lane = threadIdx.x % LANES, num_groups = row.num_parts() / TOGETHER;
    const Weights weights = row.weights_below(softmax.top, softmax.scale);
    HalfMark halves[MARKS];
#pragma unroll
    for (int m = 0; m < MARKS; m++) halves[m].set(marks[m]);
    const uint32_t lowest = key_of(marks[0]);
#pragma unroll 1
    for (int group = row.rank * num_warps() + threadIdx.x / LANES; group < num_groups; group += row.size * num_warps()) {
        float sum = 0;
        uint32_t key = 0;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) key = max(key, sh.part_keys[row.place_of(group * TOGETHER + i)]);
        if (key >= lowest) {
            Marked marked[MARKS];
            const auto add = [&](const float (&v)[8]) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float w = weights.of(v[j]);
#pragma unroll
                    for (int m = 0; m < MARKS; m++) marked[m].add(v[j], w, marks[m]);
                }
            };
            const int first = group * TOGETHER * LANES;
            decltype(row.fetch_packed(0)) raw[TOGETHER];
            if (first + TOGETHER * LANES <= row.whole) {
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) raw[i] = row.read_packed(first + i * LANES + lane);
            } else {
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) raw[i] = row.fetch_packed(first + i * LANES + lane);
            }
            if constexpr (HALVES) {
                uint32_t special[TOGETHER];
                int num_special = 0;
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) {
                    special[i] = row.plain ? 0u : row.special_vectors(group * TOGETHER + i);
                    num_special += __popc(special[i]);
                }
                if (num_special) {
#pragma unroll
                    for (int i = 0; i < TOGETHER; i++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            if (special[i] >> lane & 1) raw[i].words[j] = MINUS_INFINITY_HALVES;
                }
#pragma unroll
                for (int i = 0; i < TOGETHER; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float2 v = floats_of(raw[i].words[j]), both = {weights.of(v.x), weights.of(v.y)};
#pragma unroll
                        for (int m = 0; m < MARKS; m++) marked[m].add(raw[i].words[j], both, halves[m]);
                    }
#pragma unroll 1
                for (int at = lane; at < num_special; at += LANES) {
                    int part = 0, n = at;
                    uint32_t bits = special[0];
#pragma unroll
                    for (int i = 1; i < TOGETHER; i++)
                        if (part == i - 1 && n >= __popc(bits)) n -= __popc(bits), bits = special[i], part = i;
                    float v[8];
                    row.load_vector(first + part * LANES + place_of_bit(bits, n), v);
                    add(v);
                }
            } else {
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) {
                    float v[8];
                    row.finish(first + i * LANES + lane, raw[i].unpack(), v);
                    add(v);
                }
            }
            float sums[NUM_SUMS] = {};
#pragma unroll
            for (int m = 0; m < MARKS; m++) sums[2 * m] = marked[m].at_least, sums[2 * m + 1] = marked[m].num_equal();
            sum = lane_sums(sums);
        }
        float* const to = &sh.measured[turn][lane / COPIES][group];
        if (row.size == 1) {
            if (lane % COPIES == 0) *to = sum;
        } else {
#pragma unroll 1
            for (int r = lane % COPIES; r < row.size; r += COPIES) *remote(to, r) = sum;
        }
    }
}

// Choose what a pass measures: the candidates from `next` on, as far as each is larger than the one before it, for if that is
// not kept, smaller ones are not either. Ends with one that is surely kept or one too many, and returns it, or CANDIDATES.
__device__ __forceinline__ int choose_marks(int next, float p, float rejected, float (&marks)[MEASURED], int& num_marks) {
#pragma unroll
    for (int m = 0; m < MEASURED; m++) marks[m] = INFINITY;
    num_marks = 0;
#pragma unroll 1
    for (; next < CANDIDATES; next++) {
        const Candidate& c = shared().candidates[next];
        if (c.least >= p || c.value < rejected || (num_marks && c.value == rejected)) continue;
        if (c.most < p || num_marks == MEASURED) break;
#pragma unroll
        for (int m = 0; m < MEASURED; m++)
            if (m == num_marks) marks[m] = c.value;
        num_marks++, rejected = c.value;
    }
    return next;
}

// See `measure` for the sums, of the first `num_marks` marks; the work of all blocks.
template <class R>
__device__ __forceinline__ void measure_row(const R& row, const Softmax& softmax, const float (&marks)[MEASURED], int num_marks,
                                            int turn, float (&sums)[SUMS]) {
    if constexpr (R::HALVES) {
        const auto by = [&](auto number) { measure<decltype(number)::value, true>(row, softmax, marks, turn); };
        if (shared().allowed) {
            measure<MEASURED, false>(row, softmax, marks, turn);
        } else if (num_marks == 1) {
            by(std::integral_constant<int, 1>{});
        } else if (num_marks == 2) {
            by(std::integral_constant<int, 2>{});
        } else if (num_marks == 3) {
            by(std::integral_constant<int, 3>{});
        } else {
            by(std::integral_constant<int, MEASURED>{});
        }
    } else {
        measure<MEASURED, false>(row, softmax, marks, turn);
    }
    row.sync();
    const int lane = threadIdx.x % LANES;
    float own[SUMS] = {};
    for (int group = lane; group < row.num_parts() / TOGETHER; group += LANES) {
#pragma unroll
        for (int i = 0; i < 2 * MEASURED; i++)
            if (i < 2 * num_marks) own[i] += shared().measured[turn][i][group];
    }
    const float sum = lane_sums(own);
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = __shfl_sync(ALL, sum, i * (LANES / SUMS), LANES);
}

// Draw from all columns until top_p keeps one; the work of all blocks, each of which gets the column in all threads. In a peaked
// row the parts' masses mostly tell whether a candidate is kept; otherwise a pass over the row measures the mass down to it.
template <class R>
__device__ __noinline__ int redraw(const R row, const Softmax softmax) {
    Shared& sh = shared();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const float own = row.own_mass(softmax), total = __shfl_sync(ALL, lane_scan(own), LANES - 1, LANES);
    const float p = sh.controls.top_p * total;
    const float unrounded = row.weights_below(softmax.top, softmax.scale).correction();  // of the sums in `measure`
    float rejected = -INFINITY;  // a value that was not kept: smaller ones are not either
    int turn = 0;
#pragma unroll 1
    for (int drawn = 0; drawn < MAX_DRAWN; drawn += CANDIDATES) {
        if (drawn) __syncthreads();  // all have read the candidates before
        if (warp < CANDIDATES) {
            const Candidate candidate = draw_candidate(row, softmax, own, total, drawn + warp);
            if (lane == 0) sh.candidates[warp] = candidate;
        }
        __syncthreads();
        int next = 0;
        while (next < CANDIDATES) {
            float marks[MEASURED], sums[SUMS];
            int num_marks;
            const int end = choose_marks(next, p, rejected, marks, num_marks);
            if (num_marks == 0 && end < CANDIDATES) return sh.candidates[end].column;
            if (num_marks == 0) break;
            measure_row(row, softmax, marks, num_marks, turn, sums);
            turn ^= 1;
#pragma unroll 1
            for (; next < end; next++) {
                const Candidate& c = sh.candidates[next];
                if (c.least >= p || c.value < rejected) continue;
                float at_least = 0, equal = 0;
#pragma unroll
                for (int m = 0; m < MEASURED; m++)
                    if (c.value == marks[m]) at_least = sums[2 * m] * unrounded, equal = sums[2 * m + 1];
                if (at_least - (1 - c.number) * equal * softmax.weight(c.value) < p) return c.column;
                rejected = c.value;
            }
        }
    }
    return first_equal(row, key_of(softmax.top));
}

}  // namespace rwkv
