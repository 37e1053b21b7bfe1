// One token for each row of logits: penalties, temperature, filters without sorting the vocabulary, draw.
//
// One block a row. The rules, in the words of sampling/reference.py, are the same; so are the random numbers, so a seed gives
// the same text on CPU and GPU up to the rounding of sums at the borders between columns.
//
// The threshold search is after Rapid-Sampling (Triang-jyed-driung): the boundary value is found, nothing of the vocabulary is
// sorted. Here one pass keeps each thread's maximum; the k-th largest of these maxima is a lower bound of the k-th largest
// logit, so only the few threads at or above it look at their columns again, and only those few candidates are sorted, in
// shared memory. Rows whose candidates do not hold the boundary (flat, and filtered by mass alone) narrow it by passes of eight
// intervals. All sums have a fixed order: results do not depend on the batch.

#include "common.cuh"

namespace rwkv {

constexpr int THREADS = 1024;
constexpr int GROUP_K = 512;  // rank among the thread maxima that bounds the candidates of rows with a larger top_k
constexpr int CAP = 2048;     // candidates that fit into shared memory
constexpr int SPLITS = 7;     // thresholds a narrowing pass looks at
constexpr float LOG2E = 1.4426950408889634f;
constexpr float GUMBEL_MAX = 9.6885f;  // above -log(6.2e-5)

enum Way : int { GREEDY = 0, PLAIN = 1, JOINT = 2, SEQUENTIAL = 3, GUMBEL = 4, NOISE = 5 };

// Pointers are on the device; [S] by slot, [B] by row, U columns. Mirrored by sampling/rapid.py.
struct SampleArgs {
    const void* logits;  // [B, U], rows `stride` elements apart
    int64_t stride;
    int32_t type;         // Type
    int32_t num_rows;     // B
    int32_t num_columns;  // U
    int32_t num_bias;     // pairs a slot in bias_columns and bias_values
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
    const int64_t* bias_columns;   // [S, num_bias]
    const float* bias_values;      // [S, num_bias]
    const bool* biased;            // [S]
    float* penalties;         // [S, U] as of the step before, without its token; or null
    int32_t* pending_column;  // [S] the column sampled in the step before, -1 = none
    float* pending_penalty;   // [S] what that adds to it
    int64_t* out_ids;    // [B]
    bool* out_finite;    // [B]
    int64_t* last_ids;   // [S] the same by slot, or null
    float* out_boundary;  // [B, 3] for tests, or null: boundary value, weight of columns equal to it, sum of kept weights
};

// A float's bits in an order that unsigned comparison understands.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(x + 0.f);  // -0 is 0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct Shared {
    union {
        float floats[LANES];
        int ints[LANES];
    } scratch;
    float masses[SPLITS][LANES];
    int counts[SPLITS][LANES];
    uint64_t candidates[CAP];  // key << 32 | ~column: descending order is by value, then by rising column
    float weights[CAP];
    int num_candidates;
    int chosen;
    float broadcast[4];
    uint32_t theta;
};

__device__ __forceinline__ float block_max(float v, Shared& sh) {
    v = lane_max(v);
    if (threadIdx.x % LANES == 0) sh.scratch.floats[threadIdx.x / LANES] = v;
    __syncthreads();
    v = lane_max(sh.scratch.floats[threadIdx.x % LANES]);
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

// One row's view of its logits after bias, masks and penalties.
template <class T>
struct Row {
    const T* logits;
    const float* penalties;  // null for rows without
    const uint8_t* allowed;
    const int64_t* bias_columns;
    const float* bias_values;
    int num_bias;
    int num_columns;
    bool end_masked;
    bool aligned;  // rows and penalties can be read 16 bytes at a time

    __device__ __forceinline__ int vectors() const { return (num_columns + 7) / 8; }

    // The eight columns from 8 * vector, -inf behind the last column.
    __device__ __forceinline__ void raw(int vector, float (&v)[8]) const {
        const int first = 8 * vector;
        if (aligned) {
            load8(logits + first, v);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = first + j < num_columns ? to_float(logits[first + j]) : -INFINITY;
        }
    }
    __device__ __forceinline__ void adjust(int vector, float (&v)[8]) const {
        const int first = 8 * vector;
        if (num_bias) {
            for (int b = 0; b < num_bias; b++) {
                const int at = int(bias_columns[b]) - first;
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (at == j) v[j] += bias_values[b];
            }
        }
        if (allowed) {
            const unsigned bits = allowed[vector];
            if (bits != 0xff) {
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (!(bits >> j & 1)) v[j] = -INFINITY;
            }
        }
        if (end_masked && vector == 0) v[0] = -INFINITY;
    }
    __device__ __forceinline__ void subtract(int vector, float (&v)[8]) const {
        const int first = 8 * vector;
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (first + j < num_columns) v[j] -= penalties[first + j];
    }
    // Final values; the first pass has brought the penalties up to date.
    __device__ __forceinline__ void load(int vector, float (&v)[8]) const {
        raw(vector, v);
        adjust(vector, v);
        if (penalties) subtract(vector, v);
    }
};

// Sort `count` candidates in shared memory, largest first, padding with zeros to a power of two. All threads call it.
__device__ void sort_candidates(uint64_t* keys, int count) {
    int size = 2;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += THREADS) keys[i] = 0;
    __syncthreads();
    for (int length = 2; length <= size; length *= 2) {
        for (int distance = length / 2; distance; distance /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int low = 2 * i - (i & (distance - 1)), high = low + distance;
                const uint64_t a = keys[low], b = keys[high];
                if ((a < b) == ((low & length) == 0)) keys[low] = b, keys[high] = a;
            }
            if (size <= 2 * LANES) {
                if (threadIdx.x < LANES) __syncwarp();
            } else {
                __syncthreads();
            }
        }
    }
    __syncthreads();
}

// What the boundary is: columns above `theta` keep their weight, those equal to it get `edge`, the others none.
struct Boundary {
    uint32_t theta;
    float edge;
    float total;
};

// By the first 32 threads: the boundary among sorted candidates, of which `above` columns of mass `mass` lie higher up and are
// kept. weights[i] = exp(x_i - max). Masses are unnormalised: p is top_p times the sum over all columns.
// Returns false when the boundary lies further down.
__device__ bool find_boundary(const uint64_t* keys, const float* weights, int count, int above, float mass, int k, float p,
                              bool whole, Boundary& out) {
    const int lane = threadIdx.x, each = (count + LANES - 1) / LANES, begin = lane * each;
    const int end = min(begin + each, count);
    float own = 0;
    for (int i = begin; i < end; i++) own += weights[i];
    float running = mass + lane_scan(own) - own;
    int at = count;  // the first candidate at which a limit is reached
    for (int i = begin; i < end; i++) {
        running += weights[i];
        if (above + i + 1 >= k || running >= p) {
            at = i;
            break;
        }
    }
    for (int d = LANES / 2; d; d /= 2) at = min(at, __shfl_xor_sync(ALL, at, d, LANES));
    if (at == count) return false;
    const uint32_t theta = uint32_t(keys[at] >> 32);
    float higher = 0;
    int num_higher = 0, ties = 0;
    for (int i = begin; i < end; i++) {
        const uint32_t key = uint32_t(keys[i] >> 32);
        if (key > theta) higher += weights[i], num_higher++;
        if (key == theta) ties++;
    }
    higher = mass + lane_sum(higher);
    num_higher = above + lane_sum(num_higher);
    ties = lane_sum(ties);
    const float w = weights[at];
    out.theta = theta;
    out.edge = whole ? w : fminf(fmaxf(fminf((p - higher) / ties, w * float(k - num_higher) / ties), 0.f), w);
    out.total = higher + out.edge * ties;
    return true;
}

// Count and mass of the columns at or above each of SPLITS thresholds. All threads get the result.
template <class R>
__device__ void measure(const R& row, const uint32_t (&thresholds)[SPLITS], float scale, float top, Shared& sh,
                        int (&count)[SPLITS], float (&mass)[SPLITS]) {
#pragma unroll
    for (int s = 0; s < SPLITS; s++) count[s] = 0, mass[s] = 0;
    float v[8];
    for (int vector = threadIdx.x; vector < row.vectors(); vector += THREADS) {
        row.load(vector, v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t key = key_of(v[j]);
            if (key < thresholds[0]) continue;
            const float e = exp2f((v[j] - top) * scale);
#pragma unroll
            for (int s = 0; s < SPLITS; s++)
                if (key >= thresholds[s]) count[s]++, mass[s] += e;
        }
    }
#pragma unroll
    for (int s = 0; s < SPLITS; s++) {
        const int c = lane_sum(count[s]);
        const float m = lane_sum(mass[s]);
        if (threadIdx.x % LANES == 0) sh.counts[s][threadIdx.x / LANES] = c, sh.masses[s][threadIdx.x / LANES] = m;
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < SPLITS; s++) {
        count[s] = lane_sum(sh.counts[s][threadIdx.x % LANES]);
        mass[s] = lane_sum(sh.masses[s][threadIdx.x % LANES]);
    }
    __syncthreads();
}

// Put the columns with low <= key < high into the candidates, with their weights sorted along.
template <class R>
__device__ void gather(const R& row, uint32_t low, uint64_t high, float temperature, float top, Shared& sh) {
    if (threadIdx.x == 0) sh.num_candidates = 0;
    __syncthreads();
    float v[8];
    for (int vector = threadIdx.x; vector < row.vectors(); vector += THREADS) {
        row.load(vector, v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t key = key_of(v[j]);
            if (key >= low && key < high) {
                const int at = atomicAdd(&sh.num_candidates, 1);
                if (at < CAP) sh.candidates[at] = uint64_t(key) << 32 | uint32_t(~(8 * vector + j));
            }
        }
    }
    __syncthreads();
    const int count = min(sh.num_candidates, CAP);
    sort_candidates(sh.candidates, count);
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const float x = __fdiv_rn(value_of(uint32_t(sh.candidates[i] >> 32)), temperature);
        sh.weights[i] = expf(x - top);
    }
    __syncthreads();
}

// Narrow the interval of the boundary until its columns fit into shared memory or are all equal. At `high` neither limit is
// reached, at `low` one is. All threads call it and get the result.
template <class R>
__device__ __noinline__ Boundary narrow(const R& row, uint32_t low, uint32_t high, int above, float mass, int k, float p, bool whole,
                           float temperature, float top_z, float top_x, Shared& sh) {
    const float scale = LOG2E / temperature;
    while (true) {
        uint32_t thresholds[SPLITS];
        const uint64_t width = uint64_t(high) - low;
#pragma unroll
        for (int s = 0; s < SPLITS; s++) thresholds[s] = low + uint32_t(width * s / SPLITS);
        int count[SPLITS];
        float sum[SPLITS];
        measure(row, thresholds, scale, top_z, sh, count, sum);
        if (count[0] < k && sum[0] < p) k = count[0];  // fewer columns can be sampled than k
        int reached = 0;  // the highest threshold at which a limit is reached; at `low` one always is
        for (int s = 1; s < SPLITS; s++)
            if (count[s] >= k || sum[s] >= p) reached = s;
        if (reached + 1 < SPLITS) high = thresholds[reached + 1], above = count[reached + 1], mass = sum[reached + 1];
        low = thresholds[reached];
        const int inside = count[reached] - above;
        if (high - low <= 1) {
            const float w = expf(__fdiv_rn(value_of(low), temperature) - top_x);
            Boundary b;
            b.theta = low;
            b.edge = whole ? w : fminf(fmaxf(fminf((p - mass) / inside, w * float(k - above) / inside), 0.f), w);
            b.total = mass + b.edge * inside;
            return b;
        }
        if (inside <= CAP) {
            gather(row, low, high, temperature, top_x, sh);
            if (threadIdx.x < LANES) {
                Boundary b;
                if (!find_boundary(sh.candidates, sh.weights, inside, above, mass, k, p, whole, b)) {
                    // Sums rounded in another order reached p a hair earlier: the lowest candidate is the boundary.
                    find_boundary(sh.candidates, sh.weights, inside, above, mass, min(k, above + inside), p, whole, b);
                }
                if (threadIdx.x == 0) sh.theta = b.theta, sh.broadcast[0] = b.edge, sh.broadcast[1] = b.total;
            }
            __syncthreads();
            return Boundary{sh.theta, sh.broadcast[0], sh.broadcast[1]};
        }
    }
}

// Draw in the order of columns: the first whose running sum of weights exceeds u times their total.
template <class R>
__device__ __noinline__ int draw_from_row(const R& row, const Boundary& b, float temperature, float top_z, float u, Shared& sh) {
    const float scale = LOG2E / temperature;
    const int rounds = (row.vectors() + THREADS - 1) / THREADS;
    float v[8];
    auto weight = [&](float z) {
        const uint32_t key = key_of(z);
        return key > b.theta ? exp2f((z - top_z) * scale) : key == b.theta ? b.edge : 0.f;
    };
    auto sum_of = [&](int vector) {
        float sum = 0;
        if (vector < row.vectors()) {
            row.load(vector, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += weight(v[j]);
        }
        return sum;
    };
    float total = 0;
    for (int i = 0; i < rounds; i++) total += block_sum(sum_of(threadIdx.x + i * THREADS), sh);
    const float target = u * total;
    if (threadIdx.x == 0) sh.chosen = -1;
    float before = 0;
    int last = -1;  // the last column with weight, should rounding leave the target unreached
    for (int i = 0; i < rounds; i++) {
        const int vector = threadIdx.x + i * THREADS;
        const float own = sum_of(vector);
        const float inclusive = lane_scan(own);
        if (threadIdx.x % LANES == LANES - 1) sh.scratch.floats[threadIdx.x / LANES] = inclusive;
        __syncthreads();
        float lower = 0, all = 0;
        for (int w = 0; w < THREADS / LANES; w++) {
            const float s = sh.scratch.floats[w];
            if (w < int(threadIdx.x) / LANES) lower += s;
            all += s;
        }
        float running = before + lower + inclusive - own;
        if (own > 0) {
            for (int j = 0; j < 8; j++) {
                const float w = weight(v[j]);
                if (w > 0) last = 8 * vector + j;
                if (w > 0 && running <= target && running + w > target) atomicMax(&sh.chosen, 8 * vector + j);
                running += w;
            }
        }
        before += all;
        __syncthreads();
        if (sh.chosen >= 0) return sh.chosen;
    }
    atomicMax(&sh.chosen, last);
    __syncthreads();
    return sh.chosen;
}

// The same among sorted candidates, of which the kept ones come first. By all threads.
__device__ int draw_from_candidates(const Boundary& b, int count, float u, Shared& sh) {
    // Kept candidates are put into the order of columns: key = ~column above the weight's bits, so that sorting is descending.
    __shared__ int num_kept;
    if (threadIdx.x == 0) num_kept = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const uint64_t candidate = sh.candidates[i];
        const uint32_t key = uint32_t(candidate >> 32);
        if (key >= b.theta) atomicAdd(&num_kept, 1);
        const float w = key > b.theta ? sh.weights[i] : b.edge;
        sh.candidates[i] = key >= b.theta ? (candidate & 0xffffffffu) << 32 | __float_as_uint(w) : 0;
    }
    __syncthreads();
    const int kept = num_kept;  // sorted by value, so they are the first
    sort_candidates(sh.candidates, kept);
    if (threadIdx.x < LANES) {
        const int lane = threadIdx.x, each = (kept + LANES - 1) / LANES, begin = lane * each, end = min(begin + each, kept);
        float own = 0;
        for (int i = begin; i < end; i++) own += __uint_as_float(uint32_t(sh.candidates[i]));
        const float inclusive = lane_scan(own);
        const float target = u * __shfl_sync(ALL, inclusive, LANES - 1, LANES);
        float running = inclusive - own;
        int at = kept;
        for (int i = begin; i < end; i++) {
            running += __uint_as_float(uint32_t(sh.candidates[i]));
            if (running > target) {
                at = i;
                break;
            }
        }
        for (int d = LANES / 2; d; d /= 2) at = min(at, __shfl_xor_sync(ALL, at, d, LANES));
        if (lane == 0) sh.chosen = int(~uint32_t(sh.candidates[min(at, kept - 1)] >> 32));
    }
    __syncthreads();
    return sh.chosen;
}

// The k-th largest of all threads' values, by bisection over keys; each look is one barrier.
__device__ uint32_t kth_largest(uint32_t key, int k) {
    uint32_t found = 0;
    for (int bit = 31; bit >= 0; bit--) {
        const uint32_t tried = found | 1u << bit;
        if (__syncthreads_count(key >= tried) >= k) found = tried;
    }
    return found;
}

__device__ __forceinline__ void report(const SampleArgs& a, int b, const Boundary& boundary) {
    float* out = a.out_boundary + 3 * b;
    out[0] = value_of(boundary.theta), out[1] = boundary.edge, out[2] = boundary.total;
}

template <class T>
__global__ void __launch_bounds__(THREADS) sample_kernel(const SampleArgs a, const bool aligned) {
    extern __shared__ char memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    const int b = blockIdx.x;
    const int64_t slot = a.slots[b];
    if (slot < 0) return;
    const int way = a.way[slot];
    const bool penalized = a.penalties && a.penalized[slot];
    const int64_t step = a.step[slot];
    Row<T> row;
    row.aligned = aligned;
    row.logits = static_cast<const T*>(a.logits) + b * a.stride;
    row.penalties = penalized ? a.penalties + slot * a.num_columns : nullptr;
    row.allowed = a.allowed;
    row.num_bias = a.num_bias && a.biased[slot] ? a.num_bias : 0;
    row.bias_columns = a.bias_columns + slot * a.num_bias;
    row.bias_values = a.bias_values + slot * a.num_bias;
    row.num_columns = a.num_columns;
    row.end_masked = step < a.first_end[slot];
    const float temperature = a.temperature[slot];
    const float scale = LOG2E / temperature;
    const bool filtered = way == JOINT || way == SEQUENTIAL;

    // First pass: penalties of this step, maximum, its first column, sum of exponentials, and whether the row is finite.
    const float decay = penalized ? a.alpha_decay[slot] : 0.f;
    const int hit = penalized ? a.pending_column[slot] : -1;
    const float hit_penalty = penalized ? a.pending_penalty[slot] : 0.f;
    float largest = -INFINITY, sum = 0;
    int largest_column = 0x7fffffff;
    bool broken = false;
    for (int vector = threadIdx.x; vector < row.vectors(); vector += THREADS) {
        float v[8];
        row.raw(vector, v);
#pragma unroll
        for (int j = 0; j < 8; j++) broken |= !(v[j] < INFINITY);  // NaN or +inf
        row.adjust(vector, v);
        if (penalized) {
            float* p = a.penalties + slot * a.num_columns + 8 * vector;
            float q[8];
            if (aligned) {
                load8(p, q);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) q[j] = 8 * vector + j < a.num_columns ? p[j] : 0.f;
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                q[j] = __fmul_rn(q[j], decay);
                if (8 * vector + j == hit) q[j] = __fadd_rn(q[j], hit_penalty);
                v[j] -= q[j];
            }
            if (aligned) {
                reinterpret_cast<float4*>(p)[0] = make_float4(q[0], q[1], q[2], q[3]);
                reinterpret_cast<float4*>(p)[1] = make_float4(q[4], q[5], q[6], q[7]);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (8 * vector + j < a.num_columns) p[j] = q[j];
            }
        }
        float high = v[0];
#pragma unroll
        for (int j = 1; j < 8; j++) high = fmaxf(high, v[j]);
        if (high > largest) {
            if (way == GREEDY) {
                for (int j = 7; j >= 0; j--)
                    if (v[j] == high) largest_column = 8 * vector + j;
            } else if (filtered) {
                sum *= exp2f((largest - high) * scale);
            }
            largest = high;
        }
        if (filtered && high > -INFINITY) {
#pragma unroll
            for (int j = 0; j < 8; j++) sum += exp2f((v[j] - largest) * scale);
        }
    }
    const float top = block_max(largest, sh);
    const bool finite = !__syncthreads_or(broken) && top > -INFINITY;
    int column = 0;
    if (!finite) {
        // Nothing is sampled.
    } else if (way == GREEDY) {
        if (threadIdx.x == 0) sh.chosen = 0x7fffffff;
        __syncthreads();
        if (largest == top) atomicMin(&sh.chosen, largest_column);
        __syncthreads();
        column = sh.chosen;
    } else if (way == GUMBEL || way == NOISE) {
        const uint2 key = make_uint2(uint32_t(a.seed[slot]), uint32_t(uint64_t(a.seed[slot]) >> 32));
        const float noise = a.noise[slot];
        const float reach = way == GUMBEL ? GUMBEL_MAX : noise;
        float best = -INFINITY;
        int best_column = 0x7fffffff;
        // What the largest logit gets at least; a column that cannot reach it with the most noise is not looked at.
        const float floor = __fdiv_rn(top, temperature) + (way == GUMBEL ? -2.8125f : 0.f);
        for (int vector = threadIdx.x; vector < row.vectors(); vector += THREADS) {
            float v[8];
            row.load(vector, v);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float x = __fdiv_rn(v[j], temperature);
                if (!(x + reach * 1.0001f + 1e-3f >= fmaxf(best, floor))) continue;
                const int64_t id = a.ids ? a.ids[8 * vector + j] : a.first_id + 8 * vector + j;
                const uint4 words = philox(make_uint4(uint32_t(step), 1u, uint32_t(a.choice[slot]), uint32_t(id / 4)), key);
                const int word = int(id % 4);
                const float u = uniform(word == 0 ? words.x : word == 1 ? words.y : word == 2 ? words.z : words.w);
                float y;
                if (way == GUMBEL) {
                    y = __fadd_rn(x, -logf(fmaxf(-logf(u), 6.2e-5f)));
                } else {
                    y = __fadd_rn(x, __fmul_rn(noise, u));
                }
                if (y > best) best = y, best_column = 8 * vector + j;
            }
        }
        const float won = block_max(best, sh);
        if (threadIdx.x == 0) sh.chosen = 0x7fffffff;
        __syncthreads();
        if (best == won) atomicMin(&sh.chosen, best_column);
        __syncthreads();
        column = sh.chosen;
    } else {
        const uint2 key = make_uint2(uint32_t(a.seed[slot]), uint32_t(uint64_t(a.seed[slot]) >> 32));
        const float u = uniform(philox(make_uint4(uint32_t(step), 0u, uint32_t(a.choice[slot]), 0u), key).x);
        const float top_x = __fdiv_rn(top, temperature);
        if (way == PLAIN) {
            column = draw_from_row(row, Boundary{key_of(-INFINITY), 0.f, 0.f}, temperature, top, u, sh);
        } else {
            const float all = block_sum(largest > -INFINITY ? sum * exp2f((largest - top) * scale) : 0.f, sh);
            const int k = a.top_k[slot];
            const float top_p = a.top_p[slot];
            const float p = way == JOINT || k >= a.num_columns ? top_p * all : INFINITY;
            // Candidates: everything at or above the k-th largest of the threads' maxima.
            const uint32_t bound = max(kth_largest(key_of(largest), min(k, GROUP_K)), key_of(-INFINITY) + 1);
            if (threadIdx.x == 0) sh.num_candidates = 0;
            __syncthreads();
            if (key_of(largest) >= bound) {
                for (int vector = threadIdx.x; vector < row.vectors(); vector += THREADS) {
                    float v[8];
                    row.load(vector, v);
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        if (key_of(v[j]) >= bound) {
                            const int at = atomicAdd(&sh.num_candidates, 1);
                            if (at < CAP) sh.candidates[at] = uint64_t(key_of(v[j])) << 32 | uint32_t(~(8 * vector + j));
                        }
                    }
                }
            }
            __syncthreads();
            const int count = sh.num_candidates;
            bool found = false;
            Boundary boundary;
            if (count <= CAP) {
                sort_candidates(sh.candidates, count);
                for (int i = threadIdx.x; i < count; i += THREADS) {
                    const float x = __fdiv_rn(value_of(uint32_t(sh.candidates[i] >> 32)), temperature);
                    sh.weights[i] = expf(x - top_x);
                }
                __syncthreads();
                if (threadIdx.x < LANES) {
                    // When the candidates are all columns that can be sampled, the last of them is a boundary in any case.
                    const int limit = bound == key_of(-INFINITY) + 1 ? min(k, count) : k;
                    bool ok = find_boundary(sh.candidates, sh.weights, count, 0, 0.f, limit, p, way == SEQUENTIAL, boundary);
                    if (ok && way == SEQUENTIAL && k < a.num_columns && top_p < INFINITY) {
                        // The k best and their ties; then top_p of their mass, found among them.
                        const float inside = top_p * boundary.total;
                        Boundary second;
                        if (find_boundary(sh.candidates, sh.weights, count, 0, 0.f, a.num_columns + 1, inside, true, second) &&
                            second.theta > boundary.theta)
                            boundary = second;
                    }
                    if (threadIdx.x == 0) {
                        sh.broadcast[0] = boundary.edge, sh.broadcast[1] = boundary.total, sh.broadcast[2] = ok ? 1.f : 0.f;
                        sh.theta = boundary.theta;
                    }
                }
                __syncthreads();
                found = sh.broadcast[2] > 0;
                boundary = Boundary{sh.theta, sh.broadcast[0], sh.broadcast[1]};
            }
            if (found) {
                if (a.out_boundary && threadIdx.x == 0) report(a, b, boundary);
                column = draw_from_candidates(boundary, count, u, sh);
            } else {
                const uint32_t low = key_of(-INFINITY) + 1, high = key_of(top) + 1;
                boundary = narrow(row, low, high, 0, 0.f, k, p, way == SEQUENTIAL, temperature, top, top_x, sh);
                if (way == SEQUENTIAL && k < a.num_columns && top_p < INFINITY) {
                    const float inside = top_p * boundary.total;
                    const Boundary second =
                        narrow(row, low, high, 0, 0.f, a.num_columns + 1, inside, true, temperature, top, top_x, sh);
                    if (second.theta > boundary.theta) boundary = second;
                }
                if (a.out_boundary && threadIdx.x == 0) report(a, b, boundary);
                column = draw_from_row(row, boundary, temperature, top, u, sh);
            }
        }
    }
    if (threadIdx.x == 0) {
        const int64_t id = !finite ? 0 : a.ids ? a.ids[column] : a.first_id + column;
        a.out_ids[b] = id;
        a.out_finite[b] = finite;
        if (a.last_ids) a.last_ids[slot] = id;
        a.step[slot] = step + 1;
        if (penalized) {
            a.pending_column[slot] = finite ? column : -1;
            a.pending_penalty[slot] =
                finite && row.penalties[column] != 0.f ? a.alpha_frequency[slot] : a.alpha_presence[slot];
        }
    }
}

template <class T>
static cudaError_t launch(const SampleArgs& a, bool aligned, cudaStream_t stream) {
    sample_kernel<T><<<a.num_rows, THREADS, sizeof(Shared), stream>>>(a, aligned);
    return cudaGetLastError();
}

}  // namespace rwkv

// Sample one token for each row. Returns a cudaError_t.
RWKV_EXPORT int rwkv_sample(const rwkv::SampleArgs* args, cudaStream_t stream) {
    const rwkv::SampleArgs& a = *args;
    if (a.num_rows == 0) return cudaSuccess;
    const bool aligned = a.stride % 8 == 0 && reinterpret_cast<uintptr_t>(a.logits) % 16 == 0 && a.num_columns % 8 == 0;
    switch (a.type) {
        case rwkv::FP32: return rwkv::launch<float>(a, aligned, stream);
        case rwkv::FP16: return rwkv::launch<__half>(a, aligned, stream);
        case rwkv::BF16: return rwkv::launch<__nv_bfloat16>(a, aligned, stream);
    }
    return cudaErrorInvalidValue;
}
