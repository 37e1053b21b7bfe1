// One token for each row of logits: penalties, temperature, filters without sorting the vocabulary, draw.
//
// The rules are those of sampling/reference.py, in the same order; so are the random numbers, and a seed gives
// the same text on CPU and GPU up to the rounding of sums at the borders between columns.
//
// One block a row at a time. A fp16 row is held in shared memory, so that memory is asked for it once; a multiprocessor has
// room for one row, so the next one is copied in while the draw from this one ends. Other rows are read again in every pass,
// from the L2 cache. The boundary of a filter is a value, theta, found without sorting the vocabulary, as in Rapid-Sampling
// (Triang-jyed-driung):
//   - a top_k of at most MAX_RANKED: the k-th largest of the threads' own maxima is a lower bound of theta, and only the few
//     columns at or above it are ranked (`rank`);
//   - else `search`: a histogram of counts or of masses; then the columns in the bucket that holds theta are ranked or, if
//     there are too many, counted in a histogram of their own.
// Then one pass in the order of the columns adds up what is kept and draws (`draw`). Penalties are zero but for tokens sampled
// before, so a bit for every eight columns tells which need a look. A sum's order does not depend on chance nor on other rows.

#include "common.cuh"

#include <cfloat>

namespace rwkv {

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / LANES;
constexpr int MAX_RANKED = 512;    // the largest top_k that is found among the threads' maxima
constexpr int BOUND_BITS = 15;     // of a value's order that are looked at for that
constexpr int BUCKETS = 256;       // of a histogram
constexpr float REACH = 10.f;      // the first histogram covers weights down to exp(-REACH) of the largest
constexpr float MOST_BITS = 4.f;   // a bucket's weights differ by at most two to this, so that none of them is lost
constexpr float UNIT = 1 << 18;    // a bucket's largest weight in whole numbers: a lane's 8,192 columns at most stay below 2^32
constexpr float ROUNDER = 1 << 23; // added to a float, leaves the nearest whole number in its low bits
constexpr int MAX_ROUNDS = 32;     // a round is one vector of eight columns for each thread
constexpr int MAX_VECTORS = MAX_ROUNDS * THREADS;
#ifdef RWKV_HIP
constexpr int MAX_KEPT = 256;  // all of `Shared` in 64 KiB
#else
constexpr int MAX_KEPT = 1024;  // special vectors whose final values are kept; those of others are computed in each pass
#endif
constexpr float LOG2E = 1.4426950408889634f;
constexpr float GUMBEL_MIN = -2.8125f, GUMBEL_MAX = 9.6885f;  // below and above all Gumbel numbers
constexpr int NONE = 0x7fffffff;

enum Way : int { GREEDY = 0, PLAIN = 1, JOINT = 2, SEQUENTIAL = 3, GUMBEL = 4, NOISE = 5 };

// Pointers are on the device; [S] by slot, [B] by row, U columns. Mirrored by sampling/rapid.py.
struct SampleArgs {
    const void* logits;  // [B, U], rows `stride` elements apart
    int64_t stride;
    int32_t type;         // Type
    int32_t num_rows;     // B
    int32_t num_columns;  // U
    int32_t bias_width;   // pairs for which a slot has room in bias_columns and bias_values
    const int64_t* slots;      // [B], -1 = padding: the row is skipped
    const int64_t* ids;        // [U] column -> token id, or null: column j is token first_id + j
    int64_t first_id;
    const uint8_t* allowed;    // bit j % 8 of byte j / 8: column j may be sampled; or null: all may
    const int32_t* way;        // [S] Way
    const float* temperature;  // [S]
    const int32_t* top_k;      // [S] 1 .. U
    const float* top_p;        // [S] > 0, +inf = off
    const float* alpha_presence;   // [S]
    const float* alpha_frequency;  // [S]
    const float* alpha_decay;      // [S]
    const float* noise;            // [S]
    const bool* penalized;         // [S]
    const int64_t* seed;           // [S]
    const int64_t* choice;         // [S]
    int64_t* step;                 // [S], counted up here
    const int64_t* first_end;      // [S]: the end token, column 0 when it is id 0, is masked before this step
    const int64_t* bias_columns;   // [S, bias_width]
    const float* bias_values;      // [S, bias_width]
    const int32_t* num_bias;       // [S] pairs in use
    float* penalties;         // [S, U] as of the step before, without its token; or null
    uint32_t* touched;        // [S, ceil(U / 256)] bit i: penalties 8 i .. 8 i + 7 may differ from zero
    int32_t* pending_column;  // [S] the column sampled in the step before, -1 = none
    float* pending_penalty;   // [S] what that adds to it
    int64_t* out_ids;    // [B]
    bool* out_finite;    // [B]
    int64_t* last_ids;   // [S] the same by slot, or null
    float* out_boundary;  // [B, 3] for tests, or null: boundary value, weight of columns equal to it, sum of kept weights
};

// What a row's slot asks for, and the key and counter of its random numbers; their layout stands in sampling/base.py.
struct Controls {
    uint2 key;
    uint32_t step, choice;
    int way, top_k;
    float temperature, top_p, noise, alpha_presence, alpha_frequency;
    float draw_number;

    __device__ __forceinline__ Controls(const SampleArgs& a, int64_t slot)
        : key(make_uint2(uint32_t(a.seed[slot]), uint32_t(uint64_t(a.seed[slot]) >> 32))),
          step(uint32_t(a.step[slot])),
          choice(uint32_t(a.choice[slot])),
          way(a.way[slot]),
          top_k(a.top_k[slot]),
          temperature(a.temperature[slot]),
          top_p(a.top_p[slot]),
          noise(a.noise[slot]),
          alpha_presence(a.alpha_presence[slot]),
          alpha_frequency(a.alpha_frequency[slot]),
          draw_number(uniform(philox(make_uint4(step, 0u, choice, 0u), key).x)) {}
    // Of the token ids from 4 * block.
    __device__ __forceinline__ uint4 column_numbers(uint32_t block) const {
        return philox(make_uint4(step, 1u, choice, block), key);
    }
};

struct alignas(16) Shared {
    union {
        uint32_t histogram[BUCKETS][LANES];  // whole numbers, whose sums do not depend on the order; lanes do not collide
        struct {                            // of each warp's vectors in each round, which are neighbours
            float mass[MAX_ROUNDS * WARPS];
            int counts[MAX_ROUNDS * WARPS];  // columns above theta << 16 | columns equal to it
        } kept;
    };
    float values[2][THREADS];
    float masses[THREADS];
    Controls controls;
    float final_values[MAX_KEPT][8];          // of the first special vectors
    uint32_t special[MAX_VECTORS / 32];       // bit i: vector i has a bias or penalties
    uint16_t num_before[MAX_VECTORS / 32];    // how many special vectors come before 32 i
    uint16_t list[THREADS];                   // special vectors worked on now
    union {
        float floats[LANES];
        int ints[LANES];
    } scratch;
    const int64_t* bias_columns;
    const float* bias_values;
    float* penalties;  // null for rows without
    int num_bias;
    int num_special;
    int num_values;
    int chosen;
};

__device__ __forceinline__ float exp2_of(float x) {
#ifdef RWKV_HIP
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// The larger one, or NaN when one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#ifdef RWKV_HIP
    return a > b || a != a ? a : b;
#else
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#endif
}

// A float's bits in an order that unsigned comparison understands.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(x + 0.f);  // -0 is 0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ float block_max(float v, Shared& sh) {  // NaN when one is
    for (int d = LANES / 2; d; d /= 2) v = max_or_nan(v, __shfl_xor_sync(ALL, v, d, LANES));
    if (threadIdx.x % LANES == 0) sh.scratch.floats[threadIdx.x / LANES] = v;
    __syncthreads();
    v = sh.scratch.floats[threadIdx.x % LANES];
    for (int d = LANES / 2; d; d /= 2) v = max_or_nan(v, __shfl_xor_sync(ALL, v, d, LANES));
    __syncthreads();
    return v;
}
__device__ __forceinline__ float block_sum(float v, Shared& sh) {
    v = lane_sum(v);
    if (threadIdx.x % LANES == 0) sh.scratch.floats[threadIdx.x / LANES] = v;
    __syncthreads();
    v = lane_sum(sh.scratch.floats[threadIdx.x % LANES]);
    __syncthreads();
    return v;
}
// Sum over the lower threads and this one.
__device__ __forceinline__ float block_scan(float v, Shared& sh) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    v = lane_scan(v);
    if (lane == LANES - 1) sh.scratch.floats[warp] = v;
    __syncthreads();
    const float lower = __shfl_sync(ALL, lane_scan(sh.scratch.floats[lane]), warp ? warp - 1 : 0, LANES);
    __syncthreads();
    return warp ? lower + v : v;
}
__device__ __forceinline__ int block_min(int v, Shared& sh) {
    v = lane_min(v);
    if (threadIdx.x % LANES == 0) sh.scratch.ints[threadIdx.x / LANES] = v;
    __syncthreads();
    v = lane_min(sh.scratch.ints[threadIdx.x % LANES]);
    __syncthreads();
    return v;
}

// The k-th largest of all threads' values, rounded down to BOUND_BITS, by bisection; each look is one barrier.
__device__ float kth_largest(float value, int k) {
    const uint32_t key = key_of(value);
    uint32_t found = 0;
    for (int bit = 31; bit >= 32 - BOUND_BITS; bit--) {
        const uint32_t tried = found | 1u << bit;
        if (__syncthreads_count(key >= tried) >= k) found = tried;
    }
    return found > key_of(-INFINITY) ? value_of(found) : -FLT_MAX;
}

// Start to copy into shared memory; the calling thread may read what it copied after `await_copies`. Ask for a line of 128
// bytes to be brought into the L2 cache. The largest of eight fp16 values, NaN when one is.
#ifdef RWKV_HIP
__device__ __forceinline__ void copy16_later(void* to, const void* from) {
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
}
__device__ __forceinline__ void copy4_later(void* to, const void* from) {
    *static_cast<uint32_t*>(to) = *static_cast<const uint32_t*>(from);
}
__device__ __forceinline__ void await_copies() {}
__device__ __forceinline__ void prefetch(const void*) {}
__device__ __forceinline__ float largest_of(const __half* p) {
    float v[8];
    load8(p, v);
    for (int j = 1; j < 8; j++) v[0] = max_or_nan(v[0], v[j]);
    return v[0];
}
#else
__device__ __forceinline__ void copy16_later(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from));
}
__device__ __forceinline__ void copy4_later(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from));
}
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ float largest_of(const __half* p) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    const __half2* h = reinterpret_cast<const __half2*>(&raw);
    const __half2 m = __hmax2_nan(__hmax2_nan(h[0], h[1]), __hmax2_nan(h[2], h[3]));
    return __half2float(__hmax_nan(__low2half(m), __high2half(m)));
}
#endif

// One row's logits after bias, masks and penalties, in vectors of eight columns; vector i belongs to thread i % THREADS, and is
// special when it has a bias or penalties. HELD: fp16 logits are in shared memory, masked; else they are read from where they
// are. What is rarely needed stays out of registers.
template <bool HELD>
struct Row {
    const SampleArgs& a;
    Shared& sh;
    __half* held;
    int index;         // in the batch
    bool aligned;      // the logits can be read 16 bytes at a time
    bool end_masked;
    bool any_special;  // the row has a bias or penalties

    __device__ __forceinline__ int vectors() const { return (a.num_columns + 7) / 8; }
    __device__ __forceinline__ bool is_special(int vector) const {
        return any_special && sh.special[vector / 32] >> vector % 32 & 1;
    }
    // Bits of the columns of a vector that cannot be sampled.
    __device__ __forceinline__ unsigned masked(int vector) const {
        return (a.allowed ? ~a.allowed[vector] & 0xffu : 0u) | (end_masked && vector == 0 ? 1u : 0u);
    }
    __device__ __forceinline__ void mask(int vector, float (&v)[8]) const {
        const unsigned bits = masked(vector);
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (bits >> j & 1) v[j] = -INFINITY;
    }

    // The eight columns from 8 * vector as they are in memory, -inf behind the last column.
    template <class T>
    __device__ __forceinline__ void raw_as(int vector, float (&v)[8]) const {
        const T* p = static_cast<const T*>(a.logits) + index * a.stride;
        const int first = 8 * vector;
        if (aligned && first + 8 <= a.num_columns) {
            load8(p + first, v);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = first + j < a.num_columns ? to_float(p[first + j]) : -INFINITY;
        }
    }
    __device__ __forceinline__ void raw(int vector, float (&v)[8]) const {
        if constexpr (HELD) {
            raw_as<__half>(vector, v);
        } else if (a.type == FP32) {
            raw_as<float>(vector, v);
        } else if (a.type == FP16) {
            raw_as<__half>(vector, v);
        } else {
            raw_as<__nv_bfloat16>(vector, v);
        }
    }
    __device__ __forceinline__ void add_bias(int vector, float (&v)[8]) const {
        for (int b = 0; b < sh.num_bias; b++) {
            const int at = int(sh.bias_columns[b]) - 8 * vector;
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (at == j) v[j] += sh.bias_values[b];
        }
    }

    // Bias and penalties, once `prepare` has brought the penalties up to date.
    __device__ __forceinline__ void adjust(int vector, float (&v)[8]) const {
        if (!is_special(vector)) return;
        const int at = sh.num_before[vector / 32] + __popc(sh.special[vector / 32] & ((1u << vector % 32) - 1));
        if (at < MAX_KEPT) {
            load8(sh.final_values[at], v);
            return;
        }
        add_bias(vector, v);
        const float* penalties = sh.penalties;
        if (penalties) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (8 * vector + j < a.num_columns) v[j] -= penalties[8 * vector + j];
        }
    }
    // Final values, from where the logits are.
    __device__ __forceinline__ void load_from_memory(int vector, float (&v)[8]) const {
        raw(vector, v);
        if (a.allowed || end_masked) mask(vector, v);
        adjust(vector, v);
    }
    // Final values of one of the thread's vectors, before `release`.
    __device__ __forceinline__ void load(int vector, float (&v)[8]) const {
        if constexpr (HELD) {
            load8(held + 8 * vector, v);
            adjust(vector, v);
        } else {
            load_from_memory(vector, v);
        }
    }
    // Whether all values of a vector are below the bound, where that is cheap to say.
    __device__ __forceinline__ bool is_below(int vector, float bound) const {
        if constexpr (HELD) return !is_special(vector) && largest_of(held + 8 * vector) < bound;
        return false;
    }
    // Call f(vector, values) for each of the thread's vectors.
    template <class F>
    __device__ __forceinline__ void sweep(F f) const {
#pragma unroll 1
        for (int vector = threadIdx.x; vector < vectors(); vector += THREADS) {
            float v[8];
            load(vector, v);
            f(vector, v);
        }
    }

    // The same, where vectors whose values are all below `bound` may be left out.
    template <class F>
    __device__ __forceinline__ void sweep_from(float bound, F f) const {
#pragma unroll 1
        for (int vector = threadIdx.x; vector < vectors(); vector += THREADS) {
            if (is_below(vector, bound)) continue;
            float v[8];
            load(vector, v);
            f(vector, v);
        }
    }

    static __device__ __forceinline__ __half minus_infinity() { return __float2half(-INFINITY); }
    // Start to bring the thread's vectors of a row into shared memory.
    __device__ __forceinline__ void hold(int row) const {
        const __half* p = static_cast<const __half*>(a.logits) + row * a.stride;
        for (int vector = threadIdx.x; vector < vectors(); vector += THREADS) {
            const bool whole = 8 * vector + 8 <= a.num_columns;
            if (aligned && whole) {
                copy16_later(held + 8 * vector, p + 8 * vector);
            } else if (reinterpret_cast<uintptr_t>(p) % 4 == 0 && whole) {
#pragma unroll
                for (int j = 0; j < 8; j += 2) copy4_later(held + 8 * vector + j, p + 8 * vector + j);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++)
                    held[8 * vector + j] = 8 * vector + j < a.num_columns ? p[8 * vector + j] : minus_infinity();
            }
        }
    }
    // Ask for a later row's logits to be brought into the L2 cache.
    __device__ __forceinline__ void prefetch_row(int later) const {
        if (later >= a.num_rows) return;
        const __half* p = static_cast<const __half*>(a.logits) + later * a.stride;
        for (int i = threadIdx.x * 64; i < a.num_columns; i += THREADS * 64) prefetch(p + i);
    }

    // The thread has read its vectors for the last time: those of the block's next row may take their place.
    __device__ __forceinline__ void release() const {
        if constexpr (HELD)
            if (index + int(gridDim.x) < a.num_rows) hold(index + gridDim.x);
    }

    // Find the special vectors, bring their penalties up to date, and keep their final values. Returns whether a logit that the
    // thread saw is NaN or +inf.
    __device__ __forceinline__ bool prepare(int64_t slot, bool penalized, int num_bias) const {
        const int t = threadIdx.x, words = (vectors() + 31) / 32;
        const int64_t* bias_columns = a.bias_columns + slot * a.bias_width;
        if (t == 0) {
            sh.penalties = penalized ? a.penalties + slot * a.num_columns : nullptr;
            sh.num_bias = num_bias;
            sh.bias_columns = bias_columns;
            sh.bias_values = a.bias_values + slot * a.bias_width;
        }
        const float decay = penalized ? a.alpha_decay[slot] : 0.f, hit_penalty = penalized ? a.pending_penalty[slot] : 0.f;
        const int hit = penalized ? a.pending_column[slot] : -1;
        if (t < words) sh.special[t] = penalized ? a.touched[slot * words + t] : 0;
        __syncthreads();
        for (int i = t; i < num_bias; i += THREADS)
            atomicOr(&sh.special[bias_columns[i] / 256], 1u << bias_columns[i] / 8 % 32);
        __syncthreads();
        const uint32_t mine = t < words ? sh.special[t] : 0;
        const int up_to_here = int(block_scan(float(__popc(mine)), sh)), num_before = up_to_here - __popc(mine);
        if (t < words) sh.num_before[t] = uint16_t(num_before);
        if (t == THREADS - 1) sh.num_special = up_to_here;
        __syncthreads();
        bool broken = false;
        for (int begin = 0; begin < sh.num_special; begin += THREADS) {
            int at = num_before - begin;
            for (uint32_t bits = mine; bits; bits &= bits - 1, at++)
                if (at >= 0 && at < THREADS) sh.list[at] = uint16_t(32 * t + __ffs(int(bits)) - 1);
            __syncthreads();
            if (begin + t < sh.num_special) {
                const int vector = sh.list[t];
                float v[8];
                raw(vector, v);
#pragma unroll
                for (int j = 0; j < 8; j++) broken |= !(v[j] < INFINITY);
                mask(vector, v);
                add_bias(vector, v);
                float* penalties = sh.penalties;
                if (penalties) {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const int column = 8 * vector + j;
                        if (column >= a.num_columns) continue;
                        float q = __fmul_rn(penalties[column], decay);
                        if (column == hit) q = __fadd_rn(q, hit_penalty);
                        penalties[column] = q;
                        v[j] -= q;
                    }
                }
                if (begin + t < MAX_KEPT) {
#pragma unroll
                    for (int j = 0; j < 8; j++) sh.final_values[begin + t][j] = v[j];
                }
            }
            __syncthreads();
        }
        return broken;
    }

    // The first pass: return the thread's largest final value; NaN when a logit is NaN or +inf. Masks what is held.
    __device__ __forceinline__ float begin(bool broken) const {
        float largest = -INFINITY;
#pragma unroll 1
        for (int vector = threadIdx.x; vector < vectors(); vector += THREADS) {
            float v[8];
            if constexpr (HELD) {
                const unsigned bits = masked(vector);
                const float high = largest_of(held + 8 * vector);
                broken |= !(high < INFINITY);
                if (!bits && !is_special(vector)) {
                    largest = fmaxf(largest, high);
                    continue;
                }
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (bits >> j & 1) held[8 * vector + j] = minus_infinity();
                load(vector, v);
            } else {
                raw(vector, v);
#pragma unroll
                for (int j = 0; j < 8; j++) broken |= !(v[j] < INFINITY);
                mask(vector, v);
                adjust(vector, v);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) largest = fmaxf(largest, v[j]);
        }
        return broken ? NAN : largest;
    }
};

// Weights are exp((value - top) / temperature), not normalised.
struct Softmax {
    float temperature, top, scale;  // scale = log2(e) / temperature
    __device__ __forceinline__ float weight(float value) const { return exp2_of((value - top) * scale); }
};

// Put the values from `low` to `high` for which `inside` holds into sh.values, in any order, and return how many there are,
// which may be more than fit. `here`: whether this thread's columns can hold any.
template <class R, class Inside>
__device__ __forceinline__ int collect(const R& row, bool here, float low, float high, Inside inside, Shared& sh) {
    if (threadIdx.x == 0) sh.num_values = 0;
    __syncthreads();
    if (here) {
        bool full = false;
        row.sweep_from(low, [&](int, const float(&v)[8]) {
            unsigned bits = 0;
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (v[j] >= low && v[j] <= high) bits |= 1u << j;
            if (!bits || full) return;
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (bits >> j & 1 && !inside(v[j])) bits ^= 1u << j;
            int at = atomicAdd(&sh.num_values, __popc(bits));
            full = at >= THREADS;
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (bits >> j & 1 && at < THREADS) sh.values[0][at++] = v[j];
        });
    }
    __syncthreads();
    return sh.num_values;
}

// Sort the values [0, count) of sh.values, largest first; the caller gets the one of its rank, -inf beyond the last.
__device__ __forceinline__ float sort_values(int count, Shared& sh) {
    int size = LANES;
    while (size < count) size *= 2;
    float value = int(threadIdx.x) < count ? sh.values[0][threadIdx.x] : -INFINITY;
    int buffer = 1;
    for (int length = 2; length <= size; length *= 2) {
        for (int distance = length / 2; distance; distance /= 2) {
            float other;
            if (distance >= LANES) {
                sh.values[buffer][threadIdx.x] = value;
                __syncthreads();
                other = sh.values[buffer][threadIdx.x ^ distance];
                buffer ^= 1;
            } else {
                other = __shfl_xor_sync(ALL, value, distance, LANES);
            }
            const bool larger = (threadIdx.x & distance) == 0, descending = (threadIdx.x & length) == 0;
            value = larger == descending ? fmaxf(value, other) : fminf(value, other);
        }
    }
    __syncthreads();
    return value;
}

// Among the values of sh.values: the largest at which `k` of them, or the mass `p`, are reached; the smallest when neither is.
// `share` < inf: then, if lower down than the value, that of the first at which `share` of the mass down to it is reached.
__device__ __forceinline__ float rank(int count, float k, float p, float share, const Softmax& softmax, Shared& sh) {
    const int i = threadIdx.x;
    const float value = sort_values(count, sh);
    const float mass = block_scan(softmax.weight(value), sh);
    sh.values[0][i] = value;
    sh.masses[i] = mass;
    int at = min(block_min(float(i + 1) >= k || mass >= p ? i : NONE, sh), count - 1);
    if (share < INFINITY) {
        const int last = __syncthreads_count(i < count && value >= sh.values[0][at]) - 1;
        at = min(at, block_min(mass >= share * sh.masses[last] ? i : NONE, sh));
    }
    return sh.values[0][at];
}

// The largest value at which the running sum over the columns at or above `lowest`, from the largest down, reaches `target`: of
// ones (`by_count`), or of weights, where `target` is a share of the whole sum, `all`. All threads get the result.
template <class R>
__device__ __forceinline__ float search(const R& row, bool by_count, float lowest, float target, const Softmax& softmax,
                                        Shared& sh, float& all) {
    const int t = threadIdx.x, lane = t % LANES;
    float low = lowest, high = softmax.top, above = 0;
    float fineness = BUCKETS / (REACH * softmax.temperature);  // buckets for each unit of the values
    all = -1;
    while (true) {
        // A bucket's number is in the low bits of `place`, which falls with v.
        const auto place = [&](float v) { return fminf((high - v) * fineness, BUCKETS - 1) + ROUNDER; };
        const float bits = softmax.scale / fineness;  // by which weights fall from one bucket to the next
        const float most = softmax.weight(high);
        for (int i = t; i < BUCKETS * LANES; i += THREADS) (&sh.histogram[0][0])[i] = 0;
        __syncthreads();
        const auto count = [&](float v) {
            const float at = place(v);
            uint32_t amount = 1;
            if (!by_count) {
                const float further = (high - v) * fineness - (at - ROUNDER);  // -0.5 .. 0.5, from the bucket's middle
                amount = __float_as_uint(UNIT * exp2_of(-(further + 0.5f) * bits) + ROUNDER) - __float_as_uint(ROUNDER);
            }
            atomicAdd(&sh.histogram[__float_as_uint(at) % BUCKETS][lane], amount);
        };
        if (low == -FLT_MAX && high == softmax.top && !by_count) {
            row.sweep([&](int, const float(&v)[8]) {
#pragma unroll
                for (int j = 0; j < 8; j++) count(v[j]);  // -inf counts as zero
            });
        } else {
            row.sweep_from(low, [&](int, const float(&v)[8]) {
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (v[j] >= low && v[j] <= high) count(v[j]);
            });
        }
        __syncthreads();
        {
            // Four threads a bucket; they begin at different lanes, so as not to collide.
            const int bucket = t / 4;
            uint64_t part = 0;
#pragma unroll
            for (int i = 0; i < LANES / 4; i++) part += sh.histogram[bucket][t % 4 * (LANES / 4) + (i + bucket) % (LANES / 4)];
            float sum = float(part);
            sum += __shfl_xor_sync(ALL, sum, 1, LANES);
            sum += __shfl_xor_sync(ALL, sum, 2, LANES);
            if (t % 4 == 0) sh.masses[bucket] = by_count ? sum : sum * (most / UNIT) * exp2_of((0.5f - bucket) * bits);
        }
        __syncthreads();
        // Every warp finds the first bucket that reaches the target; the last with anything, should rounding leave it out.
        constexpr int EACH = BUCKETS / LANES;
        float sums[EACH], own = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) sums[i] = sh.masses[lane * EACH + i], own += sums[i];
        const float inclusive = lane_scan(own);
        if (all < 0) {
            all = __shfl_sync(ALL, inclusive, LANES - 1, LANES);
            target = by_count ? fminf(target, all) : target * all;
        }
        float running = above + (inclusive - own), before = 0, sum = 0;
        int found = NONE, last = -1;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (sums[i] > 0 && found == NONE) {
                last = lane * EACH + i, before = running, sum = sums[i];
                if (running + sums[i] >= target) found = last;
            }
            running += sums[i];
        }
        int bucket = lane_min(found);
        if (bucket == NONE) bucket = -lane_min(-last);
        above = __shfl_sync(ALL, before, bucket / EACH, LANES);
        sum = __shfl_sync(ALL, sum, bucket / EACH, LANES);

        // How many columns are inside at most: as many as its sum holds of its lowest weight.
        const bool open = bucket == BUCKETS - 1;  // holds whatever lies beyond, too
        const float least = by_count ? 1.f : open ? 0.f : most * exp2_of((-0.5f - bucket) * bits);
        const auto inside = [&](float v) { return __float_as_uint(place(v)) % BUCKETS == bucket; };
        const float from = open ? low : fmaxf(low, high - (bucket + 1) / fineness);
        const float to = fminf(high, high - (bucket - 1) / fineness);
        if (sum <= 1.01f * least * THREADS) {
            const int num_inside = collect(row, true, from, to, inside, sh);
            const float rest = target - above;
            if (num_inside <= THREADS)
                return rank(num_inside, by_count ? rest : INFINITY, by_count ? INFINITY : rest, INFINITY, softmax, sh);
        }
        float largest = -INFINITY, smallest = INFINITY;
        row.sweep_from(from, [&](int, const float(&v)[8]) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (v[j] >= from && v[j] <= to && inside(v[j]))
                    largest = fmaxf(largest, v[j]), smallest = fminf(smallest, v[j]);
        });
        largest = block_max(largest, sh);
        smallest = -block_max(-smallest, sh);
        if (largest == smallest || (largest == high && smallest == low)) return largest;
        high = largest, low = smallest;
        fineness = (BUCKETS - 1) / fminf(high - low, FLT_MAX);
        if (!by_count) fineness = fmaxf(fineness, softmax.scale / MOST_BITS);
        fineness = fminf(fineness, FLT_MAX);
    }
}

// Draw among the columns above theta, each by its weight, and those equal to it, each by a weight, `edge`, that makes the mass
// p or the number k; `whole`: by their own. Without FILTERED: among all. In the order of columns: the first whose running sum
// exceeds the draw's number times the total. All threads get the column.
template <bool FILTERED, class R>
__device__ __forceinline__ int draw(const R& row, const Softmax& softmax, float theta, float k, float p, bool whole,
                                    Shared& sh) {
    const int lane = threadIdx.x % LANES;
    const int rounds = (row.vectors() + THREADS - 1) / THREADS;
    for (int vector = lane + threadIdx.x / LANES * LANES; vector < rounds * THREADS; vector += THREADS) {
        float mass = 0;
        int counts = 0;
        bool here = vector < row.vectors();
        if constexpr (FILTERED) here = here && !row.is_below(vector, theta);
        if (here) {
            float v[8];
            row.load(vector, v);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float w = softmax.weight(v[j]);
                if constexpr (FILTERED) {
                    if (v[j] > theta) mass += w, counts += 1 << 16;
                    if (v[j] == theta) counts++;
                } else {
                    mass += w;
                }
            }
        }
        if (!FILTERED || __any_sync(ALL, counts)) {
            mass = lane_sum(mass);
            if constexpr (FILTERED) counts = lane_sum(counts);
        }
        if (lane == 0) sh.kept.mass[vector / LANES] = mass, sh.kept.counts[vector / LANES] = counts;
    }
    row.release();
    __syncthreads();
    if (threadIdx.x < LANES) {
        const int begin = lane * rounds, end = begin + rounds;
        float mass = 0;
        int num_above = 0, ties = 0;
        for (int i = begin; i < end; i++)
            mass += sh.kept.mass[i], num_above += sh.kept.counts[i] >> 16, ties += sh.kept.counts[i] & 0xffff;
        const float higher = lane_sum(mass);
        num_above = lane_sum(num_above);
        const int all_ties = lane_sum(ties);
        const float w = softmax.weight(theta);
        float edge = w;
        if (!whole && all_ties)
            edge = fminf(fmaxf(fminf((p - higher) / all_ties, w * ((k - num_above) / all_ties)), 0.f), w);
        const float own = mass + edge * ties;
        const float inclusive = lane_scan(own);
        const float total = __shfl_sync(ALL, inclusive, LANES - 1, LANES);
        const float target = sh.controls.draw_number * total;
        if (FILTERED && row.a.out_boundary && lane == 0) {
            float* out = row.a.out_boundary + 3 * row.index;
            out[0] = theta, out[1] = edge, out[2] = total;
        }

        // The lane's first warp and round over the target, or its last with any weight.
        float running = inclusive - own, before = 0, last_before = 0;
        int at = NONE, last = -1;
        for (int i = begin; i < end; i++) {
            const float sum = sh.kept.mass[i] + edge * (sh.kept.counts[i] & 0xffff);
            if (sum > 0) last = i, last_before = running;
            if (at == NONE && sum > 0 && running + sum > target) at = i, before = running;
            running += sum;
        }
        int first = lane_min(at);
        if (first == NONE) first = -lane_min(-last), before = last_before;  // rounding left the target unreached
        before = __shfl_sync(ALL, before, first / rounds, LANES);

        const int vector = first * LANES + lane;
        float weights[8], sum = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) weights[j] = 0;
        if (vector < row.vectors()) {
            float v[8];
            row.load_from_memory(vector, v);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                weights[j] = v[j] > theta ? softmax.weight(v[j]) : v[j] == theta ? edge : 0.f;
                sum += weights[j];
            }
        }
        running = before + lane_scan(sum) - sum;
        int column = NONE, last_column = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            running += weights[j];
            if (weights[j] > 0) {
                last_column = 8 * vector + j;
                if (column == NONE && running > target) column = last_column;
            }
        }
        column = lane_min(column);
        if (column == NONE) column = -lane_min(-last_column);
        if (lane == 0) sh.chosen = column;
    }
    __syncthreads();
    return sh.chosen;
}

__device__ __forceinline__ float noise_of(uint32_t word, float width) { return __fmul_rn(width, uniform(word)); }
__device__ __forceinline__ float gumbel_of(uint32_t word) { return -logf(fmaxf(-logf(uniform(word)), 6.2e-5f)); }

// The column with the largest x = value / temperature after noise, the lowest of several.
template <class R>
__device__ __forceinline__ int noisy_argmax(const R& row, const Softmax& softmax, Shared& sh) {
    const Controls& controls = sh.controls;
    const bool gumbel = controls.way == GUMBEL;
    const int64_t* ids = row.a.ids;
    const int64_t first_id = row.a.first_id;
    const bool in_fours = !ids && first_id % 4 == 0;  // four neighbouring columns share one call of the generator
    // `best` is what wins at least, `best_value` the value that has it without noise, `bar` the least that may reach it with
    // noise, with room for rounding.
    const float reach = gumbel ? GUMBEL_MAX : controls.noise;
    float best = __fdiv_rn(softmax.top, softmax.temperature) + (gumbel ? GUMBEL_MIN : 0.f), best_value, bar;
    const auto update = [&] {
        best_value = best * softmax.temperature;
        bar = best_value - reach * softmax.temperature - 1e-5f * (fabsf(best_value) + reach * softmax.temperature);
    };
    update();
    best -= 1e-6f * fabsf(best);
    int best_column = NONE;
    row.sweep_from(bar, [&](int vector, const float(&v)[8]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float high = fmaxf(fmaxf(v[4 * half], v[4 * half + 1]), fmaxf(v[4 * half + 2], v[4 * half + 3]));
            if (!(high >= bar)) continue;
            const int first = 8 * vector + 4 * half;
            uint32_t words[4];
            if (in_fours) {
                const uint4 four = controls.column_numbers(uint32_t((first_id + first) / 4));
                words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float value = v[4 * half + j];
                if (!(value >= bar)) continue;
                if (!in_fours) {
                    const int64_t id = ids ? ids[first + j] : first_id + first + j;
                    const uint4 four = controls.column_numbers(uint32_t(id / 4));
                    const int word = int(id % 4);
                    words[j] = word == 0 ? four.x : word == 1 ? four.y : word == 2 ? four.z : four.w;
                }
                // -log u >= 1 - u, so Gumbel noise of best - x needs 1 - u <= exp(x - best)
                if (gumbel && 1.f - uniform(words[j]) > 1.01f * exp2_of((value - best_value) * softmax.scale) + 1e-6f) continue;
                const float y = __fadd_rn(__fdiv_rn(value, softmax.temperature),
                                          gumbel ? gumbel_of(words[j]) : noise_of(words[j], controls.noise));
                if (y > best) best = y, best_column = first + j, update();
            }
        }
    });
    row.release();
    const float won = block_max(best_column == NONE ? -INFINITY : best, sh);
    return block_min(best_column != NONE && best == won ? best_column : NONE, sh);
}

template <class R>
__device__ __forceinline__ int first_equal(const R& row, bool here, float value, Shared& sh) {
    int column = NONE;
    if (here) {
        row.sweep([&](int vector, const float(&v)[8]) {
#pragma unroll
            for (int j = 7; j >= 0; j--)
                if (v[j] == value) column = min(column, 8 * vector + j);
        });
    }
    row.release();
    return block_min(column, sh);
}

// A draw behind one of the filters, or from all columns. `largest`: of the thread's columns.
template <class R>
__device__ __forceinline__ int filtered_draw(const R& row, const Softmax& softmax, float largest, Shared& sh) {
    if (sh.controls.way == PLAIN) return draw<false>(row, softmax, -INFINITY, INFINITY, INFINITY, true, sh);
    const int top_k = sh.controls.top_k;
    const float share = sh.controls.top_p;
    const bool by_count = top_k < row.a.num_columns, by_mass = share < INFINITY;
    const bool joint = sh.controls.way == JOINT;
    float theta = -INFINITY, p = INFINITY;
    const float k = by_count ? float(top_k) : INFINITY;
    bool found = false;
    if (by_count && top_k <= MAX_RANKED) {
        if (joint && by_mass) {
            float sum = 0;
            row.sweep([&](int, const float(&v)[8]) {
#pragma unroll
                for (int j = 0; j < 8; j++) sum += softmax.weight(v[j]);
            });
            p = share * block_sum(sum, sh);
        }
        const float bound = kth_largest(largest, top_k);
        const int count = collect(row, largest >= bound, bound, INFINITY, [](float) { return true; }, sh);
        found = count <= THREADS;
        if (found) theta = rank(count, k, p, joint ? INFINITY : share, softmax, sh);
    }
    if (!found) {
        for (int stage = by_count ? 0 : 1; stage < (by_mass ? 2 : 1); stage++) {
            const float lowest = joint || !by_count || stage == 0 ? -FLT_MAX : theta;
            float all;
            const float value = search(row, stage == 0, lowest, stage == 0 ? k : share, softmax, sh, all);
            theta = fmaxf(theta, value);
            if (stage == 1) p = share * all;
        }
    }
    return draw<true>(row, softmax, theta, k, p, !joint, sh);
}

template <bool HELD>
__device__ __forceinline__ void sample_row(Row<HELD>& row) {
    const SampleArgs& a = row.a;
    Shared& sh = row.sh;
    const int t = threadIdx.x, words = (row.vectors() + 31) / 32;
    const int64_t slot = a.slots[row.index];
    bool broken = false;
    if (slot >= 0) {
        const Controls controls(a, slot);
        const bool penalized = a.penalties && a.penalized[slot];
        const int num_bias = a.num_bias[slot];
        row.end_masked = a.step[slot] < a.first_end[slot];
        row.any_special = penalized || num_bias;
        if (row.any_special) broken = row.prepare(slot, penalized, num_bias);
        if (t == 0) sh.controls = controls;
    }
    if constexpr (HELD) await_copies();
    if (slot < 0) {
        row.release();
        if (t == 0) a.out_ids[row.index] = 0, a.out_finite[row.index] = true;
        return;
    }
    const float largest = row.begin(broken);
    const float top = block_max(largest, sh);  // and what the threads wrote is there for all
    if constexpr (HELD) row.prefetch_row(row.index + gridDim.x);
    const bool finite = top > -INFINITY && top < INFINITY;
    int column = 0;
    if (finite) {
        const float temperature = sh.controls.temperature;
        const Softmax softmax{temperature, top, LOG2E / temperature};
        const int way = sh.controls.way;
        if (way == GREEDY) {
            column = first_equal(row, largest == top, top, sh);
        } else if (way == GUMBEL || way == NOISE) {
            column = noisy_argmax(row, softmax, sh);
        } else {
            column = filtered_draw(row, softmax, largest, sh);
        }
    } else {
        row.release();
    }
    if (t == 0) {
        const int64_t id = !finite ? 0 : a.ids ? a.ids[column] : a.first_id + column;
        a.out_ids[row.index] = id;
        a.out_finite[row.index] = finite;
        if (a.last_ids) a.last_ids[slot] = id;
        atomicAdd(reinterpret_cast<unsigned long long*>(a.step + slot), 1ull);  // not waited for
        if (row.any_special && sh.penalties) {
            a.pending_column[slot] = finite ? column : -1;
            if (finite) {
                const bool again = row.is_special(column / 8) && sh.penalties[column] != 0.f;
                a.pending_penalty[slot] = again ? sh.controls.alpha_frequency : sh.controls.alpha_presence;
                atomicOr(&a.touched[slot * words + column / 256], 1u << column / 8 % 32);
            }
        }
    }
    __syncthreads();  // before the next row uses shared memory
}

// A block samples rows blockIdx.x, blockIdx.x + gridDim.x, ...
template <bool HELD>
__global__ void __launch_bounds__(THREADS) sample_kernel(const __grid_constant__ SampleArgs a, const bool aligned) {
    extern __shared__ __align__(16) char memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    Row<HELD> row{a, sh, reinterpret_cast<__half*>(memory + sizeof(Shared)), int(blockIdx.x), aligned, false, false};
    if constexpr (HELD) row.hold(row.index);
#pragma unroll 1
    for (; row.index < a.num_rows; row.index += gridDim.x) sample_row(row);
}

template <bool HELD>
static cudaError_t start(const SampleArgs& a, int num_blocks, size_t bytes, cudaStream_t stream) {
    const bool aligned = a.stride % 8 == 0 && reinterpret_cast<uintptr_t>(a.logits) % 16 == 0;
    const cudaError_t error =
        cudaFuncSetAttribute((const void*)sample_kernel<HELD>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
    if (error != cudaSuccess) return error;
    sample_kernel<HELD><<<num_blocks, THREADS, bytes, stream>>>(a, aligned);
    return cudaGetLastError();
}

}  // namespace rwkv

// Sample one token for each row. Returns a cudaError_t: cudaErrorInvalidValue for more than 262,144 columns or an unknown type.
RWKV_EXPORT int rwkv_sample(const rwkv::SampleArgs* args, cudaStream_t stream) {
    const rwkv::SampleArgs& a = *args;
    if (a.num_rows == 0) return cudaSuccess;
    if (a.num_columns > 8 * rwkv::MAX_VECTORS || a.type < rwkv::FP32 || a.type > rwkv::BF16) return cudaErrorInvalidValue;
    const size_t bytes = sizeof(rwkv::Shared);
#ifndef RWKV_HIP
    int device = 0, most = 0, num_processors = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, device)) return error;
    const size_t held = bytes + size_t(a.num_columns + 7) / 8 * 16;
    if (a.type == rwkv::FP16 && held <= size_t(most))
        return rwkv::start<true>(a, a.num_rows < num_processors ? a.num_rows : num_processors, held, stream);
#endif
    return rwkv::start<false>(a, a.num_rows, bytes, stream);
}
