// The recurrence of RWKV-7 with everything between the input matrices and the output matrix.
//
//   S <- S diag(w) - (S kk) (kk a)^T + v k^T      kk = normalised k * k_k, w = exp(-exp(-0.5) sigmoid(w_raw))
//   out = (group norm(S r) + (sum r k r_k) v) gate
//
// S is 64 values (rows) x 64 keys (columns). Eight neighbouring lanes hold a row, eight keys each. Both products with S come from
// one pass over it: S_new r = S (w r) - (S kk) (kk a . r) + v (k . r), so a token costs one round of sums over the lanes.
// Arithmetic is fp32; only the stored state may be fp16.
#include "wkv.cuh"

namespace rwkv {

constexpr int KEYS = 8;              // keys of a lane
constexpr int GROUP = HEAD / KEYS;   // lanes of a row
constexpr int BAND = LANES / GROUP;  // rows that a warp holds at once

__device__ __forceinline__ float group_sum(float v) {
#pragma unroll
    for (int d = GROUP / 2; d; d /= 2) v += __shfl_xor_sync(ALL, v, d, LANES);
    return v;
}

// A layer's vectors for two channels.
struct Vectors {
    float2 k_k, k_a, r_k, norm_weight, norm_bias;
    __device__ __forceinline__ Vectors(const WkvInputs& in, int channel)
        : k_k(load2(in.k_k + channel)), k_a(load2(in.k_a + channel)), r_k(load2(in.r_k + channel)),
          norm_weight(load2(in.norm_weight + channel)), norm_bias(load2(in.norm_bias + channel)) {}
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

struct alignas(16) Outputs {
    float of_value[HEAD];
};

// What the output needs of it besides S r, for two channels.
struct Finish {
    float2 bonus, gate;
};

// Past the L1 cache, in which nobody would look for a state again.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
#ifdef RWKV_HIP
    return *p;
#else
    return __ldcg(p);
#endif
}
__device__ __forceinline__ void store_once(uint4* p, uint4 v) {
#ifdef RWKV_HIP
    *p = v;
#else
    __stcg(p, v);
#endif
}

// Which keys a lane holds, and how: two runs of four, so that a row's eight lanes read whole 128-byte lines of a state. `place`:
// where a key stands in a Token's vectors, whose first half is the lanes' first runs, the second the others; no banks collide.
template <class State>
struct Keys;
template <>
struct Keys<__half> {
    uint4 raw;
    static __device__ __forceinline__ int place(int key) { return key / 4 % 2 * HEAD / 2 + key / KEYS * 4 + key % 4; }
    __device__ __forceinline__ void load(const __half* row) {
        raw = load_once(reinterpret_cast<const uint4*>(row + threadIdx.x % GROUP * KEYS));
    }
    __device__ __forceinline__ void unpack(float (&s)[KEYS]) const {
        const __half2* pairs = reinterpret_cast<const __half2*>(&raw);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 pair = __half22float2(pairs[j]);
            s[2 * j] = pair.x, s[2 * j + 1] = pair.y;
        }
    }
    static __device__ __forceinline__ void store(__half* row, const float (&s)[KEYS]) {
        uint4 raw;
        __half2* pairs = reinterpret_cast<__half2*>(&raw);
#pragma unroll
        for (int j = 0; j < 4; j++) pairs[j] = __floats2half2_rn(s[2 * j], s[2 * j + 1]);
        store_once(reinterpret_cast<uint4*>(row + threadIdx.x % GROUP * KEYS), raw);
    }
};
template <>
struct Keys<float> {
    float4 raw[2];
    static __device__ __forceinline__ int place(int key) { return key; }
    static __device__ __forceinline__ int run(int half) { return half * HEAD / 2 + threadIdx.x % GROUP * 4; }
    __device__ __forceinline__ void load(const float* row) {
        raw[0] = *reinterpret_cast<const float4*>(row + run(0)), raw[1] = *reinterpret_cast<const float4*>(row + run(1));
    }
    __device__ __forceinline__ void unpack(float (&s)[KEYS]) const {
        s[0] = raw[0].x, s[1] = raw[0].y, s[2] = raw[0].z, s[3] = raw[0].w;
        s[4] = raw[1].x, s[5] = raw[1].y, s[6] = raw[1].z, s[7] = raw[1].w;
    }
    static __device__ __forceinline__ void store(float* row, const float (&s)[KEYS]) {
        *reinterpret_cast<float4*>(row + run(0)) = make_float4(s[0], s[1], s[2], s[3]);
        *reinterpret_cast<float4*>(row + run(1)) = make_float4(s[4], s[5], s[6], s[7]);
    }
};

__device__ __forceinline__ void pick(const float* vector, float (&v)[KEYS]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 four = *reinterpret_cast<const float4*>(vector + half * HEAD / 2 + threadIdx.x % GROUP * 4);
        v[4 * half] = four.x, v[4 * half + 1] = four.y, v[4 * half + 2] = four.z, v[4 * half + 3] = four.w;
    }
}

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
    const float norm = rsqrtf(fmaxf(squares, 1e-24f));
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
    const float scale = rsqrtf(lane_sum(dot(y, y)) / HEAD + GROUP_NORM_EPS);
    store2(out, make_float2((fmaf(y.x * scale, of.norm_weight.x, of.norm_bias.x) + with.bonus.x) * with.gate.x,
        (fmaf(y.y * scale, of.norm_weight.y, of.norm_bias.y) + with.bonus.y) * with.gate.y));
}

__device__ __forceinline__ float dot(const float (&a)[KEYS], const float (&b)[KEYS]) {
    float even = a[0] * b[0], odd = a[1] * b[1];
#pragma unroll
    for (int j = 2; j < KEYS; j += 2) even = fmaf(a[j], b[j], even), odd = fmaf(a[j + 1], b[j + 1], odd);
    return even + odd;
}

// A warp takes its rows of a state, ROWS a lane from `value` on, through one token, and gives its outputs.
template <class State, int ROWS>
__device__ __forceinline__ void advance(const Keys<State> (&keys)[ROWS], State* to, int value, const Token& token, Outputs& y) {
    float kk[KEYS], kept[KEYS], removed[ROWS];
    pick(token.kk, kk), pick(token.kept, kept);
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        float s[KEYS];
        keys[m].unpack(s);
        removed[m] = group_sum(dot(s, kk));
        const float stayed = group_sum(dot(s, kept));
        const float v = token.value[value + m * BAND];
        if (threadIdx.x % GROUP == 0)
            y.of_value[value + m * BAND] = fmaf(v, token.by_r.y, fmaf(-removed[m], token.by_r.x, stayed));
    }
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

// One token for each row; a block takes one head of a row, each of its WARPS a band of the state. `inputs_ready`: the kernel before
// this one started after states and slots had been written, so they can be read while it runs.
template <class State, int WARPS>
__global__ void __launch_bounds__(WARPS* LANES, 32 / WARPS) wkv_decode_kernel(
        WkvInputs in, State* state, const int64_t* slots, int heads, bool inputs_ready) {
    constexpr int ROWS = HEAD / (WARPS * BAND);  // of a lane
    __shared__ Token token;
    __shared__ Outputs y;
    const int head = blockIdx.x % heads, row = blockIdx.x / heads, warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    release_next();
    if (!inputs_ready) wait_for_previous();
    const int64_t slot = slots[row];
    const int value = warp * ROWS * BAND + lane / GROUP;  // the lane's rows: value, value + BAND, ...
    State* at = state + ((slot * heads + head) * HEAD + value) * HEAD;
    Keys<State> keys[ROWS];
    if (slot >= 0) {
#pragma unroll
        for (int m = 0; m < ROWS; m++) keys[m].load(at + m * BAND * HEAD);
    }
    wait_for_previous();
    if (slot < 0) return;
    const int channel = head * HEAD + 2 * lane;
    const size_t input = size_t(row) * heads * HEAD + channel;
    Finish with;
    if (warp == 0) {
        Raw raw;
        raw.load(in, input);
        with = prepare<State>(raw, Vectors(in, channel), in, input, token);
    }
    __syncthreads();
    advance(keys, at, value, token, y);
    __syncthreads();
    if (warp == 0) finish(load2(y.of_value + 2 * lane), with, Vectors(in, channel), in.out + input);
}

// Packed rows of any lengths: row b owns tokens starts[b] to starts[b + 1] - 1. A block walks one head of a row, STAGE tokens
// at a time: its warps prepare the tokens, each warp takes its band of the state through them, the warps finish them. The next
// tokens' inputs are on their way meanwhile.
template <class State, int WARPS, int STAGE>
__global__ void __launch_bounds__(WARPS* LANES, 24 / WARPS) wkv_scan_kernel(
        WkvInputs in, State* state, const int32_t* starts, const int64_t* slots, int heads) {
    constexpr int ROWS = HEAD / (WARPS * BAND), SHARE = STAGE / WARPS;  // rows of a lane; tokens a warp prepares
    __shared__ Token tokens[STAGE];
    __shared__ Outputs y[STAGE];
    const int head = blockIdx.x % heads, row = blockIdx.x / heads, warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    release_next();
    wait_for_previous();
    const int64_t slot = slots[row];
    if (slot < 0) return;
    const int first = starts[row], last = starts[row + 1];
    const int value = warp * ROWS * BAND + lane / GROUP;
    State* at = state + ((slot * heads + head) * HEAD + value) * HEAD;
    float s[ROWS][KEYS];
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        Keys<State> keys;
        keys.load(at + m * BAND * HEAD);
        keys.unpack(s[m]);
    }
    const int channel = head * HEAD + 2 * lane;
    const size_t width = size_t(heads) * HEAD;
    const Vectors of(in, channel);
    Raw raw[SHARE];
#pragma unroll
    for (int i = 0; i < SHARE; i++)
        if (first + warp + i * WARPS < last) raw[i].load(in, (first + warp + i * WARPS) * width + channel);
    for (int begin = first; begin < last; begin += STAGE) {
        Finish with[SHARE];
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            const int t = begin + warp + i * WARPS;
            if (t < last) with[i] = prepare<State>(raw[i], of, in, t * width + channel, tokens[t - begin]);
            if (t + STAGE < last) raw[i].load(in, (t + STAGE) * width + channel);
        }
        __syncthreads();
        const int count = min(STAGE, last - begin);
        for (int t = 0; t < count; t++) {
            const Token& token = tokens[t];
            float kk[KEYS], kept[KEYS], w[KEYS], inserted[KEYS], key[KEYS], removed[ROWS], stayed[ROWS];
            pick(token.kk, kk), pick(token.kept, kept);
#pragma unroll
            for (int m = 0; m < ROWS; m++) removed[m] = dot(s[m], kk), stayed[m] = dot(s[m], kept);
#pragma unroll
            for (int m = 0; m < ROWS; m++) removed[m] = group_sum(removed[m]), stayed[m] = group_sum(stayed[m]);
            pick(token.decay, w), pick(token.inserted, inserted), pick(token.key, key);
#pragma unroll
            for (int m = 0; m < ROWS; m++) {
                const float v = token.value[value + m * BAND];
                if (lane % GROUP == 0)
                    y[t].of_value[value + m * BAND] = fmaf(v, token.by_r.y, fmaf(-removed[m], token.by_r.x, stayed[m]));
#pragma unroll
                for (int j = 0; j < KEYS; j++) s[m][j] = fmaf(s[m][j], w[j], fmaf(v, key[j], -removed[m] * inserted[j]));
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            const int t = begin + warp + i * WARPS;
            if (t < last) finish(load2(y[t - begin].of_value + 2 * lane), with[i], of, in.out + t * width + channel);
        }
    }
#pragma unroll
    for (int m = 0; m < ROWS; m++) Keys<State>::store(at + m * BAND * HEAD, s[m]);
}

template <class State>
static cudaError_t decode(
        const WkvInputs& in, void* state, const int64_t* slots, int rows, int heads, bool inputs_ready, int overlap,
        cudaStream_t stream) {
    constexpr int FEW_BLOCKS = 512, WARPS = 4;  // few blocks are quicker with more warps each; the results are the same
    const Launch how = {dim3(rows * heads), dim3(WARPS * LANES), stream, overlap};
    if (rows * heads > FEW_BLOCKS)
        return start(wkv_decode_kernel<State, WARPS>, how, in, static_cast<State*>(state), slots, heads, inputs_ready);
    Launch few = how;
    few.block.x *= 2;
    return start(wkv_decode_kernel<State, 2 * WARPS>, few, in, static_cast<State*>(state), slots, heads, inputs_ready);
}

template <class State>
static cudaError_t prefill(const WkvInputs& in, void* state, const int32_t* starts, const int64_t* slots, int rows, int heads,
        int overlap, cudaStream_t stream) {
    constexpr int WARPS = 8, STAGE = 16;
    const Launch how = {dim3(rows * heads), dim3(WARPS * LANES), stream, overlap};
    return start(wkv_scan_kernel<State, WARPS, STAGE>, how, in, static_cast<State*>(state), starts, slots, heads);
}

}  // namespace rwkv

// type: of the state, rwkv::FP16 or rwkv::FP32.
RWKV_EXPORT int rwkv_wkv_decode(const __half* r, const __half* k, const __half* v, const float* w_raw, const __half* a,
        const __half* v_mix, const __half* gate, __half* v_first, const float* k_k, const float* k_a, const float* r_k,
        const float* norm_weight, const float* norm_bias, void* state, int type, const int64_t* slots, __half* out, int rows,
        int heads, int inputs_ready, int overlap, cudaStream_t stream) {
    const rwkv::WkvInputs in = {r, k, v, w_raw, a, v_mix, gate, v_first, k_k, k_a, r_k, norm_weight, norm_bias, out};
    switch (type) {
        case rwkv::FP16: return rwkv::decode<__half>(in, state, slots, rows, heads, inputs_ready, overlap, stream);
        case rwkv::FP32: return rwkv::decode<float>(in, state, slots, rows, heads, inputs_ready, overlap, stream);
    }
    return cudaErrorInvalidValue;
}

RWKV_EXPORT int rwkv_wkv_scan(const __half* r, const __half* k, const __half* v, const float* w_raw, const __half* a,
        const __half* v_mix, const __half* gate, __half* v_first, const float* k_k, const float* k_a, const float* r_k,
        const float* norm_weight, const float* norm_bias, void* state, int type, const int32_t* starts, const int64_t* slots,
        __half* out, int rows, int heads, int overlap, cudaStream_t stream) {
    const rwkv::WkvInputs in = {r, k, v, w_raw, a, v_mix, gate, v_first, k_k, k_a, r_k, norm_weight, norm_bias, out};
    switch (type) {
        case rwkv::FP16: return rwkv::prefill<__half>(in, state, starts, slots, rows, heads, overlap, stream);
        case rwkv::FP32: return rwkv::prefill<float>(in, state, starts, slots, rows, heads, overlap, stream);
    }
    return cudaErrorInvalidValue;
}
