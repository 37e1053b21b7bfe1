// Rows with a top_k or top_p: whether the cut is looked for on a list or by a search, and the draw behind it.
#pragma once

#include "search.cuh"

namespace rwkv {

constexpr int MAX_RANKED = 128;  // the largest top_k whose columns are listed
constexpr int NUM_TRIED = 64;  // groups of parts whose columns are listed for a top_p
constexpr float MASS_TRIED = 100.f;  // beyond it a list for a top_p seems hopeless

// What a filtered row goes by, and which parts to list.
template <class R>
__device__ __forceinline__ void plan_filter(const R& row, const Controls& controls) {
    Shared& sh = shared();
    const uint32_t key = row.top_key();
    const Softmax softmax{controls.temperature, value_of(key), LOG2E / controls.temperature};
    RowSummary o{value_of(key), 0, NONE, -FLT_MAX};
    if (row.finite(softmax)) {
        o.mass = lane_sum(row.own_mass(softmax));
        const bool by_count = controls.top_k < row.a.num_columns;
        const bool few = by_count && controls.top_k <= MAX_RANKED;
        if (few || (!by_count && controls.top_p * o.mass <= MASS_TRIED)) {
            o.bound = bound_of(row, few ? controls.top_k : NUM_TRIED);
            o.num_hits = find_hits(row, o.bound);
        } else if (by_count) {  // a guess at how far down a search needs to look
            uint32_t lowest = 0;
            for (int i = 0; i < row.each(); i++) {
                const uint32_t part = sh.part_keys[i * LANES + threadIdx.x % LANES];
                if (part > key_of(-INFINITY)) lowest = max(lowest, ~part);
            }
            o.bound = 2 * value_of(~lane_max(lowest)) - o.top;
        }
    }
    if (threadIdx.x == 0) sh.summary = o;
}

// The column of a filtered row, in the first block's first warp; -1 elsewhere.
template <class R>
__device__ __forceinline__ int filtered_draw(const R& row, const Softmax& softmax) {
    Shared& sh = shared();
    const int t = threadIdx.x;
    const RowSummary o = sh.summary;
    const bool joint = sh.controls.method == JOINT;
    const float share = sh.controls.top_p;
    const float k = sh.controls.top_k < row.a.num_columns ? float(sh.controls.top_k) : INFINITY;
    Cut cut;
    bool alone = false;
    if (o.num_hits != NONE) {
        if (row.rank) return -1;
        stage_hits(row, o.num_hits, o.bound);
        __syncthreads();
        if (t < LANES) list_staged(o.num_hits, softmax);
        __syncthreads();
        if (sh.num_listed != NONE) {
            rank_list();
            __syncthreads();
            const bool complete = k < INFINITY || o.bound == -FLT_MAX;  // the list holds the cut for sure
            int column = -1;
            if (t < LANES) {
                if (cut_by(joint, k, share, o.mass, 0, 0.f, cut) || complete) {
                    column = draw_listed(row, cut.theta, cut.edge(softmax, k, mass_of(share, o.mass), !joint));
                } else {
                    __syncwarp();  // all have read it
                    if (t == 0) sh.num_listed = NONE;
                }
            }
            if (complete) return column;
            __syncthreads();
            if (sh.num_listed != NONE) return column;
        }
        alone = true;
    }
    const float guess = o.bound > -FLT_MAX ? o.bound : o.top - 16.f * softmax.temperature;
    float p = joint || k == INFINITY ? mass_of(share, o.mass) : INFINITY;
    search(row, softmax, k, p, o.mass, -FLT_MAX, guess, alone);
    float lowest = -INFINITY;
    if (!joint && k < INFINITY && share < INFINITY) {  // then inside what that left
        if (alone || row.rank == 0) {
            rank_searched();
            if (t < LANES) {
                cut = cut_searched(row, softmax, k, p);
                if (t == 0) sh.num_staged = 0;
                const int blocks = alone ? 1 : row.size;
                __syncwarp();  // all have read the window
                if (t < blocks) {
                    Window& to = (t ? remote(&sh, t) : &sh)->window;
                    to.low = cut.theta, to.mass_above = cut.mass_at_least;
                }
            }
        }
        alone ? __syncthreads() : row.sync();
        const float mass = sh.window.mass_above;
        lowest = sh.window.low;
        alone ? __syncthreads() : row.sync();
        p = share * mass;
        search(row, softmax, INFINITY, p, mass, lowest, lowest, alone);
    }
    if (row.rank && !alone) return -1;
    rank_searched();
    if (t >= LANES) return -1;
    cut = cut_searched(row, softmax, joint || share == INFINITY ? k : INFINITY, p);
    cut.theta = fmaxf(cut.theta, lowest);
    return draw_searched(row, softmax, cut.theta, cut.edge(softmax, k, p, !joint), sh.window.result == TIES);
}

}  // namespace rwkv
