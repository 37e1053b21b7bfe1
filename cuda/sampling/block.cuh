// A block's shared memory, and what is kept there: the row's controls, a summary of each part, and the rooms of all methods.
#pragma once

#include "args.h"
#include "numbers.cuh"

namespace rwkv {

constexpr int MIN_THREADS = 256, MAX_THREADS = 768;  // of a block; more would leave them too few registers
constexpr int PART = 8 * LANES;  // columns: a vector of eight for each lane
constexpr int MAX_PARTS = 512;
constexpr int MAX_BLOCKS = 8;  // of a cluster
constexpr int LISTED = 512, STAGED = 4608;  // columns
constexpr int CANDIDATES = MIN_THREADS / LANES;  // of a row drawn by rejection at a time, a warp for each
constexpr int MEASURED = 4;  // values that one pass over a row drawn by rejection measures at most
constexpr int SUMS = 8;  // two for each of those values, a power of two
constexpr int TOGETHER = 4;  // parts whose columns a warp adds up together in that pass
constexpr int BUCKETS = 2048;

__device__ __forceinline__ int num_threads() { return int(blockDim.x); }
__device__ __forceinline__ int num_warps() { return int(blockDim.x) / LANES; }

// Bytes of a line with a bit for each column: whole words.
__device__ __forceinline__ int bytes_of_bits(const SampleArgs& a) { return (a.num_columns + 31) / 32 * 4; }

// Whether the masses of a row's parts are needed.
__device__ __forceinline__ bool needs_masses(int method, bool by_count, bool by_mass) {
    return method == PLAIN || method == REJECTION || (method == JOINT && by_mass) ||
           (method == SEQUENTIAL && by_mass && !by_count);
}

// CTRL's penalty of a column that occurred.
struct Repetition {
    float penalty, inverse;
    __device__ __forceinline__ explicit Repetition(float penalty) : penalty(penalty), inverse(1.f / penalty) {}
    __device__ __forceinline__ float of(float v) const { return __fmul_rn(v, v > 0 ? inverse : penalty); }
    // Of a vector's columns, a bit for each that occurred.
    __device__ __forceinline__ void apply(unsigned bits, float (&v)[8]) const {
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (bits >> j & 1) v[j] = of(v[j]);
    }
};

// What a row's slot asks for, and the key and counter of its random numbers; their layout stands in sampling/base.py.
struct Controls {
    uint2 key;
    uint32_t step, choice;
    int method, top_k;
    float temperature, top_p, min_p_depth, noise, alpha_presence, alpha_frequency;
    Repetition repetition;
    float draw_number;

    __device__ __forceinline__ Controls(const SampleArgs& a, int64_t slot)
        : key(make_uint2(uint32_t(a.seed[slot]), uint32_t(uint64_t(a.seed[slot]) >> 32))),
          step(uint32_t(a.step[slot])),
          choice(uint32_t(a.choice[slot])),
          method(a.method[slot]),
          top_k(a.top_k[slot]),
          temperature(a.temperature[slot]),
          top_p(a.top_p[slot]),
          min_p_depth(a.min_p_depth[slot]),
          noise(a.noise[slot]),
          alpha_presence(a.alpha_presence[slot]),
          alpha_frequency(a.alpha_frequency[slot]),
          repetition(a.repetition[slot]),
          draw_number(uniform(draw_numbers(0).x)) {}
    // Of the draw, or of a candidate of a row drawn by rejection.
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
struct RowSummary {
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
    const uint8_t* allowed;  // bit j % 8 of byte j / 8: column j may be sampled; or null: all may
    uint8_t* seen;     // likewise: column j has a repetition penalty; null for rows without
    float floor;       // smaller values are -inf, see `apply_min_p`
    RowSummary summary;
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

}  // namespace rwkv
