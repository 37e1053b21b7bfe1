// One row of logits: how its columns are read, with bias, masks and penalties, and what the first pass leaves of each part.
#pragma once

#include "../cluster.cuh"
#include "block.cuh"

namespace rwkv {

constexpr float MAX_EXPONENT = 1 << 30;  // of weights, before the largest is subtracted; floats are then whole numbers apart by 64

// Weights are exp((value - top) / temperature), not normalised.
struct Softmax {
    float temperature, top, scale;  // scale = log2(e) / temperature
    __device__ __forceinline__ float weight(float value) const { return exp2_of((value - top) * scale); }
};

// What is rare is kept out of the way: the eight columns from `first` one by one, -inf behind the last of n.
template <class T>
__device__ __noinline__ Vec8<T> fetch_slowly(const T* logits, int first, int n) {
    Vec8<T> e;
#pragma unroll
    for (int j = 0; j < 8; j++) e.x[j] = first + j < n ? logits[first + j] : minus_infinity<T>();
    return e;
}

// Weights relative to that of the value `high`, in one operation: the rounding of `most` is put right at the end.
struct Weights {
    float high, scale, most;
    __device__ __forceinline__ float of(float v) const { return exp2_of(__fmaf_rn(v, scale, -most)); }
    __device__ __forceinline__ float correction() const { return exp2_of(-__fmaf_rn(high, scale, -most)); }
};

// One row's logits after bias, masks and penalties. A part's vector i belongs to lane i.
template <class T>
struct Row {
    static constexpr bool HALVES = std::is_same<T, __half>::value;
    const SampleArgs& a;
    const T* logits;
    float* penalties;  // null for rows without
    int index;         // in the batch
    int num_bias;
    int rank, size;  // of the block in its cluster
    int shift;       // a warp that looks at all parts has 2^shift for each lane
    int whole;       // vectors that can be read 16 bytes at a time
    bool end_masked, plain;  // `plain`: logits are final values
    int64_t slot;

    __device__ __forceinline__ int each() const { return 1 << shift; }
    __device__ __forceinline__ int num_parts() const { return LANES << shift; }  // the last ones may be empty
    __device__ __forceinline__ bool any_special() const { return penalties || num_bias; }
    // Where a part's result is: lanes that each look at neighbouring parts do not collide.
    __device__ __forceinline__ int place_of(int part) const { return (part & (each() - 1)) * LANES + (part >> shift); }
    __device__ __forceinline__ void sync() const {
        if (size == 1) {
            __syncthreads();
        } else {
            cluster_arrive_release<false>();
            cluster_wait<false>();
        }
    }

    // The eight columns from 8 * vector as they are in memory, -inf behind the last one.
    __device__ __forceinline__ Vec8<T> fetch(int vector) const {
        const int first = 8 * vector;
        if (vector < whole) return *reinterpret_cast<const Vec8<T>*>(logits + first);
        return fetch_slowly(logits, first, a.num_columns);
    }
    __device__ __forceinline__ PackedVec8<T> read_packed(int vector) const {
        return *reinterpret_cast<const PackedVec8<T>*>(logits + 8 * vector);
    }
    __device__ __forceinline__ PackedVec8<T> fetch_packed(int vector) const {
        if (vector < whole) return read_packed(vector);
        const Vec8<T> e = fetch_slowly(logits, 8 * vector, a.num_columns);
        PackedVec8<T> packed;
        memcpy(packed.words, &e, sizeof(e));
        return packed;
    }
    // Bits of the columns of a vector that cannot be sampled.
    __device__ __forceinline__ unsigned hidden(int vector, const uint8_t* allowed) const {
        const bool inside = allowed && 8 * vector < a.num_columns;
        return (inside ? ~allowed[vector] & 0xffu : 0u) | (end_masked && vector == 0 ? 1u : 0u);
    }
    __device__ __forceinline__ void hide_and_bias(int vector, unsigned hidden, bool special, float (&v)[8]) const {
        if (hidden) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (hidden >> j & 1) v[j] = -INFINITY;
        }
        if (special && num_bias) {
            const int64_t* columns = a.bias_columns + slot * a.bias_width;
            const float* values = a.bias_values + slot * a.bias_width;
#pragma unroll 1
            for (int b = 0; b < num_bias; b++) {
                const int at = int(columns[b]) - 8 * vector;
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (at == j) v[j] += values[b];
            }
        }
    }
    // Final values of a part's vector, after `summarize`, or in rows with noise after `mark_bias`.
    __device__ __forceinline__ void load(int part, float (&v)[8]) const {
        load_vector(part * LANES + threadIdx.x % LANES, v);
    }
    __device__ __forceinline__ void load_vector(int vector, float (&v)[8]) const {
        finish(vector, fetch(vector), v);
    }
    __device__ __forceinline__ void finish(int vector, const Vec8<T>& raw, float (&v)[8]) const {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = to_float(raw.x[j]);
        if (plain) return;
        const bool special = any_special() && shared().special[vector / LANES] >> vector % LANES & 1;
        const Shared& sh = shared();
        hide_and_bias(vector, hidden(vector, sh.allowed), special, v);
        if (special && penalties) {
            float q[8];
            load8(penalties + 8 * vector, q);
            if (sh.seen) sh.controls.repetition.apply(sh.seen[vector], v);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] -= q[j];
        }
        const float floor = sh.floor;
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (v[j] < floor) v[j] = -INFINITY;
    }
    // A column's final value, at the same times; -inf behind the last one.
    __device__ __forceinline__ float value(int column) const {
        if (column >= a.num_columns) return -INFINITY;
        float v = to_float(logits[column]);
        if (plain) return v;
        const int vector = column / 8;
        const Shared& sh = shared();
        if (hidden(vector, sh.allowed) >> column % 8 & 1) v = -INFINITY;
        if (any_special() && sh.special[vector / LANES] >> vector % LANES & 1) {
#pragma unroll 1
            for (int b = 0; b < num_bias; b++)
                if (a.bias_columns[slot * a.bias_width + b] == column) v += a.bias_values[slot * a.bias_width + b];
            if (penalties && sh.seen && sh.seen[vector] >> column % 8 & 1) v = sh.controls.repetition.of(v);
            if (penalties) v -= penalties[column];
        }
        return v < sh.floor ? -INFINITY : v;
    }
    // Bits of a part's vectors that are not in memory as they count, but for min_p; not for rows with a mask.
    __device__ __forceinline__ uint32_t special_vectors(int part) const {
        return (any_special() ? shared().special[part] : 0u) | (end_masked && part == 0 ? 1u : 0u);
    }
    // Whether the largest x = value / temperature is finite, so that there is a distribution; that of halves cannot overflow.
    __device__ __forceinline__ bool finite(const Softmax& softmax) const {
        return fabsf(HALVES ? softmax.top : __fdiv_rn(softmax.top, softmax.temperature)) < INFINITY;
    }
    // Where values are so large that `most` would leave no room for their differences, all but the largest weigh nothing anyway.
    __device__ __forceinline__ Weights weights_below(float high, float scale) const {
        if (!HALVES && fabsf(high * scale) > MAX_EXPONENT) scale = MAX_EXPONENT / fabsf(high);
        return {high, scale, high * scale};
    }
    // Ask for the block's share of the row to be brought into the L2 cache.
    __device__ __forceinline__ void prefetch_share() const {
        const int lines = PART * sizeof(T) / 128 * num_warps();  // of parts that the block's warps take together
        const char* p = reinterpret_cast<const char*>(logits);
        const int64_t bytes = int64_t(a.num_columns) * sizeof(T);
        for (int i = threadIdx.x; ; i += num_threads()) {
            const int64_t at = int64_t((i / lines * size + rank) * lines + i % lines) * 128;
            if (at >= bytes) break;
            prefetch(p + at);
        }
    }

    // Find the vectors with a bias: bits of sh.special.
    __device__ __forceinline__ void mark_bias() const {
        Shared& sh = shared();
        for (int i = threadIdx.x; i < num_parts(); i += num_threads()) sh.special[i] = 0;
        __syncthreads();
        const int64_t* columns = a.bias_columns + slot * a.bias_width;
        for (int i = threadIdx.x; i < num_bias; i += num_threads())
            atomicOr(&sh.special[columns[i] / PART], 1u << columns[i] / 8 % LANES);
        sync();
    }

    // The first pass, over the block's share: each part's largest value, or BROKEN when a logit is NaN or +inf; with `weigh`, its
    // mass; and its special vectors, whose penalties are brought up to date. All blocks of the cluster are told.
    template <bool SPECIAL>
    __device__ __forceinline__ void summarize(float scale, bool weigh, const uint8_t* allowed) const {
        constexpr int AHEAD = sizeof(T) == 2 && !SPECIAL ? 4 : 2;
        Shared& sh = shared();
        const int lane = threadIdx.x % LANES, step = size * num_warps();
        const bool masks = allowed || end_masked;
        const int words = (a.num_columns + PART - 1) / PART;
        Shared* const to = size == 1 ? &sh : remote(&sh, min(lane, size - 1));  // the block that this lane tells
        float decay = 0, hit_penalty = 0;
        int hit = -1;
        const bool repeated = SPECIAL && penalties && a.repetition[slot] != 1.f;
        if (SPECIAL && penalties) decay = a.alpha_decay[slot], hit = a.pending_column[slot], hit_penalty = a.pending_penalty[slot];
        uint32_t touched = 0;  // the words of the warp's next parts, one for each lane
        const auto look_ahead = [&](int part, int round) {
            if (!SPECIAL || !penalties || round % LANES) return;
            const int mine = part + lane * step;
            touched = mine < words ? a.touched[slot * words + mine] : 0u;
#pragma unroll 1
            for (int i = 0; i < LANES && part + i * step < words; i++)
                if (__shfl_sync(ALL, touched, i, LANES) >> lane & 1) prefetch(penalties + 8 * ((part + i * step) * LANES + lane));
        };
        const auto specials_of = [&](int part, int round) {
            if (!SPECIAL) return 0u;
            return __shfl_sync(ALL, touched, round % LANES, LANES) | (num_bias && part < words ? sh.special[part] : 0u);
        };
        const auto take = [&](int part, const Vec8<T>& raw, uint32_t special, float(&q)[8]) {
            const int vector = part * LANES + lane;
            float v[8], largest = largest_of(raw);
            const bool broken = !(largest < INFINITY);
            if (SPECIAL || masks || weigh) {
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = to_float(raw.x[j]);
            }
            if (SPECIAL || masks) {
                const bool mine = SPECIAL && special >> lane & 1;
                hide_and_bias(vector, hidden(vector, allowed), mine, v);
                if (SPECIAL && mine && repeated)
                    Repetition(a.repetition[slot]).apply(a.seen[slot * bytes_of_bits(a) + vector], v);
                if (SPECIAL && mine && penalties) {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        q[j] = __fmul_rn(q[j], decay);
                        if (8 * vector + j == hit) q[j] = __fadd_rn(q[j], hit_penalty);
                        v[j] -= q[j];
                    }
                    float4* kept = reinterpret_cast<float4*>(penalties + 8 * vector);
                    kept[0] = make_float4(q[0], q[1], q[2], q[3]), kept[1] = make_float4(q[4], q[5], q[6], q[7]);
                }
                largest = v[0];
#pragma unroll
                for (int j = 1; j < 8; j++) largest = fmaxf(largest, v[j]);
            }
            const uint32_t key = lane_max(broken ? BROKEN : key_of(largest));
            float mass = 0;
            if (weigh && key != BROKEN && key != key_of(-INFINITY)) {
                const Weights weights = weights_below(value_of(key), scale);
#pragma unroll
                for (int j = 0; j < 8; j++) mass += weights.of(v[j]);
                mass = lane_sum(mass) * weights.correction();
            }
            if (SPECIAL) __syncwarp();  // all have read sh.special
            if (lane < size) {
                to->part_keys[place_of(part)] = key;
                to->part_masses[place_of(part)] = mass;
                if constexpr (SPECIAL) to->special[part] = special;
            }
        };
        const auto penalties_of = [&](int part, uint32_t special, float(&q)[8]) {
            if (!SPECIAL) return;
#pragma unroll
            for (int j = 0; j < 8; j++) q[j] = 0;
            if (penalties && special >> lane & 1) load8(penalties + 8 * (part * LANES + lane), q);
        };
        int first = rank * num_warps() + threadIdx.x / LANES, round = 0;
#pragma unroll 1
        for (; (first + (AHEAD - 1) * step + 1) * LANES <= whole; first += AHEAD * step, round += AHEAD) {
            Vec8<T> raw[AHEAD];
            uint32_t special[AHEAD];
            float q[AHEAD][8];
            look_ahead(first, round);
#pragma unroll
            for (int u = 0; u < AHEAD; u++) special[u] = specials_of(first + u * step, round + u);
#pragma unroll
            for (int u = 0; u < AHEAD; u++)
                raw[u] = *reinterpret_cast<const Vec8<T>*>(logits + 8 * ((first + u * step) * LANES + lane));
#pragma unroll
            for (int u = 0; u < AHEAD; u++) penalties_of(first + u * step, special[u], q[u]);
#pragma unroll
            for (int u = 0; u < AHEAD; u++) take(first + u * step, raw[u], special[u], q[u]);
        }
#pragma unroll 1
        for (; first < num_parts(); first += step, round++) {
            look_ahead(first, round);
            const uint32_t special = specials_of(first, round);
            float q[8];
            penalties_of(first, special, q);
            take(first, fetch(first * LANES + lane), special, q);
        }
    }

    // The rest is for one warp, unless said otherwise. Part i * LANES + lane of these is the lane's i-th one.
    __device__ __forceinline__ uint32_t top_key() const {
        uint32_t key = 0;
        for (int i = 0; i < each(); i++) key = max(key, shared().part_keys[i * LANES + threadIdx.x % LANES]);
        return lane_max(key);
    }
    __device__ __forceinline__ float part_mass(int i, const Softmax& softmax) const {
        const Shared& sh = shared();
        const int at = i * LANES + threadIdx.x % LANES;
        const float mass = sh.part_masses[at];
        return mass > 0 ? mass * softmax.weight(value_of(sh.part_keys[at])) : 0.f;
    }
    // Sum over the lane's parts.
    __device__ __forceinline__ float own_mass(const Softmax& softmax) const {
        float sum = 0;
        for (int i = 0; i < each(); i++) sum += part_mass(i, softmax);
        return sum;
    }
};

// After `summarize`, which did not `weigh`: values too far below the largest are -inf from now on, in what is left of each part
// too; the work of all blocks. A row without a distribution stays as it is. (No method of `Row`, which would then go to memory.)
template <class R>
__device__ __noinline__ void apply_min_p(const R row) {
    Shared& sh = shared();
    const Controls& controls = sh.controls;
    const bool weigh = needs_masses(controls.method, controls.top_k < row.a.num_columns, controls.top_p < INFINITY);
    const int lane = threadIdx.x % LANES;
    const uint32_t top = row.top_key();
    const float floor = value_of(top) - controls.min_p_depth, scale = LOG2E / controls.temperature;
    if (threadIdx.x == 0) sh.floor = floor;  // NaN, which no value is below, where the largest is
    row.sync();  // all blocks have read the keys
    const uint32_t lowest = top == BROKEN ? 0u : key_of(floor);
    Shared* const to = row.size == 1 ? &sh : remote(&sh, min(lane, row.size - 1));  // the block that this lane tells
#pragma unroll 1
    for (int part = row.rank * num_warps() + threadIdx.x / LANES; part < row.num_parts(); part += row.size * num_warps()) {
        uint32_t key = sh.part_keys[row.place_of(part)];
        float mass = 0;
        if (key < lowest) {
            key = key_of(-INFINITY);
        } else if (weigh && key != BROKEN && key != key_of(-INFINITY)) {
            float v[8];
            row.load(part, v);
            const Weights weights = row.weights_below(value_of(key), scale);
#pragma unroll
            for (int j = 0; j < 8; j++) mass += weights.of(v[j]);
            mass = lane_sum(mass) * weights.correction();
        }
        __syncwarp();  // all have read the key
        if (lane < row.size) to->part_keys[row.place_of(part)] = key, to->part_masses[row.place_of(part)] = mass;
    }
    row.sync();
}

}  // namespace rwkv
