// Draws by running sums, in the order of the columns: from lanes, from parts, from the columns of one part.
#pragma once

#include "row.cuh"

namespace rwkv {

// The first lane whose running sum `inclusive` is above the target, among those with any weight; should rounding leave it
// unreached the last of them.
__device__ __forceinline__ int lane_of(float own, float inclusive, float target) {
    const int lane = threadIdx.x % LANES;
    const int found = lane_first(own > 0 && inclusive > target ? lane : NONE);
    return found != NONE ? found : max(-lane_first(own > 0 ? -lane : 0), 0);
}
// The same over the lanes' n masses, which follow one another; the winner's number, and the sum before it.
template <class Mass>
__device__ __forceinline__ int pick(int n, float own, float target, Mass mass, float& before) {
    const int lane = threadIdx.x % LANES;
    const float inclusive = lane_scan(own);
    const int winner = lane_of(own, inclusive, target);
    float running = inclusive - own, sum_before = running;
    int chosen = 0;
    bool done = false;
    if (lane == winner) {
        for (int i = 0; i < n && !done; i++) {
            const float w = mass(i);
            if (w > 0) chosen = i, sum_before = running, done = running + w > target;
            running += w;
        }
    }
    before = __shfl_sync(ALL, sum_before, winner, LANES);
    return winner * n + __shfl_sync(ALL, chosen, winner, LANES);
}

// The column of a part where the running sum of weights, `before` in front of it, exceeds the target; and its value.
template <class R, class Weight>
__device__ __forceinline__ int pick_column(const R& row, int part, float before, float target, Weight weight,
                                           float* value = nullptr) {
    const int lane = threadIdx.x % LANES;
    float v[8], weights[8], own = 0;
    row.load(part, v);
#pragma unroll
    for (int j = 0; j < 8; j++) weights[j] = weight(v[j]), own += weights[j];
    float running = before + lane_scan(own) - own;
    int column = NONE, last = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        running += weights[j];
        if (weights[j] > 0) {
            last = (part * LANES + lane) * 8 + j;
            if (column == NONE && running > target) column = last;
        }
    }
    column = lane_first(column);
    if (column == NONE) column = -lane_first(-last);
    if (value) {
        float mine = v[0];
#pragma unroll
        for (int j = 1; j < 8; j++)
            if (column % 8 == j) mine = v[j];
        *value = __shfl_sync(ALL, mine, column / 8 % LANES, LANES);
    }
    return column;
}

template <class R>
__device__ __noinline__ int first_equal(const R row, uint32_t key) {
    const int lane = threadIdx.x % LANES;
    int part = NONE;
    for (int i = row.each() - 1; i >= 0; i--)
        if (shared().part_keys[i * LANES + lane] == key) part = lane * row.each() + i;
    part = lane_first(part);
    float v[8];
    row.load(part, v);
    int column = NONE;
#pragma unroll
    for (int j = 7; j >= 0; j--)
        if (v[j] == value_of(key)) column = (part * LANES + lane) * 8 + j;
    return lane_first(column);
}

template <class R>
__device__ __noinline__ int plain_draw(const R row, const Softmax softmax) {
    const float own = row.own_mass(softmax);
    const float target = shared().controls.draw_number * __shfl_sync(ALL, lane_scan(own), LANES - 1, LANES);
    float before;
    const int part = pick(row.each(), own, target, [&](int i) { return row.part_mass(i, softmax); }, before);
    return pick_column(row, part, before, target, [&](float v) { return softmax.weight(v); });
}

}  // namespace rwkv
