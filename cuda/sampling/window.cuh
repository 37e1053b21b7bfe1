// Histograms by value, and the window between two values that they leave for a filter's boundary.
#pragma once

#include "row.cuh"

#include <cfloat>

namespace rwkv {

constexpr int SCANNERS = 256;  // threads that add up the buckets, however many there are: the order of sums is always the same
constexpr int SAMPLED = 8;  // a search looks first at one vector in so many
constexpr float MARGIN = 4.5f;  // standard deviations to which it trusts what it saw there
constexpr float SAMPLE_UNITS = 1 << 28;
constexpr uint32_t EXACT = 1 << 16;  // a histogram's count of columns that stand for themselves
constexpr float ROUNDER = 1 << 23;  // added to a float, leaves the nearest whole number in its low bits
constexpr float REL_ERROR = 1e-5f;  // relative error of sums, generously

// Values on a scale of buckets: the bucket is in the low bits of a place, which falls with the value.
struct Scale {
    float high, fineness;  // buckets for each unit of the values
    __device__ __forceinline__ Scale(float low, float high)
        : high(high), fineness(fminf(float(BUCKETS - 8) / fminf(high - low, FLT_MAX), FLT_MAX)) {}
    __device__ __forceinline__ float place(float v) const { return __fmaf_rn(high - v, fineness, ROUNDER); }
    static __device__ __forceinline__ int bucket(float place) {
        return int(__float_as_uint(place)) - int(__float_as_uint(ROUNDER));
    }
};

// Over the first SCANNERS threads: sums over the lower ones, and of all. All threads of the block must come.
__device__ __forceinline__ void block_scan(float (&v)[3], float (&all)[3], const float (&own)[3]) {
    Shared& sh = shared();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    constexpr int WARPS = SCANNERS / LANES;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        v[i] = lane_scan(own[i]);
        if (lane == LANES - 1) sh.scratch.floats[i][warp] = v[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const float lower = lane_scan(lane < WARPS ? sh.scratch.floats[i][lane] : 0.f);
        const float mine = __shfl_sync(ALL, lower, min(max(warp - 1, 0), LANES - 1), LANES);
        v[i] += (warp ? mine : 0.f) - own[i];
        all[i] = __shfl_sync(ALL, lower, LANES - 1, LANES);
    }
}

// From histograms of `size` blocks: the buckets between which theta is, for all of them. Buckets hold all columns between
// scale.high and the lowest; masses of buckets are only bounded.
inline __device__ __noinline__ void bound_window(const Softmax softmax, const Scale scale, float k, float p, int num_above,
                                          float mass_above, bool guessed, int size) {
    Shared& sh = shared();
    const int t = threadIdx.x;
    constexpr int EACH = BUCKETS / SCANNERS;
    const float bits = softmax.scale / scale.fineness, most = softmax.weight(scale.high);
    float counts[EACH], own[3] = {0, 0, 0}, sums[3], all[3];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        uint32_t count = 0;
        if (t < SCANNERS)
#pragma unroll 1
            for (int r = 0; r < size; r++) count += (r ? remote(&sh, r) : &sh)->histogram[t * EACH + i];
        counts[i] = float(count);
    }
    const auto add = [&](float (&sum)[3], int i) {
        const float bucket = float(t * EACH + i);
        sum[0] += counts[i];
        sum[1] += counts[i] * most * fminf(exp2_of(-(bucket - 0.51f) * bits), 1.f);
        sum[2] += counts[i] * most * exp2_of(-(bucket + 0.51f) * bits);
    };
#pragma unroll
    for (int i = 0; i < EACH; i++) add(own, i);
    if (t == 0) sh.buckets[0] = sh.buckets[1] = BUCKETS;
    block_scan(sums, all, own);  // has a barrier
    sums[0] += float(num_above), sums[1] += mass_above, sums[2] += mass_above;
    float before = sums[0];
    int may = BUCKETS, must = BUCKETS, num_before = 0, num_first = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        add(sums, i);
        if (counts[i] > 0 && may == BUCKETS && (sums[0] >= k || sums[1] * (1 + REL_ERROR) >= p))
            may = t * EACH + i, num_before = int(before), num_first = int(counts[i]);
        if (counts[i] > 0 && must == BUCKETS && (sums[0] >= k || sums[2] * (1 - REL_ERROR) >= p))
            must = t * EACH + i;
        before = sums[0];
    }
    if (may < BUCKETS) atomicMin(&sh.buckets[0], may);
    if (must < BUCKETS) atomicMin(&sh.buckets[1], must);
    __syncthreads();
    may = sh.buckets[0], must = sh.buckets[1];
    if (t == min(may / EACH, SCANNERS - 1)) {
        if (may == BUCKETS) num_before = int(sums[0]);
        for (int r = 0; r < size; r++) {
            Window& to = (r ? remote(&sh, r) : &sh)->window;
            to.begin = ROUNDER + float(may);
            to.end = guessed && must == BUCKETS ? INFINITY : ROUNDER + float(must);  // `guessed`: it may lie below the last bucket
            to.num_above = num_before, to.num_first = num_first;
        }
    }
}

// From a sample's histogram: the values between which theta is almost surely. `mass` is that of all columns from `lowest` on.
inline __device__ __noinline__ void guess_window(const Softmax softmax, const Scale scale, float k, float p, float mass, float lowest) {
    Shared& sh = shared();
    const int t = threadIdx.x;
    constexpr int EACH = BUCKETS / SCANNERS;
    const float bits = softmax.scale / scale.fineness, most = softmax.weight(scale.high);
    // from the sample's mass to the row's
    const float ratio = p < INFINITY ? SAMPLE_UNITS / fmaxf(float(sh.sample_mass), 1.f) : 0.f;
    const float inverse = mass > 0 ? 1 / mass : 0.f;
    float counts[EACH], sampled[EACH], own[3] = {0, 0, 0}, sums[3], all[3];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const uint32_t count = t < SCANNERS ? sh.histogram[t * EACH + i] : 0u;
        sampled[i] = float(count % EXACT * SAMPLED), counts[i] = sampled[i] + float(count / EXACT);
    }
    const auto add = [&](float (&sum)[3], int i) {  // numbers, masses, and the squares of those that are estimated
        const float weight = most * exp2_of(-float(t * EACH + i) * bits) * ratio;
        sum[0] += counts[i], sum[1] += counts[i] * weight, sum[2] += sampled[i] * weight * weight;
    };
#pragma unroll
    for (int i = 0; i < EACH; i++) add(own, i);
    if (t == 0) sh.buckets[0] = sh.buckets[1] = BUCKETS;
    block_scan(sums, all, own);  // has a barrier
    int may = BUCKETS, must = BUCKETS;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        add(sums, i);
        const float part = sums[1] * inverse, rest = 1 - part;
        const float variance = sums[2] * rest * rest + fmaxf(all[2] - sums[2], 0.f) * part * part;
        // what is missing from the mass and from the number, and the squares of their doubts
        const float mass_lack = p - sums[1], mass_doubt = MARGIN * MARGIN * (SAMPLED - 1) * variance;
        const float count_lack = k - sums[0], count_doubt = MARGIN * MARGIN * (SAMPLED - 1) * sums[0];
        const bool mass_sure = mass_lack * mass_lack > mass_doubt, count_sure = count_lack * count_lack > count_doubt;
        if (counts[i] > 0 && may == BUCKETS && !(mass_lack > 0 && mass_sure && count_lack > 0 && count_sure)) may = t * EACH + i;
        if (counts[i] > 0 && must == BUCKETS && ((mass_lack <= 0 && mass_sure) || (count_lack <= 0 && count_sure)))
            must = t * EACH + i;
    }
    if (may < BUCKETS) atomicMin(&sh.buckets[0], may);
    if (must < BUCKETS) atomicMin(&sh.buckets[1], must);
    __syncthreads();
    if (t == 0) {
        const int first = sh.buckets[0], last = sh.buckets[1];
        sh.window.high = first ? scale.high - (float(first) - 0.5f) / scale.fineness : scale.high;
        sh.window.low = fmaxf(scale.high - (float(last) + 0.5f) / scale.fineness, lowest);
    }
}

// A histogram of one of SAMPLED vectors, for which all others stand, and of the parts' largest values, each of which is known.
template <class R>
__device__ __forceinline__ void sample_row(const R& row, const Softmax& softmax, const Scale& scale, float mass, float lowest) {
    Shared& sh = shared();
    const bool weigh = mass > 0;
    const float units = weigh ? SAMPLE_UNITS / mass : 0.f;
    uint32_t sum = 0;
    const auto count = [&](float v, bool exact) {
        if (!(v >= lowest) || v == -INFINITY) return;
        const unsigned bucket = unsigned(Scale::bucket(scale.place(v)));
        if (bucket < BUCKETS) atomicAdd(&sh.histogram[bucket], exact ? EXACT : 1u);
        if (weigh) sum += uint32_t(softmax.weight(v) * units * (exact ? 1 : SAMPLED) + 0.5f);
    };
    const int num_sampled = (row.a.num_columns + 8 * SAMPLED - 1) / (8 * SAMPLED);
#pragma unroll 1
    for (int i = threadIdx.x; i < num_sampled; i += num_threads()) {
        const int vector = SAMPLED * i + 5 * i % SAMPLED;
        const uint32_t key = sh.part_keys[row.place_of(vector / LANES)];
        float v[8];
        row.load_vector(vector, v);
        bool seen = false;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (!seen && key_of(v[j]) == key) {
                seen = true;
            } else {
                count(v[j], false);
            }
        }
    }
    for (int part = threadIdx.x; part < row.num_parts(); part += num_threads())
        if (sh.part_keys[row.place_of(part)]) count(value_of(sh.part_keys[row.place_of(part)]), true);
    sum = uint32_t(lane_add(int(sum)));
    if (weigh && threadIdx.x % LANES == 0) atomicAdd(&sh.sample_mass, sum);
}

// The largest of each over a block's threads, in the first warp.
__device__ __forceinline__ void block_max(uint32_t (&v)[4]) {
    Shared& sh = shared();
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = lane_max(v[i]);
        if (lane == 0) sh.scratch.keys[i][threadIdx.x / LANES] = v[i];
    }
    __syncthreads();
    if (threadIdx.x >= LANES) return;
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = lane_max(lane < num_warps() ? sh.scratch.keys[i][lane] : 0u);
}
// The largest and the smallest value at a window's first bucket, and of those behind it, as keys; the smallest inverted.
struct Extremes {
    uint32_t keys[4] = {0, 0, 0, 0};
    __device__ __forceinline__ void add(float v, bool behind) {
        const uint32_t key = key_of(v);
        keys[0] = max(keys[0], behind ? 0u : key), keys[1] = max(keys[1], behind ? 0u : ~key);
        keys[2] = max(keys[2], behind ? key : 0u), keys[3] = max(keys[3], behind ? ~key : 0u);
    }
    // Whether all are equal.
    __device__ __forceinline__ bool one() const { return !keys[2] && keys[0] == ~keys[1]; }
};

// After a look at a window whose columns do not fit: a smaller one. A warp's work.
__device__ __forceinline__ void refine(Window& w, const Extremes& extremes, float k, float p, float mass_first, bool& behind) {
    behind = !(float(w.num_above + w.num_first) >= k || w.mass_above + mass_first >= p) && extremes.keys[2];
    const int at = behind ? 2 : 0;
    w.high = value_of(extremes.keys[at]), w.low = value_of(~extremes.keys[at + 1]);
}

// Sum over the parts; a warp's work.
template <class R>
__device__ __forceinline__ float add_parts(const R& row, const float* masses) {
    float own = 0;
    for (int i = 0; i < row.each(); i++) own += masses[threadIdx.x % LANES * row.each() + i];
    return lane_sum(own);
}

}  // namespace rwkv
