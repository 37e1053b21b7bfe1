// One token for each row of logits: penalties, temperature, filters without sorting the vocabulary, draw.
//
// The rules are those of sampling/reference.py, in the same order; so are the random numbers, and a seed gives
// the same text on CPU and GPU up to the rounding of sums at the borders between columns.
//
// A row is read once from memory, in parts of 256 columns, one warp a part: penalties are brought up to date on the way, and of
// each part its largest value and the mass of its weights are left in shared memory (`summarize`). From these follow the row's
// largest value and mass, and mostly also where to look: a greedy row or a draw from all columns reads one part again; a filter
// reads the parts that can hold kept columns again, puts the few columns above a bound on a list, and ranks them against one
// another (`list_staged`, `rank_list`). A boundary further down is searched for as in Rapid-Sampling (Triang-jyed-driung), by value
// and without sorting: a histogram of counts bounds the value from both sides, and the columns in between are listed (`search`).
// A row filtered by top_p alone, unless that is small, needs no boundary: as in FlashInfer's rejection sampling it is drawn from
// all columns until a draw is kept; the mass of larger columns and the number of equal ones decide that (`redraw`). Rows with
// noise need nothing but one pass (`noisy_argmax`).
//
// For few rows the blocks of a cluster share the parts of a row (Hopper and later). Sums go by parts, in the order of the
// columns: they depend neither on chance, nor on how many blocks share a row, nor on other rows.

#include "common.cuh"

#include <cfloat>
#include <cstring>
#include <type_traits>

namespace rwkv {

constexpr int MIN_THREADS = 256, MAX_THREADS = 768;  // of a block; more would leave them too few registers
constexpr int DENSE_BLOCKS = 4;       // of MIN_THREADS on a multiprocessor
constexpr int PART = 8 * LANES;       // columns: a vector of eight for each lane
constexpr int MAX_PARTS = 512;
constexpr int MAX_BLOCKS = 8;         // of a cluster
constexpr int MAX_GROUPS = 8;         // groups of parts for each lane, whose largest values bound a filter from below
constexpr int MAX_RANKED = 128;       // the largest top_k that is found from that bound
constexpr int NUM_TRIED = 64;         // groups whose columns are listed for a top_p, and the mass at which that seems hopeless
constexpr float MASS_TRIED = 100.f;
constexpr int LISTED = 512, STAGED = 4608;  // columns
constexpr int CANDIDATES = MIN_THREADS / LANES;  // of a redrawn row at a time, a warp for each
constexpr int MAX_DRAWN = 128 * CANDIDATES;      // never reached: at least one of four is kept on average
constexpr int MEASURED = 4;                      // values that one pass measures at most,
constexpr int SUMS = 8;                          // by two sums each; rounded up to a power of two
constexpr int TOGETHER = 4;                      // parts whose columns a warp adds up together there
constexpr int BUCKETS = 2048;
constexpr int SCANNERS = 256;    // threads that add up the buckets, however many there are: the order of sums is always the same
constexpr int SAMPLED = 8;       // a search looks first at one vector in so many,
constexpr int MIN_SAMPLED = 8192;  // where there are this many columns,
constexpr float MARGIN = 4.5f;   // and trusts what it saw to so many standard deviations
constexpr float SAMPLE_UNITS = 1 << 28;
constexpr uint32_t EXACT = 1 << 16;  // a histogram's count of columns that stand for themselves
constexpr int MAX_SEARCHES = 32;
constexpr float ROUNDER = 1 << 23;  // added to a float, leaves the nearest whole number in its low bits
constexpr float MAX_EXPONENT = 1 << 30;  // of weights, before the largest is subtracted; floats are then whole numbers apart by 64
constexpr float DOUBT = 1e-5f;      // relative error of sums, generously
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float GUMBEL_MAX = 9.6885f;  // above all Gumbel numbers
constexpr uint32_t BROKEN = 0xffffffffu;                       // the key of a NaN
constexpr int NONE = 0x7fffffff;

enum Way : int { GREEDY = 0, PLAIN = 1, JOINT = 2, SEQUENTIAL = 3, GUMBEL = 4, NOISE = 5, REDRAW = 6 };

// Pointers are on the device; [S] by slot, [B] by row, U columns. Mirrored by sampling/kernel.py.
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
    float* penalties;         // [S, U] as of the step before, without its token; rows 16-byte aligned, padded with zeros to
    int64_t penalty_stride;   // a multiple of 8 columns, this many elements apart
    uint32_t* touched;        // [S, ceil(U / 256)] bit i: penalties 8 i .. 8 i + 7 may differ from zero
    int32_t* pending_column;  // [S] the column sampled in the step before, -1 = none
    float* pending_penalty;   // [S] what that adds to it
    int64_t* out_ids;    // [B]
    bool* out_finite;    // [B]
    int64_t* last_ids;   // [S] the same by slot, or null
    float* out_boundary;  // [B, 3] for tests, or null: boundary value, weight of columns equal to it, sum of kept weights;
                          // written for rows whose boundary is looked for, JOINT and SEQUENTIAL
};

__device__ __forceinline__ int num_threads() { return int(blockDim.x); }
__device__ __forceinline__ int num_warps() { return int(blockDim.x) / LANES; }

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
          draw_number(uniform(draw_numbers(0).x)) {}
    // Of the draw, or of a redrawn row's candidate.
    __device__ __forceinline__ uint4 draw_numbers(uint32_t candidate) const {
        return philox(make_uint4(step, 0u, choice, candidate), key);
    }
    // Of the token ids from 4 * block.
    __device__ __forceinline__ uint4 column_numbers(uint32_t block) const {
        return philox(make_uint4(step, 1u, choice, block), key);
    }
};

struct Listed {
    float value, weight;
};
struct Staged {
    float value;
    int column;
};
// What a warp made of the row's parts.
struct Overview {
    float top, mass;
    int num_hits;  // parts to list, NONE: search instead
    float bound;   // columns at or above it are listed
};
// A column drawn from all. When the row's mass is laid out from the largest value down, it stands at a random place within the
// mass of its equals; it is kept when that is inside the first top_p of the row's mass.
struct Candidate {
    float value;
    int column;
    float number;       // the place among equals, in (0, 1)
    float least, most;  // bounds on the place in the row's mass
};
enum Result : int { REFINE, LISTS, TIES };
// What a search knows: columns above `high` are kept; theta is not below `low`.
struct Window {
    Result result;
    float begin, end;     // places, see `Scale`, between which theta is
    float high, low;
    float mass_above;     // of the columns above the place `begin`
    int num_above, num_first;  // and the number of columns in the bucket there
};

struct alignas(16) Shared {
    uint32_t part_keys[MAX_PARTS];  // the largest value's key, see `place_of`
    float part_masses[MAX_PARTS];   // relative to a largest weight of one
    uint32_t special[MAX_PARTS];    // bit i: the part's vector i has a bias or penalties
    float above[MAX_PARTS];         // mass of a part's columns that are kept for sure
    uint32_t staged_at[MAX_PARTS];  // where a part's staged values begin * 512 | how many
    uint16_t counts[MAX_PARTS];     // of a part's columns that are on the list
    union {
        uint16_t hits[MAX_PARTS];      // the parts that are listed
        uint16_t listed_at[MAX_PARTS];  // where a part's columns begin on the list
    };
    union {
        float first[MAX_PARTS];  // mass of those that come next, in one bucket
        int columns[LISTED];
    };
    union {
        uint32_t histogram[BUCKETS];
        struct {
            float at_least[LISTED], above[LISTED];  // masses
            uint32_t counts[LISTED];                // at least << 16 | above
        } ranks;
    };
    union {
        float values[STAGED];         // those in a search's window, part by part
        Staged staged[STAGED / 2];    // an equal share for each part that is listed
        uint32_t queues[MAX_THREADS / LANES][3 * LANES];  // of the warps, see `NoisyMax`
        float measured[2][SUMS][MAX_PARTS / TOGETHER];  // see `measure`; by turns, for a block may still be reading
    };
    Candidate candidates[CANDIDATES];
    Listed list[LISTED];  // in the order of the columns
    Controls controls;
    int64_t slot;      // for the thread that writes the result
    float* penalties;  // null for rows without
    Overview overview;
    Window window;
    union {
        float floats[3][LANES];
        uint32_t keys[4][LANES];
    } scratch;
    uint32_t extremes[4][MAX_BLOCKS];
    int num_listed;  // NONE: too many
    int num_staged;
    int num_above;  // columns above the window
    uint32_t sample_mass;
    int buckets[2];
    uint32_t found;  // key of the largest noisy value
    int column;      // which has it
    uint32_t winners[2][MAX_BLOCKS];  // the same by block
};

// The block's shared memory.
__device__ __forceinline__ Shared& shared() {
    __shared__ __align__(16) char memory[sizeof(Shared)];
    return *reinterpret_cast<Shared*>(memory);
}

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

__device__ __forceinline__ float log2_of(float x) {
#ifdef RWKV_HIP
    return log2f(x);
#else
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

// Over a warp's lanes; all of them get the result.
#ifdef RWKV_HIP
__device__ __forceinline__ uint32_t lane_max(uint32_t v) {
    for (int d = LANES / 2; d; d /= 2) v = max(v, uint32_t(__shfl_xor_sync(ALL, int(v), d, LANES)));
    return v;
}
__device__ __forceinline__ int lane_first(int v) { return lane_min(v); }
// A bit for each lane.
__device__ __forceinline__ uint32_t lane_ballot(bool v) { return uint32_t(lane_sum(int(uint32_t(v) << threadIdx.x % LANES))); }
__device__ __forceinline__ int lane_add(int v) { return lane_sum(v); }
#else
__device__ __forceinline__ uint32_t lane_max(uint32_t v) { return __reduce_max_sync(ALL, v); }
__device__ __forceinline__ int lane_first(int v) { return __reduce_min_sync(ALL, v); }
__device__ __forceinline__ uint32_t lane_ballot(bool v) { return __ballot_sync(ALL, v); }
__device__ __forceinline__ int lane_add(int v) { return __reduce_add_sync(ALL, v); }
#endif
// Sum over the lower lanes.
__device__ __forceinline__ int lane_before(int v) {
    const int lane = threadIdx.x % LANES;
    int sum = v;
    for (int d = 1; d < LANES; d *= 2) {
        const int below = __shfl_up_sync(ALL, sum, d, LANES);
        if (lane >= d) sum += below;
    }
    return sum - v;
}

// The blocks of a cluster; where there are none a block is alone.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_rank() {
    uint32_t v;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
    return int(v);
}
__device__ __forceinline__ int cluster_size() {
    uint32_t v;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(v));
    return int(v);
}
__device__ __forceinline__ void cluster_begin() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// The place of p, in shared memory, in another block.
template <class T>
__device__ __forceinline__ T* remote(T* p, int rank) {
    uint64_t q;
    asm("mapa.u64 %0, %1, %2;" : "=l"(q) : "l"(reinterpret_cast<uint64_t>(p)), "r"(rank));
    return reinterpret_cast<T*>(q);
}
#else
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_begin() {}
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
template <class T>
__device__ __forceinline__ T* remote(T* p, int) {
    return p;
}
#endif

// Eight neighbouring logits.
template <class T>
struct alignas(16) Eight {
    T x[8];
};
// The same on their way from memory, in whole registers: eight halves would be taken apart, and so waited for, at once.
template <class T>
struct alignas(16) Packed {
    uint32_t words[2 * sizeof(T)];
    __device__ __forceinline__ Eight<T> unpack() const {
        Eight<T> e;
        memcpy(&e, words, sizeof(e));
        return e;
    }
};
template <class T>
__device__ __forceinline__ T minus_infinity() {
    if constexpr (sizeof(T) == 4) {
        return -INFINITY;
    } else {
        const uint16_t bits = std::is_same<T, __half>::value ? 0xfc00 : 0xff80;
        T x;
        memcpy(&x, &bits, sizeof(x));
        return x;
    }
}
// The largest of them, NaN when one is.
template <class T>
__device__ __forceinline__ float largest_of(const Eight<T>& e) {
#ifndef RWKV_HIP
    if constexpr (std::is_same<T, __half>::value) {
        const __half2* h = reinterpret_cast<const __half2*>(e.x);
        const __half2 m = __hmax2_nan(__hmax2_nan(h[0], h[1]), __hmax2_nan(h[2], h[3]));
        return __half2float(__hmax_nan(__low2half(m), __high2half(m)));
    }
#endif
    float v = to_float(e.x[0]);
#pragma unroll
    for (int j = 1; j < 8; j++) v = max_or_nan(v, to_float(e.x[j]));
    return v;
}

// Weights are exp((value - top) / temperature), not normalised.
struct Softmax {
    float temperature, top, scale;  // scale = log2(e) / temperature
    __device__ __forceinline__ float weight(float value) const { return exp2_of((value - top) * scale); }
};

// What is rare is kept out of the way: the eight columns from `first` one by one, -inf behind the last of n.
template <class T>
__device__ __noinline__ Eight<T> fetch_slowly(const T* logits, int first, int n) {
    Eight<T> e;
#pragma unroll
    for (int j = 0; j < 8; j++) e.x[j] = first + j < n ? logits[first + j] : minus_infinity<T>();
    return e;
}

// Two halves in a register.
__device__ __forceinline__ float2 floats_of(uint32_t halves) {
    __half two[2];
    memcpy(two, &halves, sizeof(two));
    return {to_float(two[0]), to_float(two[1])};
}
__device__ __forceinline__ uint32_t halves_of(float a, float b) {
    const __half two[2] = {__float2half(a), __float2half(b)};
    uint32_t halves;
    memcpy(&halves, two, sizeof(halves));
    return halves;
}
constexpr uint32_t NAN_HALVES = 0x7fff7fff, MINUS_INFINITY_HALVES = 0xfc00fc00;

// The place of the n-th bit that is set, from 0.
__device__ __forceinline__ int place_of_bit(uint32_t bits, int n) {
    int place = 0;
#pragma unroll
    for (int width = LANES / 2; width; width /= 2) {
        const int below = __popc(bits & ((1u << width) - 1));
        if (n >= below) n -= below, bits >>= width, place += width;
    }
    return place;
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
            cluster_arrive();
            cluster_wait();
        }
    }

    // The eight columns from 8 * vector as they are in memory, -inf behind the last one.
    __device__ __forceinline__ Eight<T> fetch(int vector) const {
        const int first = 8 * vector;
        if (vector < whole) return *reinterpret_cast<const Eight<T>*>(logits + first);
        return fetch_slowly(logits, first, a.num_columns);
    }
    __device__ __forceinline__ Packed<T> read_packed(int vector) const {
        return *reinterpret_cast<const Packed<T>*>(logits + 8 * vector);
    }
    __device__ __forceinline__ Packed<T> fetch_packed(int vector) const {
        if (vector < whole) return read_packed(vector);
        const Eight<T> e = fetch_slowly(logits, 8 * vector, a.num_columns);
        Packed<T> packed;
        memcpy(packed.words, &e, sizeof(e));
        return packed;
    }
    // Bits of the columns of a vector that cannot be sampled.
    __device__ __forceinline__ unsigned hidden(int vector) const {
        const bool inside = a.allowed && 8 * vector < a.num_columns;
        return (inside ? ~a.allowed[vector] & 0xffu : 0u) | (end_masked && vector == 0 ? 1u : 0u);
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
    __device__ __forceinline__ void finish(int vector, const Eight<T>& raw, float (&v)[8]) const {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = to_float(raw.x[j]);
        if (plain) return;
        const bool special = any_special() && shared().special[vector / LANES] >> vector % LANES & 1;
        hide_and_bias(vector, hidden(vector), special, v);
        if (special && penalties) {
            float q[8];
            load8(penalties + 8 * vector, q);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] -= q[j];
        }
    }
    // A column's final value, at the same times; -inf behind the last one.
    __device__ __forceinline__ float value(int column) const {
        if (column >= a.num_columns) return -INFINITY;
        float v = to_float(logits[column]);
        if (plain) return v;
        const int vector = column / 8;
        if (hidden(vector) >> column % 8 & 1) v = -INFINITY;
        if (!any_special() || !(shared().special[vector / LANES] >> vector % LANES & 1)) return v;
#pragma unroll 1
        for (int b = 0; b < num_bias; b++)
            if (a.bias_columns[slot * a.bias_width + b] == column) v += a.bias_values[slot * a.bias_width + b];
        return penalties ? v - penalties[column] : v;
    }
    // Bits of a part's vectors that are not in memory as they count; not for rows with `allowed`.
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
        for (int i = threadIdx.x; i < num_bias; i += num_threads()) atomicOr(&sh.special[columns[i] / PART], 1u << columns[i] / 8 % LANES);
        sync();
    }

    // The first pass, over the block's share: each part's largest value, or BROKEN when a logit is NaN or +inf; with `weigh`, its
    // mass; and its special vectors, whose penalties are brought up to date. All blocks of the cluster are told.
    template <bool SPECIAL>
    __device__ __forceinline__ void summarize(float scale, bool weigh) const {
        constexpr int AHEAD = sizeof(T) == 2 && !SPECIAL ? 4 : 2;
        Shared& sh = shared();
        const int lane = threadIdx.x % LANES, step = size * num_warps();
        const bool masks = a.allowed || end_masked;
        const int words = (a.num_columns + PART - 1) / PART;
        Shared* const to = size == 1 ? &sh : remote(&sh, min(lane, size - 1));  // the block that this lane tells
        float decay = 0, hit_penalty = 0;
        int hit = -1;
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
        const auto take = [&](int part, const Eight<T>& raw, uint32_t special, float(&q)[8]) {
            const int vector = part * LANES + lane;
            float v[8], largest = largest_of(raw);
            const bool broken = !(largest < INFINITY);
            if (SPECIAL || masks || weigh) {
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = to_float(raw.x[j]);
            }
            if (SPECIAL || masks) {
                const bool mine = SPECIAL && special >> lane & 1;
                hide_and_bias(vector, hidden(vector), mine, v);
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
            Eight<T> raw[AHEAD];
            uint32_t special[AHEAD];
            float q[AHEAD][8];
            look_ahead(first, round);
#pragma unroll
            for (int u = 0; u < AHEAD; u++) special[u] = specials_of(first + u * step, round + u);
#pragma unroll
            for (int u = 0; u < AHEAD; u++)
                raw[u] = *reinterpret_cast<const Eight<T>*>(logits + 8 * ((first + u * step) * LANES + lane));
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
__device__ __forceinline__ int pick_column(const R& row, int part, float before, float target, Weight weight, float* value = nullptr) {
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
    const float own = row.own_mass(softmax), target = shared().controls.draw_number * __shfl_sync(ALL, lane_scan(own), LANES - 1, LANES);
    float before;
    const int part = pick(row.each(), own, target, [&](int i) { return row.part_mass(i, softmax); }, before);
    return pick_column(row, part, before, target, [&](float v) { return softmax.weight(v); });
}

// A redrawn row's candidate; a warp's work. `own` is the mass of the lane's parts, `total` that of all.
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

// Sums over the lanes of N numbers at once, N a power of two: lane i gets number i / (LANES / N).
template <int N, int DISTANCE = LANES / 2>
__device__ __forceinline__ float lane_sums(const float (&v)[N]) {
    if constexpr (DISTANCE == 0) {
        return v[0];
    } else if constexpr (N == 1) {
        const float sum[1] = {v[0] + __shfl_xor_sync(ALL, v[0], DISTANCE, LANES)};
        return lane_sums<1, DISTANCE / 2>(sum);
    } else {
        const bool upper = threadIdx.x & DISTANCE;
        float sums[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const float kept = upper ? v[i + N / 2] : v[i], given = upper ? v[i] : v[i + N / 2];
            sums[i] = kept + __shfl_xor_sync(ALL, given, DISTANCE, LANES);
        }
        return lane_sums<N / 2, DISTANCE / 2>(sums);
    }
}

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
        if (row.a.allowed) {
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
__device__ __noinline__ void list_staged(int num_hits, const Softmax softmax) {
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
__device__ __noinline__ void rank_list() {
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

__device__ __forceinline__ void report(const SampleArgs& a, int index, float theta, float edge, float total) {
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
    report(row.a, row.index, theta, edge, total);
    return sh.columns[min(pick(per, own, sh.controls.draw_number * total, mass, before), n - 1)];
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
    report(row.a, row.index, theta, edge, total);
    const int part = pick(row.each(), own, target, mass, before);
    return pick_column(row, part, before, target,
                       [&](float v) { return v > theta ? softmax.weight(v) : v == theta ? edge : 0.f; });
}

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
__device__ __noinline__ void bound_window(const Softmax softmax, const Scale scale, float k, float p, int num_above,
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
        if (counts[i] > 0 && may == BUCKETS && (sums[0] >= k || sums[1] * (1 + DOUBT) >= p))
            may = t * EACH + i, num_before = int(before), num_first = int(counts[i]);
        if (counts[i] > 0 && must == BUCKETS && (sums[0] >= k || sums[2] * (1 - DOUBT) >= p))
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
__device__ __noinline__ void guess_window(const Softmax softmax, const Scale scale, float k, float p, float mass, float lowest) {
    Shared& sh = shared();
    const int t = threadIdx.x;
    constexpr int EACH = BUCKETS / SCANNERS;
    const float bits = softmax.scale / scale.fineness, most = softmax.weight(scale.high);
    const float ratio = p < INFINITY ? SAMPLE_UNITS / fmaxf(float(sh.sample_mass), 1.f) : 0.f;  // from the sample's mass to the row's
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
    const int before = lane_before(mine), at = __shfl_sync(ALL, threadIdx.x % LANES ? 0 : atomicAdd(&to.num_staged, count), 0, LANES);
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
__device__ __forceinline__ void guess_bounds(const R& row, const Softmax& softmax, const Scale& scale, float k, float p, float mass, float lowest) {
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
          gumbel(controls.way == GUMBEL),
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

    // The same for vectors that cannot be read at once. No call is made for them: what is on its way would go to local memory.
    __device__ __forceinline__ uint32_t highs_one_by_one(int vector, bool& broken) const {
        float highs[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int first = 8 * vector + 4 * i;
            if (row.plain && first + 4 <= row.a.num_columns) {
                const auto* four = row.logits + first;
                highs[i] = max_or_nan(max_or_nan(to_float(four[0]), to_float(four[1])), max_or_nan(to_float(four[2]), to_float(four[3])));
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
            const float y = __fadd_rn(__fdiv_rn(value, controls.temperature), gumbel ? gumbel_of(words[0]) : noise_of(words[0], controls.noise));
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
            broken = row.a.allowed || row.num_bias ? pass<false>() : pass<true>();
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

// What a filtered row goes by, and which parts to list.
template <class R>
__device__ __forceinline__ void overlook(const R& row, const Controls& controls) {
    Shared& sh = shared();
    const uint32_t key = row.top_key();
    const Softmax softmax{controls.temperature, value_of(key), LOG2E / controls.temperature};
    Overview o{value_of(key), 0, NONE, -FLT_MAX};
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
    if (threadIdx.x == 0) sh.overview = o;
}

// The column of a filtered row, in the first block's first warp; -1 elsewhere.
template <class R>
__device__ __forceinline__ int filtered_draw(const R& row, const Softmax& softmax) {
    Shared& sh = shared();
    const int t = threadIdx.x;
    const Overview o = sh.overview;
    const bool joint = sh.controls.way == JOINT;
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

// Write down what a row's column means. All it needs is read anew: kept in registers meanwhile, it would cost every loop before.
__device__ __forceinline__ void conclude(const SampleArgs& a, int column) {
    if (threadIdx.x != 0 || cluster_rank() != 0) return;
    const Shared& sh = shared();
    const int index = int(blockIdx.x) / cluster_size();
    const bool finite = column >= 0;
    const int64_t slot = sh.slot, id = !finite ? 0 : a.ids ? a.ids[column] : a.first_id + column;
    a.out_ids[index] = id;
    a.out_finite[index] = finite;
    if (a.last_ids) a.last_ids[slot] = id;
    atomicAdd(reinterpret_cast<unsigned long long*>(a.step + slot), 1ull);  // not waited for
    if (!sh.penalties) return;
    a.pending_column[slot] = column;
    if (!finite) return;
    const bool again = sh.special[column / PART] >> column / 8 % LANES & 1 && sh.penalties[column] != 0.f;
    a.pending_penalty[slot] = again ? sh.controls.alpha_frequency : sh.controls.alpha_presence;
    atomicOr(&a.touched[slot * ((a.num_columns + PART - 1) / PART) + column / PART], 1u << column / 8 % LANES);
}

// DENSE: with fewer registers, so that more blocks of the least size share a multiprocessor.
template <class T, bool DENSE>
__global__ void __launch_bounds__(DENSE ? MIN_THREADS : MAX_THREADS, DENSE ? DENSE_BLOCKS : 1) sample_kernel(const __grid_constant__ SampleArgs a, const bool aligned) {
    Shared& sh = shared();
    const int t = threadIdx.x, size = cluster_size(), rank = cluster_rank(), index = int(blockIdx.x) / size;
    int shift = 0;
    while ((LANES * PART << shift) < a.num_columns) shift++;
    Row<T> row{a, static_cast<const T*>(a.logits) + index * a.stride, nullptr, index, 0, rank, size, shift, aligned ? a.num_columns / 8 : 0, false, false, 0};
    row.prefetch_share();
    if (t == 0) sh.num_staged = sh.num_above = 0;
    if (size > 1) cluster_begin();
    const int64_t slot = a.slots[index];
    if (slot < 0) {
        if (t == 0 && rank == 0) a.out_ids[index] = 0, a.out_finite[index] = true;
        if (size > 1) cluster_wait();
        return;
    }
    row.slot = slot;
    row.end_masked = a.step[slot] < a.first_end[slot];
    row.penalties = a.penalized[slot] ? a.penalties + slot * a.penalty_stride : nullptr;
    row.num_bias = a.num_bias[slot];
    row.plain = !a.allowed && !row.end_masked && !row.any_special();
    const int way = a.way[slot];
    const float temperature = a.temperature[slot];
    const bool by_count = a.top_k[slot] < a.num_columns, by_mass = a.top_p[slot] < INFINITY;
    const bool weigh = way == PLAIN || way == REDRAW || (way == JOINT && by_mass) || (way == SEQUENTIAL && by_mass && !by_count);
    if (t == num_threads() - 1) sh.controls = Controls(a, slot);
    if (t == 0) sh.slot = slot, sh.penalties = row.penalties;
    if (size > 1) cluster_wait();  // all blocks have begun
    if (row.num_bias) row.mark_bias();
    const bool noisy = way == GUMBEL || way == NOISE;
    if (noisy) {
        __syncthreads();
    } else {
        if (row.any_special()) {
            row.template summarize<true>(LOG2E / temperature, weigh);
        } else {
            row.template summarize<false>(LOG2E / temperature, weigh);
        }
        row.sync();
    }

    int column = -1;
    if (noisy) {
        column = noisy_argmax<DENSE>(row);
    } else if (way == GREEDY || way == PLAIN || way == REDRAW) {
        if (way != REDRAW && (t >= LANES || rank)) return;
        const uint32_t key = row.top_key();
        const Softmax softmax{temperature, value_of(key), LOG2E / temperature};
        if (way == GREEDY) {
            if (fabsf(softmax.top) < INFINITY) column = first_equal(row, key);
        } else if (row.finite(softmax)) {
            column = way == PLAIN ? plain_draw(row, softmax) : redraw(row, softmax);
        }
    } else {
        if (rank && by_count && a.top_k[slot] <= MAX_RANKED) return;
        if (t < LANES) overlook(row, sh.controls);
        __syncthreads();
        const Softmax softmax{temperature, sh.overview.top, LOG2E / temperature};
        if (row.finite(softmax)) column = filtered_draw(row, softmax);
    }
    conclude(a, column);
}

// How a launch is shaped.
struct Layout {
    int blocks = 1, threads = MIN_THREADS;  // blocks that share a row
    bool dense = false;
};

template <class T, bool DENSE>
static cudaError_t start(const SampleArgs& a, const Layout& layout, cudaStream_t stream) {
    const bool aligned = a.stride * sizeof(T) % 16 == 0 && reinterpret_cast<uintptr_t>(a.logits) % 16 == 0;
    const auto kernel = sample_kernel<T, DENSE>;
#ifdef RWKV_HIP
    kernel<<<a.num_rows, layout.threads, 0, stream>>>(a, aligned);
    return cudaGetLastError();
#else
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {unsigned(layout.blocks), 1, 1};
    const dim3 grid(a.num_rows * layout.blocks), block(layout.threads);
    cudaLaunchConfig_t config = {grid, block, 0, stream, &cluster, layout.blocks > 1 ? 1u : 0u};
    return cudaLaunchKernelEx(&config, kernel, a, aligned);
#endif
}

// Few rows: so that every multiprocessor has as many threads as it has registers for. Many: so that they take few rounds.
static cudaError_t layout_for(int num_rows, Layout& layout) {
#ifndef RWKV_HIP
    int device = 0, major = 0, processors = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
    while (2 * layout.threads <= MAX_THREADS && 2 * layout.threads * num_rows <= MAX_THREADS * processors) layout.threads *= 2;
    if (major >= 9)
        while (layout.blocks < MAX_BLOCKS && 2 * layout.blocks * num_rows <= processors) layout.blocks *= 2;
    const auto rounds = [&](int blocks) { return (num_rows + blocks * processors - 1) / (blocks * processors); };
    layout.dense = layout.threads == MIN_THREADS && rounds(DENSE_BLOCKS) < rounds(MAX_THREADS / MIN_THREADS);
#endif
    return cudaSuccess;
}

}  // namespace rwkv

// Sample one token for each row. Returns a cudaError_t: cudaErrorInvalidValue for more than 131,072 columns or an unknown type.
RWKV_EXPORT int rwkv_sample(const rwkv::SampleArgs* args, cudaStream_t stream) {
    const rwkv::SampleArgs& a = *args;
    if (a.num_rows == 0) return cudaSuccess;
    if (a.num_columns > rwkv::PART * rwkv::MAX_PARTS) return cudaErrorInvalidValue;
    rwkv::Layout layout;
    if (cudaError_t error = rwkv::layout_for(a.num_rows, layout)) return error;
    switch (a.type) {
        case rwkv::FP32: return rwkv::start<float, false>(a, layout, stream);
        case rwkv::FP16:
            return layout.dense ? rwkv::start<__half, true>(a, layout, stream) : rwkv::start<__half, false>(a, layout, stream);
        case rwkv::BF16: return rwkv::start<__nv_bfloat16, false>(a, layout, stream);
        default: return cudaErrorInvalidValue;
    }
}
