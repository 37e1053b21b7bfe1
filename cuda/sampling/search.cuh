// Filters whose boundary lies further down: searched for by value and without sorting, as in Rapid-Sampling (Triang-jyed-driung),
// until the columns in between are few enough for a list.
#pragma once

#include "list.cuh"
#include "window.cuh"

namespace rwkv {

constexpr int MIN_SAMPLED = 8192;  // columns from which a sample is looked at first
constexpr int MAX_SEARCHES = 32;

// From the values that were staged to a list of a few, theta among them, if it is there: else the window stays as it was.
// A block's work.
template <class R>
__device__ __noinline__ void narrow(const R row, const Softmax softmax, float k, float p, bool surely) {
    Shared& sh = shared();
    const int t = threadIdx.x, lane = t % LANES;
#pragma unroll 1
    for (int round = 0;; round++) {
        const float high = sh.window.high, low = sh.window.low;
        const Scale scale(low, high);
        for (int i = t; i < BUCKETS; i += num_threads()) sh.histogram[i] = 0;
        __syncthreads();
        for (int i = t; i < sh.num_staged; i += num_threads()) {
            const float v = sh.values[i];
            if (v <= high && v >= low) atomicAdd(&sh.histogram[min(unsigned(Scale::bucket(scale.place(v))), BUCKETS - 1u)], 1u);
        }
        __syncthreads();
        bound_window(softmax, scale, k, p, sh.window.num_above, sh.window.mass_above, false, 1);
        __syncthreads();
        const float begin = sh.window.begin, end = sh.window.end;
        const bool beyond = sh.window.num_first == 0;  // behind the last bucket
        if (beyond && !surely) {
            __syncthreads();
            if (t == 0) sh.window.result = REFINE;
            __syncthreads();
            return;
        }
        Extremes extremes;
        for (int part = t; part < row.num_parts(); part += num_threads()) {
            const uint32_t staged = sh.staged_at[part];
            float above = 0, here = 0;
            int count = 0;
            for (uint32_t i = staged / 512, stop = i + staged % 512; i < stop; i++) {
                const float v = sh.values[i];
                if (v > high || v < low) continue;
                const float place = fminf(scale.place(v), ROUNDER + float(BUCKETS - 1));
                if (place < begin) {
                    above += softmax.weight(v);
                } else if (place <= end) {
                    const bool behind = beyond || place > begin;
                    if (!behind) here += softmax.weight(v);
                    extremes.add(v, behind);
                    count++;
                }
            }
            sh.above[part] += above, sh.first[part] = here, sh.counts[part] = uint16_t(count);
        }
        block_max(extremes.keys);  // has a barrier
        if (t < LANES) {
            Window next = sh.window;
            const float mass_first = add_parts(row, sh.first);
            next.mass_above = add_parts(row, sh.above);
            int count = 0;
            for (int i = 0; i < row.each(); i++) count += sh.counts[lane * row.each() + i];
            const int total = lane_add(count);
            int at = lane_before(count);
            for (int i = 0; i < row.each(); i++) {
                const int part = lane * row.each() + i;
                sh.listed_at[part] = uint16_t(at), at += sh.counts[part];
            }
            bool behind;
            refine(next, extremes, k, p, mass_first, behind);
            next.result = total <= LISTED ? LISTS : extremes.one() || round == MAX_SEARCHES ? TIES : REFINE;
            if (next.result == REFINE && behind) {
                for (int i = 0; i < row.each(); i++) sh.above[lane * row.each() + i] += sh.first[lane * row.each() + i];
                next.mass_above += mass_first, next.num_above += next.num_first;
            }
            __syncwarp();
            if (lane == 0) sh.window = next, sh.num_listed = total <= LISTED ? total : NONE;
        }
        __syncthreads();
        if (sh.window.result != REFINE) {
            if (sh.window.result == TIES) return;
            for (int part = t; part < row.num_parts(); part += num_threads()) {
                if (!sh.counts[part]) continue;
                const uint32_t staged = sh.staged_at[part];
                int at = sh.listed_at[part];
                for (uint32_t i = staged / 512, stop = i + staged % 512; i < stop; i++) {
                    const float v = sh.values[i], place = fminf(scale.place(v), ROUNDER + float(BUCKETS - 1));
                    if (v <= high && v >= low && place >= begin && place <= end) sh.list[at++] = {v, softmax.weight(v)};
                }
            }
            __syncthreads();
            return;
        }
    }
}

// Append the marked ones of a warp's values to those staged in a block; where they are and how many, see `Shared::staged_at`.
__device__ __forceinline__ uint32_t stage(Shared& to, unsigned marked, const float (&v)[8]) {
    const int mine = __popc(marked), count = lane_add(mine);
    if (!count) return 0;
    const int before = lane_before(mine);
    const int at = __shfl_sync(ALL, threadIdx.x % LANES ? 0 : atomicAdd(&to.num_staged, count), 0, LANES);
    if (at + count <= STAGED) {
        float* out = to.values + at + before;
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (marked >> j & 1) *out++ = v[j];
    }
    return uint32_t(at) * 512 + count;
}

// Set the window to values between which theta is almost surely; each block of a cluster finds the same.
template <class R>
__device__ __forceinline__ void guess_bounds(const R& row, const Softmax& softmax, const Scale& scale, float k, float p,
                                             float mass, float lowest) {
    Shared& sh = shared();
    for (int i = threadIdx.x; i < BUCKETS; i += num_threads()) sh.histogram[i] = 0;
    if (threadIdx.x == 0) sh.sample_mass = 0;
    __syncthreads();
    sample_row(row, softmax, scale, p < INFINITY ? mass : 0.f, lowest);
    __syncthreads();
    guess_window(softmax, scale, k, p, mass, lowest);
    __syncthreads();
}

// Each part's mass above the window, and its values inside, for the block `to`.
template <class R>
__device__ __noinline__ void stage_window(const R row, const Softmax softmax, Shared& to, int first_part, int step) {
    Shared& sh = shared();
    const int lane = threadIdx.x % LANES;
    const float high = sh.window.high, low = fmaxf(sh.window.low, -FLT_MAX);
    int num_above = 0;
#pragma unroll 1
    for (int part = first_part; part < row.num_parts(); part += step) {
        float above = 0;
        uint32_t staged = 0;
        if (value_of(sh.part_keys[row.place_of(part)]) >= low) {
            float v[8];
            unsigned inside = 0;
            row.load(part, v);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (v[j] > high) {
                    above += softmax.weight(v[j]), num_above++;
                } else if (v[j] >= low) {
                    inside |= 1u << j;
                }
            }
            above = lane_sum(above);
            staged = stage(to, inside, v);
        }
        if (lane == 0) to.above[part] = above, to.staged_at[part] = staged;
    }
    num_above = lane_add(num_above);
    if (lane == 0) atomicAdd(&to.num_above, num_above);
}

// A list from what was staged, or REFINE when theta is not there or there are too many; a block's work.
template <class R>
__device__ __forceinline__ void try_window(const R& row, const Softmax& softmax, float k, float p) {
    Shared& sh = shared();
    const int t = threadIdx.x;
    if (t < LANES) {
        const float mass_above = add_parts(row, sh.above);
        if (t == 0) {
            const bool missed = float(sh.num_above) >= k || mass_above >= p || sh.num_staged > STAGED || !sh.num_staged;
            sh.window.result = missed ? REFINE : LISTS, sh.window.mass_above = mass_above, sh.window.num_above = sh.num_above;
        }
    }
    __syncthreads();
    if (sh.window.result == LISTS) narrow(row, softmax, k, p, false);
    if (t == 0) {
        if (sh.window.result == REFINE) sh.num_staged = 0;
        sh.num_above = 0;
    }
}

// Find where the columns at or above `lowest`, from the largest down, reach the number k or the mass p; `mass` is that of all of
// them. All blocks of the cluster work, or with `alone` one; the first one's window and list hold the result.
template <class R>
__device__ __noinline__ void search(const R row, const Softmax softmax, float k, float p, float mass, float lowest, float guess,
                                    bool alone) {
    Shared& sh = shared();
    const int t = threadIdx.x, lane = t % LANES, size = alone ? 1 : row.size, rank = alone ? 0 : row.rank;
    const int first_part = rank * num_warps() + t / LANES, step = size * num_warps(), num_parts = row.num_parts();
    const auto sync = [&] { size == 1 ? __syncthreads() : row.sync(); };
    Shared& leader = size == 1 ? sh : *remote(&sh, 0);
    float high = softmax.top, low = guess, mass_above = 0;
    int num_above = 0;
    if (p < INFINITY)  // columns with less cannot have the rest of the mass, however many
        low = softmax.top + log2f(fmaxf(0.9f * (mass - p), 1e-6f * mass) / float(row.a.num_columns)) / softmax.scale;
    low = fmaxf(low, lowest);
    if (!(low < high)) low = high - fmaxf(1e-3f * fabsf(high), 1e-3f);
    if (row.a.num_columns >= MIN_SAMPLED) {
        guess_bounds(row, softmax, Scale(low, high), k, p, mass, lowest);
        stage_window(row, softmax, leader, first_part, step);
        sync();
        if (rank == 0) {
            try_window(row, softmax, k, p);
            if (t && t < size) remote(&sh, t)->window.result = sh.window.result;
        }
        sync();
        if (sh.window.result != REFINE) return;
    }
#pragma unroll 1
    for (int round = 0;; round++) {
        const Scale scale(low, high);
        for (int i = t; i < BUCKETS; i += num_threads()) sh.histogram[i] = 0;
        __syncthreads();
#pragma unroll 1
        for (int part = first_part; part < num_parts; part += step) {
            if (Scale::bucket(scale.place(value_of(sh.part_keys[row.place_of(part)]))) >= BUCKETS) continue;
            float v[8];
            row.load(part, v);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const unsigned bucket = unsigned(Scale::bucket(scale.place(v[j])));
                if (bucket < BUCKETS && v[j] >= lowest && v[j] <= high) atomicAdd(&sh.histogram[bucket], 1u);
            }
        }
        sync();
        if (rank == 0) bound_window(softmax, scale, k, p, num_above, mass_above, round == 0 && !(p < INFINITY), size);
        sync();
        const float begin = sh.window.begin, end = sh.window.end;
        const bool beyond = sh.window.num_first == 0;  // behind the last bucket
        Extremes extremes;
#pragma unroll 1
        for (int part = first_part; part < num_parts; part += step) {
            float above = 0, here = 0;
            uint32_t staged = 0;
            if (scale.place(value_of(sh.part_keys[row.place_of(part)])) <= end) {
                float v[8];
                unsigned inside = 0;
                row.load(part, v);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float place = scale.place(v[j]);
                    if (v[j] > high || place < begin) {
                        above += softmax.weight(v[j]);
                    } else if (place <= end && v[j] >= lowest && v[j] > -INFINITY) {
                        const bool behind = beyond || place > begin;
                        if (!behind) here += softmax.weight(v[j]);
                        extremes.add(v[j], behind);
                        inside |= 1u << j;
                    }
                }
                above = lane_sum(above), here = lane_sum(here);
                staged = stage(leader, inside, v);
            }
            if (lane == 0)
                leader.above[part] = above, leader.first[part] = here, leader.staged_at[part] = staged,
                leader.counts[part] = uint16_t(staged % 512);
        }
        block_max(extremes.keys);  // has a barrier
        if (t == 0) {
#pragma unroll
            for (int i = 0; i < 4; i++) leader.extremes[i][rank] = extremes.keys[i];
        }
        sync();
        if (rank == 0) {
            if (t < LANES) {
                Window next = sh.window;
                const float mass_first = add_parts(row, sh.first);
                next.mass_above = add_parts(row, sh.above);
#pragma unroll
                for (int i = 0; i < 4; i++) extremes.keys[i] = lane_max(sh.extremes[i][lane < size ? lane : 0]);
                const int staged = sh.num_staged;
                next.result = staged <= STAGED ? LISTS : extremes.one() || round == MAX_SEARCHES ? TIES : REFINE;
                if (next.result == LISTS) {  // all of the window is there
                    next.high = value_of(max(extremes.keys[0], extremes.keys[2]));
                    next.low = value_of(~max(extremes.keys[1], extremes.keys[3]));
                    if (!staged) next.high = next.low = softmax.top;
                } else {
                    bool behind;
                    refine(next, extremes, k, p, mass_first, behind);
                    if (next.result == REFINE && behind) next.mass_above += mass_first, next.num_above += next.num_first;
                }
                __syncwarp();
                if (lane == 0 && next.result != LISTS) sh.num_staged = 0;
                if (lane < size) (lane ? remote(&sh, lane) : &sh)->window = next;
            }
            __syncthreads();
            if (sh.window.result == LISTS) narrow(row, softmax, k, p, true);
        }
        sync();
        if (sh.window.result != REFINE) return;
        high = sh.window.high, low = sh.window.low, mass_above = sh.window.mass_above, num_above = sh.window.num_above;
    }
}

__device__ __forceinline__ void rank_searched() {
    if (shared().window.result == LISTS) rank_list();
    __syncthreads();
}

// Where a search cuts; a warp's work.
template <class R>
__device__ __forceinline__ Cut cut_searched(const R& row, const Softmax& softmax, float k, float p) {
    const Shared& sh = shared();
    const Window& window = sh.window;
    Cut cut = {window.high, window.mass_above, 0, window.num_above, 0};
    if (window.result == LISTS) {
        cut.theta = -INFINITY, cut.mass_at_least = cut.mass_above;  // should the list be empty: then all are kept
        cut_list(k, p, window.num_above, window.mass_above, cut);
    } else {
        int ties = 0;
        for (int i = 0; i < row.each(); i++) ties += sh.counts[threadIdx.x % LANES * row.each() + i];
        cut.num_ties = lane_add(ties);
        cut.mass_at_least = cut.mass_above + softmax.weight(cut.theta) * cut.num_ties;
    }
    return cut;
}

// Draw from what a search left: each part's mass above, and the list or, with `ties`, equal columns of which there is no list.
template <class R>
__device__ __noinline__ int draw_searched(const R row, const Softmax softmax, float theta, float edge, bool ties) {
    const Shared& sh = shared();
    const int begin = threadIdx.x % LANES * row.each();
    int count = 0;
    for (int i = 0; i < row.each(); i++) count += sh.counts[begin + i];
    const int listed = lane_before(count);
    int at = listed;
    const auto mass = [&](int i) {  // must be asked for in order
        float sum = sh.above[begin + i];
        if (ties) return sum + edge * float(sh.counts[begin + i]);
        for (int n = sh.counts[begin + i]; n; n--) sum += kept_weight(sh.list[at++], theta, edge);
        return sum;
    };
    float own = 0, before;
    for (int i = 0; i < row.each(); i++) own += mass(i);
    at = listed;
    const float total = __shfl_sync(ALL, lane_scan(own), LANES - 1, LANES), target = sh.controls.draw_number * total;
    report_boundary(row.a, row.index, theta, edge, total);
    const int part = pick(row.each(), own, target, mass, before);
    return pick_column(row, part, before, target,
                       [&](float v) { return v > theta ? softmax.weight(v) : v == theta ? edge : 0.f; });
}

}  // namespace rwkv
