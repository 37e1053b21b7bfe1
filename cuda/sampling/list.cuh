// Filters that keep few columns: those above a bound are put on a list and ranked against one another, and the cut found there.
#pragma once

#include "draw.cuh"

#include <cfloat>

namespace rwkv {

constexpr int MAX_GROUPS = 8;  // groups of parts for each lane, whose largest values bound a filter from below

// A value that at least k groups of parts reach, so that at least k columns do, and not many more; -FLT_MAX when there are none.
template <class R>
__device__ __noinline__ float bound_of(const R row, int k) {
    const int lane = threadIdx.x % LANES, in_group = row.each() > MAX_GROUPS ? row.each() / MAX_GROUPS : 1;
    uint32_t keys[MAX_GROUPS], least = BROKEN, most = 0;
#pragma unroll
    for (int g = 0; g < MAX_GROUPS; g++) {
        keys[g] = 0;
        for (int i = g * in_group; i < (g + 1) * in_group && i < row.each(); i++)
            keys[g] = max(keys[g], shared().part_keys[i * LANES + lane]);
        most = max(most, keys[g]);
        if (keys[g]) least = min(least, keys[g]);
    }
    most = lane_max(most), least = ~lane_max(~least);
    if (LANES * min(row.each(), MAX_GROUPS) < k) return -FLT_MAX;
    int bit = 31 - __clz(int(least ^ most | 1u));
    uint32_t found = most & ~((2u << bit) - 1u);
    const int last = max(bit - 16, 0);
    for (; bit >= last; bit--) {
        const uint32_t tried = found | 1u << bit;
        int count = 0;
#pragma unroll
        for (int g = 0; g < MAX_GROUPS; g++) count += keys[g] >= tried;
        count = lane_add(count);
        if (count >= k) found = tried;
        if (count >= k && count <= k + k / 8 + 4) break;
    }
    return found > key_of(-INFINITY) ? value_of(found) : -FLT_MAX;
}

// Write down the parts that hold a column at or above the bound, and return how many.
template <class R>
__device__ __forceinline__ int find_hits(const R& row, float bound) {
    const uint32_t key = key_of(bound);
    const int lane = threadIdx.x % LANES;
    int count = 0;
    for (int i = 0; i < row.each(); i++) count += shared().part_keys[i * LANES + lane] >= key;
    int at = lane_before(count);
    for (int i = 0; i < row.each(); i++)
        if (shared().part_keys[i * LANES + lane] >= key) shared().hits[at++] = uint16_t(lane * row.each() + i);
    return lane_add(count);
}

// For one warp of each of `num_warps`: stage the hits' columns at or above the bound.
template <class R>
__device__ __forceinline__ void stage_hits(const R& row, int num_hits, float bound) {
    Shared& sh = shared();
    const int lane = threadIdx.x % LANES, room = STAGED / 2 / num_hits;
#pragma unroll 2
    for (int hit = threadIdx.x / LANES; hit < num_hits; hit += num_warps()) {
        const int part = sh.hits[hit];
        float v[8];
        row.load(part, v);
        int count = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) count += v[j] >= bound;
        int at = lane_before(count);
        if (lane == LANES - 1) sh.counts[hit] = uint16_t(at + count);
        if (count) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (v[j] >= bound) {
                    if (at < room) sh.staged[hit * room + at] = {v[j], (part * LANES + lane) * 8 + j};
                    at++;
                }
        }
    }
}

// Bring what is staged together, in the order of the columns, with weights; a warp's work. Sets sh.num_listed.
inline __device__ __noinline__ void list_staged(int num_hits, const Softmax softmax) {
    Shared& sh = shared();
    const int lane = threadIdx.x % LANES, per = (num_hits + LANES - 1) / LANES, room = STAGED / 2 / num_hits;
    const int begin = lane * per, end = min(begin + per, num_hits);
    int count = 0, most = 0;
    for (int hit = begin; hit < end; hit++) count += sh.counts[hit], most = max(most, int(sh.counts[hit]));
    const int total = lane_add(count);
    const bool fits = total <= LISTED && int(lane_max(uint32_t(most))) <= room;
    int at = lane_before(count);
    if (fits) {
        for (int hit = begin; hit < end; hit++)
            for (int i = 0; i < sh.counts[hit]; i++, at++) {
                const Staged staged = sh.staged[hit * room + i];
                sh.list[at] = {staged.value, softmax.weight(staged.value)};
                sh.columns[at] = staged.column;
            }
    }
    if (lane == 0) sh.num_listed = fits ? total : NONE;
}

// For each on the list the masses and numbers of those at least as large and of those larger; a block's work.
inline __device__ __noinline__ void rank_list() {
    Shared& sh = shared();
    const int n = sh.num_listed;
    for (int i = threadIdx.x; i < n; i += num_threads()) {
        const float value = sh.list[i].value;
        float at_least = 0, above = 0;
        uint32_t counts = 0;
#pragma unroll 4
        for (int j = 0; j < n; j++) {
            const Listed other = sh.list[j];
            if (other.value >= value) at_least += other.weight, counts += 1u << 16;
            if (other.value > value) above += other.weight, counts += 1;
        }
        sh.ranks.at_least[i] = at_least, sh.ranks.above[i] = above, sh.ranks.counts[i] = counts;
    }
}

__device__ __forceinline__ float mass_of(float share, float mass) { return share < INFINITY ? share * mass : INFINITY; }

// Where a filter cuts: columns above theta are kept, and those equal to it by a weight of their own.
struct Cut {
    float theta, mass_above, mass_at_least;
    int num_above, num_ties;
    __device__ __forceinline__ float edge(const Softmax& softmax, float k, float p, bool whole) const {
        const float w = softmax.weight(theta);
        if (whole || num_ties == 0) return w;
        return fminf(fmaxf(fminf((p - mass_above) / num_ties, w * ((k - num_above) / num_ties)), 0.f), w);
    }
};

// The largest value on the list at which k columns, or the mass p, are reached; false when there is none, and then the cut is at
// the smallest value. `num_above` and `mass_above` are those of columns larger than all on the list. A warp's work.
__device__ __forceinline__ bool cut_list(float k, float p, int num_above, float mass_above, Cut& cut) {
    const Shared& sh = shared();
    const int lane = threadIdx.x % LANES, n = sh.num_listed;
    uint32_t best = 0, lowest = 0;
    for (int i = lane; i < n; i += LANES) {
        const uint32_t key = key_of(sh.list[i].value);
        lowest = max(lowest, ~key);
        if (float(num_above + int(sh.ranks.counts[i] >> 16)) >= k || mass_above + sh.ranks.at_least[i] >= p) best = max(best, key);
    }
    best = lane_max(best), lowest = lane_max(lowest);
    const uint32_t key = best ? best : ~lowest;
    int first = NONE;
    for (int i = lane; i < n; i += LANES)
        if (key_of(sh.list[i].value) == key) first = min(first, i);
    first = lane_first(first);
    if (first == NONE) return false;  // the list is empty
    const int num_at_least = sh.ranks.counts[first] >> 16, num_larger = sh.ranks.counts[first] & 0xffff;
    cut = {sh.list[first].value, mass_above + sh.ranks.above[first], mass_above + sh.ranks.at_least[first], num_above + num_larger,
           num_at_least - num_larger};
    return best != 0;
}

// The same for a row's controls, for JOINT and for SEQUENTIAL, where the mass counts inside what the number leaves.
__device__ __forceinline__ bool cut_by(bool joint, float k, float share, float mass, int num_above, float mass_above,
                                       Cut& cut) {
    if (joint || k == INFINITY) return cut_list(k, mass_of(share, mass), num_above, mass_above, cut);
    const bool found = cut_list(k, INFINITY, num_above, mass_above, cut);
    if (share == INFINITY) return found;
    Cut inside;
    if (cut_list(INFINITY, share * cut.mass_at_least, num_above, mass_above, inside) && inside.theta > cut.theta) cut = inside;
    return found;
}

__device__ __forceinline__ float kept_weight(const Listed& listed, float theta, float edge) {
    return listed.value > theta ? listed.weight : listed.value == theta ? edge : 0.f;
}

__device__ __forceinline__ void report_boundary(const SampleArgs& a, int index, float theta, float edge, float total) {
    if (!a.out_boundary || threadIdx.x) return;
    float* out = a.out_boundary + 3 * index;
    out[0] = theta, out[1] = edge, out[2] = total;
}

// Draw from the list alone.
template <class R>
__device__ __noinline__ int draw_listed(const R row, float theta, float edge) {
    const Shared& sh = shared();
    const int n = sh.num_listed, per = (n + LANES - 1) / LANES, begin = threadIdx.x % LANES * per;
    const auto mass = [&](int i) { return begin + i < n ? kept_weight(sh.list[begin + i], theta, edge) : 0.f; };
    float own = 0, before;
    for (int i = 0; i < per; i++) own += mass(i);
    const float total = __shfl_sync(ALL, lane_scan(own), LANES - 1, LANES);
    report_boundary(row.a, row.index, theta, edge, total);
    return sh.columns[min(pick(per, own, sh.controls.draw_number * total, mass, before), n - 1)];
}

}  // namespace rwkv
