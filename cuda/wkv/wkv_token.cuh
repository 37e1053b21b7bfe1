// What the kernels of RWKV-7's recurrence that go token by token share: a token's inputs, as lanes hold and exchange them, the pass
// over the state, and what makes the output of the sums.
#pragma once

#include "wkv_state.cuh"

namespace rwkv {

// A layer's vectors for two channels.
struct Vectors {
    float2 k_k, k_a, r_k, norm_weight, norm_bias;
    __device__ __forceinline__ Vectors(const WkvInputs& in, int channel)
        : k_k(load2(in.k_k + channel)), k_a(load2(in.k_a + channel)), r_k(load2(in.r_k + channel)),
          norm_weight(load2(in.norm_weight + channel)), norm_bias(load2(in.norm_bias + channel)) {}

    // The same in two steps: what `prepare` needs, before the wait for other kernels, and what `finish` does.
    Vectors() = default;
    __device__ __forceinline__ void load_ahead(const WkvInputs& in, int channel) {
        k_k = load2(in.k_k + channel), k_a = load2(in.k_a + channel), r_k = load2(in.r_k + channel);
        prefetch(in.norm_weight + channel), prefetch(in.norm_bias + channel);
    }
    __device__ __forceinline__ void load_rest(const WkvInputs& in, int channel) {
        norm_weight = load2(in.norm_weight + channel), norm_bias = load2(in.norm_bias + channel);
    }
};

// A token's inputs for two channels, as read.
struct Raw {
    __half2 r, k, v, a, v_mix, gate, v_first;
    float2 w_raw;
    __device__ __forceinline__ void load(const WkvInputs& in, size_t at) {
        r = *reinterpret_cast<const __half2*>(in.r + at), k = *reinterpret_cast<const __half2*>(in.k + at);
        v = *reinterpret_cast<const __half2*>(in.v + at), a = *reinterpret_cast<const __half2*>(in.a + at);
        gate = *reinterpret_cast<const __half2*>(in.gate + at), w_raw = load2(in.w_raw + at);
        if (in.v_mix) {
            v_mix = *reinterpret_cast<const __half2*>(in.v_mix + at);
            v_first = *reinterpret_cast<const __half2*>(in.v_first + at);
        }
    }
};

// What the recurrence reads of a token of one head. The vectors over keys lie as the lanes want them: see Keys::place.
struct alignas(16) Token {
    float kk[HEAD], kept[HEAD], decay[HEAD], inserted[HEAD], key[HEAD], value[HEAD];  // kept = w r, inserted = kk a
    float2 by_r;  // inserted . r, key . r
};

// What the output needs of it besides S r, for two channels.
struct Finish {
    float2 bonus, gate;
};

// A warp turns a head's inputs into a Token; each lane has channels 2 * lane and 2 * lane + 1.
template <class State>
__device__ __forceinline__ Finish prepare(const Raw& raw, const Vectors& of, const WkvInputs& in, size_t at, Token& token) {
    const int i = threadIdx.x % LANES, to = Keys<State>::place(2 * i);
    const float2 r = __half22float2(raw.r), k = __half22float2(raw.k), a = __half22float2(raw.a);
    float2 v = __half22float2(raw.v);
    if (in.v_mix) {
        const float2 v_mix = __half22float2(raw.v_mix), v_first = __half22float2(raw.v_first);
        v.x = fmaf(v_mix.x, v_first.x - v.x, v.x), v.y = fmaf(v_mix.y, v_first.y - v.y, v.y);
    } else {
        store2(in.v_first + at, v);
    }
    const float2 w = make_float2(decay(raw.w_raw.x), decay(raw.w_raw.y));
    float2 kk = k * of.k_k;
    const float2 key = make_float2(k.x * fmaf(a.x - 1.f, of.k_a.x, 1.f), k.y * fmaf(a.y - 1.f, of.k_a.y, 1.f));
    const float squares = lane_sum(dot(kk, kk)), bonus = lane_sum(dot(r * of.r_k, key));
    float2 by_r = make_float2(lane_sum(dot(kk * a, r)), lane_sum(dot(key, r)));
    const float norm = rsqrt_of_normal(fmaxf(squares, 1e-24f));
    kk.x *= norm, kk.y *= norm, by_r.x *= norm;
    const float2 inserted = kk * a;
    store2(token.kk + to, kk), store2(token.kept + to, w * r), store2(token.decay + to, w);
    store2(token.inserted + to, inserted), store2(token.key + to, key), store2(token.value + 2 * i, v);
    if (i == 0) token.by_r = by_r;
    return Finish{make_float2(bonus * v.x, bonus * v.y), __half22float2(raw.gate)};
}

// A warp normalises a head's 64 outputs, two a lane, and writes what goes into the output matrix.
__device__ __forceinline__ void finish(float2 y, const Finish& with, const Vectors& of, __half* out) {
    const float mean = lane_sum(y.x + y.y) / HEAD;
    y.x -= mean, y.y -= mean;
    const float scale = rsqrt_of_normal(lane_sum(dot(y, y)) / HEAD + GROUP_NORM_EPS);
    store2(out, make_float2((fmaf(y.x * scale, of.norm_weight.x, of.norm_bias.x) + with.bonus.x) * with.gate.x,
        (fmaf(y.y * scale, of.norm_weight.y, of.norm_bias.y) + with.bonus.y) * with.gate.y));
}

// What a warp's rows of a state, ROWS a lane from `value` on, give for a token: the outputs, and the products with kk.
template <class State, int ROWS>
__device__ __forceinline__ void outputs(
        const Keys<State> (&keys)[ROWS], int value, const Token& token, float (&removed)[ROWS], Outputs& y) {
    constexpr int N = 2 * ROWS;
    float kk[KEYS], kept[KEYS], sums[N];
    pick(token.kk, kk), pick(token.kept, kept);
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        float s[KEYS];
        keys[m].unpack(s);
        sums[m] = dot(s, kk), sums[ROWS + m] = dot(s, kept);
    }
    // Half of a row's lanes get the products with kk, the others those with what is kept, and each of them one row's output.
    const float own = group_sums(sums), taken = __shfl_xor_sync(ALL, own, GROUP / 2, LANES);
#pragma unroll
    for (int m = 0; m < ROWS; m++) removed[m] = group_sum_of<N>(own, m);
    const int lane = threadIdx.x % GROUP, at = value + lane % (GROUP / 2) / (GROUP / N) * BAND;
    const float stayed = fmaf(token.value[at], token.by_r.y, fmaf(-taken, token.by_r.x, own));
    if (lane >= GROUP / 2 && lane % (GROUP / N) == 0) y.of_value[at] = stayed;
}

// Takes them through it.
template <class State, int ROWS>
__device__ __forceinline__ void advance(const Keys<State> (&keys)[ROWS], State* to, int value, const Token& token, Outputs& y) {
    float removed[ROWS];
    outputs(keys, value, token, removed, y);
    float w[KEYS], inserted[KEYS], key[KEYS];
    pick(token.decay, w), pick(token.inserted, inserted), pick(token.key, key);
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        float s[KEYS];
        keys[m].unpack(s);
        const float v = token.value[value + m * BAND];
#pragma unroll
        for (int j = 0; j < KEYS; j++) s[j] = fmaf(s[j], w[j], fmaf(v, key[j], -removed[m] * inserted[j]));
        Keys<State>::store(to + m * BAND * HEAD, s);
    }
}

}  // namespace rwkv
