// Chunks of the wkv recurrence in the order of tensor cores' operands: what wkv_spread.cu makes its kernels of.
//
// Lane 4 g + q of a warp has tokens g and g + 8 of a chunk and 16 channels of each, in the order e = 0 .. 15 of `channel`. So it
// reads 16 bytes at a time, and what it makes of them is what tensor cores want of it: key 16 j + 8 h + 2 q + s of a product is
// the lane's e = 4 j + 2 h + s. The order of keys is that of the state's columns too, as long as it is in registers.
#pragma once

#include "wkv_chunk.cuh"

#ifndef RWKV_HIP

namespace rwkv {
namespace {

constexpr int STEPS = HEAD / 16;  // of a product over keys
constexpr float DECAY_UNIT = 1024.f;  // logarithms of decays are multiplied by this, so that two halves hold 24 bits of small ones

// The first of each four neighbouring channels that a lane has; e = 2 i + s stands for channel i + 4 s of each eight.
__device__ __forceinline__ int own_channel(int part) { return part * 32 + threadIdx.x % 4 * 8; }

struct alignas(128) Chunk {
    uint4 solved[STEPS][LANES], query[STEPS][LANES];  // right operands, keys down
    uint4 removed[STEPS][LANES], inserted[STEPS][LANES];  // right operands, tokens down
    uint4 within[LANES];
    __half value[CHUNK * HEAD];
    float half_decay[HEAD];  // from the start to the middle, and from there to the end; 16 of a lane % 4
    float bonus[CHUNK];
};

// The matrices before they are solved.
constexpr int RAW = 4 * CHUNK * HEAD;

// sum = left right.
__device__ __forceinline__ void product(float (&sum)[4], const uint4& left, uint32_t low, uint32_t high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(left.x), "r"(left.y), "r"(left.z), "r"(left.w), "r"(low), "r"(high), "f"(0.f));
}
// Rows of tokens, 16 keys from `column` on, of a left operand's registers, or of those of a right one whose keys lie across.
template <bool LEFT>
__device__ __forceinline__ void store_rows(__half* m, int column, const uint4& own) {
    const int lane = threadIdx.x % LANES;
#if __CUDA_ARCH__ >= 900
    const int later = lane / (LEFT ? 8 : 16) % 2, right = lane / (LEFT ? 16 : 8) % 2;
    const __half* p = m + wide_at(later * 8 + lane % 8, column + right * 8);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(uint32_t(__cvta_generic_to_shared(p))),
                 "r"(own.x), "r"(own.y), "r"(own.z), "r"(own.w)
                 : "memory");
#else
    const int row = lane / 4, at = column + lane % 4 * 2;
    *reinterpret_cast<uint32_t*>(m + wide_at(row, at)) = own.x;
    *reinterpret_cast<uint32_t*>(m + wide_at(row, at + 8)) = LEFT ? own.z : own.y;
    *reinterpret_cast<uint32_t*>(m + wide_at(row + 8, at)) = LEFT ? own.y : own.z;
    *reinterpret_cast<uint32_t*>(m + wide_at(row + 8, at + 8)) = own.w;
#endif
}
// A right operand in rows, 16 of k down, for 16 columns: two halves of n = 8, x, y and z, w.
__device__ __forceinline__ uint4 right_down(const __half* m, int from) {
    const int lane = threadIdx.x % LANES;
    return load_matrices<true>(m + wide_at(lane % 16, from + lane / 16 * 8));
}
__device__ __forceinline__ void product(float (&sum)[2][4], const uint4& left, const uint4& right) {
    product(sum[0], left, right.x, right.y);
    product(sum[1], left, right.z, right.w);
}
// Without infinities.
__device__ __forceinline__ uint32_t pack_finite(float a, float b) {
    uint32_t pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
}
__device__ __forceinline__ float2 unpack(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }
// A 16 x 16 sum as a right operand whose k lies across.
__device__ __forceinline__ uint4 as_right(const float (&s)[2][4]) {
    return make_uint4(pack(s[0][0], s[0][1]), pack(s[1][0], s[1][1]), pack(s[0][2], s[0][3]), pack(s[1][2], s[1][3]));
}
__device__ __forceinline__ uint4 as_right_finite(const float (&s)[2][4]) {
    return make_uint4(pack_finite(s[0][0], s[0][1]), pack_finite(s[1][0], s[1][1]), pack_finite(s[0][2], s[0][3]),
                      pack_finite(s[1][2], s[1][3]));
}
__device__ __forceinline__ void from_left(float (&s)[2][4], const uint4& left) {
    const float2 x = unpack(left.x), y = unpack(left.y), z = unpack(left.z), w = unpack(left.w);
    s[0][0] = x.x, s[0][1] = x.y, s[0][2] = y.x, s[0][3] = y.y, s[1][0] = z.x, s[1][1] = z.y, s[1][2] = w.x, s[1][3] = w.y;
}
__device__ __forceinline__ void from_right(float (&s)[2][4], const uint4& right) {
    const float2 x = unpack(right.x), y = unpack(right.y), z = unpack(right.z), w = unpack(right.w);
    s[0][0] = x.x, s[0][1] = x.y, s[1][0] = y.x, s[1][1] = y.y, s[0][2] = z.x, s[0][3] = z.y, s[1][2] = w.x, s[1][3] = w.y;
}
// Over the four lanes of a token.
__device__ __forceinline__ float token_sum(float v) {
    v += __shfl_xor_sync(ALL, v, 1, LANES);
    return v + __shfl_xor_sync(ALL, v, 2, LANES);
}
__device__ __forceinline__ uint4 load16(const __half* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Where a chunk's tokens are: 32-bit positions in [N, C], since 64-bit ones cost a fifth of the instructions.
struct Place {
    uint32_t at, width;  // of its first token and of the head's first channel
    int count;           // of tokens, 16 but at a row's end
    int channel;         // the head's first
    __device__ __forceinline__ uint32_t token(int t) const { return at + min(t, count - 1) * width; }
};

// A lane's part of the decays' logarithms to base 2, of half the channels, as right operands whose k are tokens: their first 11
// bits and the next.
struct Decays {
    float4 raw[4];
    uint2 high[STEPS], low[STEPS];

    static __device__ __forceinline__ int token(int i) { return threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8; }
    __device__ __forceinline__ void load(const WkvInputs& in, const Place& place, int part) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            raw[i] = *reinterpret_cast<const float4*>(
                in.w_raw + place.token(token(i)) + part * 32 + threadIdx.x % LANES / 4 * 4);
    }
    __device__ __forceinline__ void split(const Place& place) {
        float unit[4];  // the logarithm is sigmoid / unit
#pragma unroll
        for (int i = 0; i < 4; i++)
            unit[i] = token(i) < place.count ? 1.f / (LOG_DECAY_SCALE * LOG2_E * DECAY_UNIT) : -1e30f;
#pragma unroll
        for (int tile = 0; tile < STEPS; tile++) {
            float l[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float own = tile == 0 ? raw[i].x : tile == 1 ? raw[i].y : tile == 2 ? raw[i].z : raw[i].w;
                l[i] = reciprocal(fmaf(unit[i], power_of_2(-LOG2_E * own), unit[i]));
            }
            high[tile] = make_uint2(pack(l[0], l[1]), pack(l[2], l[3]));
            const float2 a = unpack(high[tile].x), b = unpack(high[tile].y);
            low[tile] = make_uint2(pack(l[0] - a.x, l[1] - a.y), pack(l[2] - b.x, l[3] - b.y));
        }
    }
};
// The left operand that sums logarithms from the middle through a token (`through` 1), or through the one before it (0).
__device__ __forceinline__ uint4 summing(int through) {
    const int row = threadIdx.x % LANES / 4, column = threadIdx.x % 4 * 2;
    const auto pair = [&](int i, int t) {
        const float half = 0.5f / DECAY_UNIT;
        return pack(t < i + through ? half : -half, t + 1 < i + through ? half : -half);
    };
    return make_uint4(pair(row, column), pair(row + 8, column), pair(row, column + 8), pair(row + 8, column + 8));
}

// A lane's values of its tokens: this layer's, blended with the first layer's.
struct Values {
    uint4 own[2][2], share[2][2], other[2][2];  // of each token 8 channels, twice
    __device__ __forceinline__ void load(const WkvInputs& in, const Place& place) {
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const uint32_t here = place.token(threadIdx.x % LANES / 4 + 8 * t) + own_channel(part);
                own[t][part] = load16(in.v + here);
                if (in.v_mix) share[t][part] = load16(in.v_mix + here), other[t][part] = load16(in.v_first + here);
            }
    }
    __device__ __forceinline__ void store(const WkvInputs& in, const Place& place, Chunk& chunk) {
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const int token = threadIdx.x % LANES / 4 + 8 * t;
            const bool real = token < place.count;
#pragma unroll
            for (int part = 0; part < 2; part++) {
                uint32_t blend[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    blend[i] = word(own[t][part], i);
                    if (in.v_mix) {
                        const float2 v = unpack(blend[i]), s = unpack(word(share[t][part], i)), o = unpack(word(other[t][part], i));
                        blend[i] = pack(fmaf(s.x, o.x - v.x, v.x), fmaf(s.y, o.y - v.y, v.y));
                    }
                    if (place.count < CHUNK && !real) blend[i] = 0;
                }
                const uint4 all = make_uint4(blend[0], blend[1], blend[2], blend[3]);
                *reinterpret_cast<uint4*>(chunk.value + wide_at(token, own_channel(part))) = all;
                if (!in.v_mix && real)
                    *reinterpret_cast<uint4*>(in.v_first + place.token(token) + own_channel(part)) = all;
            }
        }
    }
};

// A lane's half of the channels of its two tokens, of what the keys and the queries are made of.
struct Rates {
    uint4 a[2], r[2];
    __device__ __forceinline__ void load(const WkvInputs& in, const Place& place, int part) {
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const int token = threadIdx.x % LANES / 4 + 8 * t;
            const uint32_t here = place.token(token) + own_channel(part);
            a[t] = load16(in.a + here), r[t] = load16(in.r + here);
        }
    }
};

// A warp makes a chunk of its inputs; `raw`, of RAW halves in shared memory, may be the chunk's own first matrices. Tokens past a
// row's end are its last once more, but for what a state would notice: they have neither decay nor direction nor value.
__device__ __forceinline__ void prepare(const WkvInputs& in, const Place& place, Chunk& chunk, Scratch& scratch, __half* raw) {
    const int lane = threadIdx.x % LANES, row = lane / 4, column = lane % 4 * 2;
    uint4 k[2][2];  // of tokens row and row + 8
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int part = 0; part < 2; part++) k[t][part] = load16(in.k + place.token(row + 8 * t) + own_channel(part));
    Decays decays;
    decays.load(in, place, 0);
    Rates rates;
    rates.load(in, place, 0);
    float norm[2] = {};
#pragma unroll
    for (int part = 0; part < 2; part++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 k_k = load2(in.k_k + place.channel + own_channel(part) + 2 * i);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const float2 kk = unpack(word(k[t][part], i)) * k_k;
                norm[t] += dot(kk, kk);
            }
        }
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const float squares = token_sum(norm[t]);  // by all lanes
        norm[t] = row + 8 * t < place.count ? rsqrtf(fmaxf(squares, 1e-24f)) : 0.f;
    }
    decays.split(place);

    const uint4 through = summing(1), before = summing(0);
    float system[2][4], own[2][4], read_removed[2][4], within[2][4], bonus[2] = {};
    __half *const raw_solved = raw, *const raw_removed = raw + CHUNK * HEAD, *const raw_inserted = raw + 2 * CHUNK * HEAD;
    uint4* const raw_query = reinterpret_cast<uint4*>(raw + 3 * CHUNK * HEAD) + lane;  // a lane's own
    Decays next_decays;
    Rates next_rates;
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        if (j == 1) next_decays.load(in, place, 1), next_rates.load(in, place, 1);
        if (j == 2) decays = next_decays, rates = next_rates, decays.split(place);
        float rise_log[2][4], before_log[2][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint2 high = decays.high[j % 2 * 2 + h], low = decays.low[j % 2 * 2 + h];
            product(rise_log[h], through, low.x, low.y), product(before_log[h], before, low.x, low.y);
            multiply(rise_log[h], through, high.x, high.y), multiply(before_log[h], before, high.x, high.y);
        }
        // Of four neighbouring pairs of channels those that this step's keys are: e = 0, 2 and, four channels on, 1, 3.
        const int first = place.channel + own_channel(j / 2) + j % 2 * 2;
        const float2 k_k[2] = {load2(in.k_k + first), load2(in.k_k + first + 4)};
        const float2 k_a[2] = {load2(in.k_a + first), load2(in.k_a + first + 4)};
        const float2 r_k[2] = {load2(in.r_k + first), load2(in.r_k + first + 4)};
        uint32_t solved[4], removed[4], inserted[4], reads[4];
#pragma unroll
        for (int t = 0; t < 2; t++) {
            float s[4], m[4], n[4], y[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int at = j % 2 + e % 2 * 2;
                const auto pick = [&](float2 v) { return e / 2 ? v.y : v.x; };
                const float plain = pick(unpack(word(k[t][j / 2], at))), read = pick(unpack(word(rates.r[t], at)));
                const float rate = pick(unpack(word(rates.a[t], at))), share = pick(k_a[e % 2]);
                const float log = rise_log[e / 2][2 * t + e % 2];
                const float rise = power_of_2(log), fall = power_of_2(-log);
                const float kk = plain * pick(k_k[e % 2]) * norm[t];
                const float key = plain * fmaf(rate, share, 1.f - share);
                s[e] = kk * power_of_2(before_log[e / 2][2 * t + e % 2]);
                m[e] = -kk * rate * fall;
                n[e] = key * fall;
                y[e] = read * rise;
                bonus[t] = fmaf(read * pick(r_k[e % 2]), key, bonus[t]);
                if (t == 1 && row == 7) chunk.half_decay[lane % 4 * 16 + 4 * j + e] = rise;
            }
            solved[t] = pack(s[0], s[1]), solved[t + 2] = pack(s[2], s[3]);
            removed[2 * t] = pack(m[0], m[1]), removed[2 * t + 1] = pack(m[2], m[3]);
            inserted[2 * t] = pack_finite(n[0], n[1]), inserted[2 * t + 1] = pack_finite(n[2], n[3]);
            reads[t] = pack_finite(y[0], y[1]), reads[t + 2] = pack_finite(y[2], y[3]);
        }
        const uint4 by_solved = make_uint4(solved[0], solved[1], solved[2], solved[3]);
        const uint4 by_removed = make_uint4(removed[0], removed[1], removed[2], removed[3]);
        const uint4 by_inserted = make_uint4(inserted[0], inserted[1], inserted[2], inserted[3]);
        const uint4 by_query = make_uint4(reads[0], reads[1], reads[2], reads[3]);
        if (j == 0) {
            product(system, by_solved, by_removed), product(own, by_solved, by_inserted);
            product(read_removed, by_query, by_removed), product(within, by_query, by_inserted);
        } else {
            multiply(system, by_solved, by_removed), multiply(own, by_solved, by_inserted);
            multiply(read_removed, by_query, by_removed), multiply(within, by_query, by_inserted);
        }
        raw_query[j * LANES] = by_query;
        store_rows<true>(raw_solved, 16 * j, by_solved);
        store_rows<false>(raw_removed, 16 * j, by_removed);
        store_rows<false>(raw_inserted, 16 * j, by_inserted);
    }
    Values values;
    values.load(in, place);
#pragma unroll
    for (int t = 0; t < 2; t++) {
        bonus[t] = token_sum(bonus[t]);
        if (lane % 4 == 0) chunk.bonus[row + 8 * t] = bonus[t];
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const int i = row + e * 4, j = column + n * 8;
#pragma unroll
            for (int f = 0; f < 2; f++) {
                if (j + f >= i) system[n][e + f] = own[n][e + f] = 0.f;
                if (j + f > i) read_removed[n][e + f] = within[n][e + f] = 0.f;
            }
            store2(scratch.system + i * CHUNK + j, make_float2(system[n][e], system[n][e + 1]));
            store2(scratch.own + i * CHUNK + j, make_float2(own[n][e], own[n][e + 1]));
        }
    __syncwarp();
    solve(scratch);
    values.store(in, place, chunk);
    const __half* inverse = reinterpret_cast<const __half*>(scratch.system);  // by columns, as is
    const uint4 solved_own = square_right_across(inverse + CHUNK * CHUNK), by_inverse = square_left_turned(inverse);
    const uint4 reads = as_left(read_removed[0], read_removed[1]);
    multiply(within, reads, solved_own);
    chunk.within[lane] = as_right(within);
    float reads_solved[2][4];
    product(reads_solved, reads, square_right_across(inverse));
    const uint4 by_reads = as_left(reads_solved[0], reads_solved[1]);
    uint4 raw_of[3][STEPS], turned[STEPS];  // `removed` as a left operand too: keys in rows
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        raw_of[0][j] = right_down(raw_solved, 16 * j);
        raw_of[1][j] = right_down(raw_removed, 16 * j), raw_of[2][j] = right_down(raw_inserted, 16 * j);
        turned[j] = left_turned(raw_removed, 16 * j);
    }
    __syncwarp();  // all but the queries has been read; of those a lane reads its own before it writes there
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        float solved[2][4], reads_state[2][4], inserted[2][4];
        product(solved, by_inverse, raw_of[0][j]);
        from_left(reads_state, raw_query[j * LANES]);
        multiply(reads_state, by_reads, raw_of[0][j]);
        from_right(inserted, raw_of[2][j]);
        multiply(inserted, turned[j], solved_own);
        chunk.solved[j][lane] = as_right(solved);
        chunk.query[j][lane] = as_right_finite(reads_state);
        chunk.removed[j][lane] = raw_of[1][j];
        chunk.inserted[j][lane] = as_right_finite(inserted);
    }
}

// A lane's part of the state: 16 values by 64 keys of a warp, as a sum.
struct Part {
    float s[2 * STEPS][4];

    template <class T>
    __device__ __forceinline__ void load(const T* head, int value) {
        const T* from = head + (value + threadIdx.x % LANES / 4) * HEAD;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                float v[8];
                load8(from + half * 8 * HEAD + own_channel(part), v);
#pragma unroll
                for (int i = 0; i < 4; i++) s[4 * part + i][2 * half] = v[i], s[4 * part + i][2 * half + 1] = v[i + 4];
            }
    }
    template <class T>
    __device__ __forceinline__ void store(T* head, int value) const {
        T* to = head + (value + threadIdx.x % LANES / 4) * HEAD;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                float v[8];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    v[i] = s[4 * part + i][2 * half], v[i + 4] = s[4 * part + i][2 * half + 1];
                }
#pragma unroll
                for (int i = 0; i < 8; i += 2)
                    store2(to + half * 8 * HEAD + own_channel(part) + i, make_float2(v[i], v[i + 1]));
            }
    }
};

// What a chunk asks for first: fetched while the chunk before it is at work.
struct Opening {
    uint4 solved[STEPS];
    float4 decay[STEPS];  // of half the chunk
    __device__ __forceinline__ void load(const Chunk& chunk) {
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            solved[j] = chunk.solved[j][threadIdx.x % LANES];
            decay[j] = *reinterpret_cast<const float4*>(chunk.half_decay + threadIdx.x % 4 * 16 + 4 * j);
        }
    }
};
// Once to a chunk's middle, once to its end: a state that is stored between two chunks is the one that stays in registers.
__device__ __forceinline__ void decay_half(Part& part, int j, const float4& decay) {
    const float by[4] = {decay.x, decay.y, decay.z, decay.w};
#pragma unroll
    for (int e = 0; e < 8; e++) part.s[2 * j + e / 4][e % 4] *= by[e / 4 * 2 + e % 2];
}

// A warp takes its 16 values' part of the state through one chunk: y [16 values, 16 tokens] is what it reads. `ahead` may wait for
// the next chunk and fetch what it opens with.
template <class Ahead>
__device__ __forceinline__ void scan(Part& part, const Chunk& chunk, const Opening& opening, int value, float (&y)[2][4], Ahead ahead) {
    const int lane = threadIdx.x % LANES;
    float(&s)[2 * STEPS][4] = part.s;
    float u[2][4], other[2][4];
    uint4 state[STEPS];
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        decay_half(part, j, opening.decay[j]);
        state[j] = as_left(s[2 * j], s[2 * j + 1]);
        if (j % 2 == 0)  // two short sums are ready sooner than a long one
            product(j ? other : u, state[j], opening.solved[j]);
        else
            multiply(j > 1 ? other : u, state[j], opening.solved[j]);
    }
    const uint4 v = left_turned(chunk.value, value), within = chunk.within[lane];
    ahead();  // here, so that the compiler keeps the products that others wait for, above, before those that nobody waits for
    product(y, v, within);
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        const uint4 query = chunk.query[j][lane], inserted = chunk.inserted[j][lane];
        multiply(y, state[j], query);
        multiply(s[2 * j], v, inserted.x, inserted.y), multiply(s[2 * j + 1], v, inserted.z, inserted.w);
    }
    uint4 removed[STEPS];
#pragma unroll
    for (int j = 0; j < STEPS; j++) removed[j] = chunk.removed[j][lane];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) u[n][e] += other[n][e];
    const uint4 solution = as_left(u[0], u[1]);
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        multiply(s[2 * j], solution, removed[j].x, removed[j].y);
        multiply(s[2 * j + 1], solution, removed[j].z, removed[j].w);
        decay_half(part, j, *reinterpret_cast<const float4*>(chunk.half_decay + lane % 4 * 16 + 4 * j));
    }
}

// A warp turns a scanned chunk's outputs into what goes into the output matrix: group norm, bonus, gate. `outputs(token, channel)`
// is where eight of them are.
template <class Outputs>
__device__ __forceinline__ void finish(const WkvInputs& in, const Place& place, const Chunk& chunk, Outputs outputs) {
    const int row = threadIdx.x % LANES / 4;
    uint4 gate[2][2];
    float y[2][2][8];
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int part = 0; part < 2; part++)
            gate[t][part] = load16(in.gate + place.token(row + 8 * t) + own_channel(part));
#pragma unroll
    for (int t = 0; t < 2; t++) {
        float sum = 0.f, squares = 0.f;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            load8(outputs(row + 8 * t, own_channel(part)), y[t][part]);
#pragma unroll
            for (int i = 0; i < 8; i++) sum += y[t][part][i];
        }
        const float mean = token_sum(sum) / HEAD;
#pragma unroll
        for (int part = 0; part < 2; part++)
#pragma unroll
            for (int i = 0; i < 8; i++) y[t][part][i] -= mean, squares = fmaf(y[t][part][i], y[t][part][i], squares);
        const float scale = rsqrtf(token_sum(squares) / HEAD + GROUP_NORM_EPS);
#pragma unroll
        for (int part = 0; part < 2; part++)
#pragma unroll
            for (int i = 0; i < 8; i++) y[t][part][i] *= scale;
    }
#pragma unroll
    for (int part = 0; part < 2; part++) {
        float weight[8], bias[8];
        load8(in.norm_weight + place.channel + own_channel(part), weight);
        load8(in.norm_bias + place.channel + own_channel(part), bias);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const int token = row + 8 * t;
            const float bonus = chunk.bonus[token];
            const uint4 value = load16(chunk.value + wide_at(token, own_channel(part)));
            uint32_t out[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 v = unpack(word(value, i)), g = unpack(word(gate[t][part], i));
                const float* own = y[t][part] + 2 * i;
                out[i] = pack(fmaf(bonus, v.x, fmaf(own[0], weight[2 * i], bias[2 * i])) * g.x,
                              fmaf(bonus, v.y, fmaf(own[1], weight[2 * i + 1], bias[2 * i + 1])) * g.y);
            }
            if (token < place.count)
                *reinterpret_cast<uint4*>(in.out + place.token(token) + own_channel(part)) =
                    make_uint4(out[0], out[1], out[2], out[3]);
        }
    }
}

}  // namespace
}  // namespace rwkv

#endif
