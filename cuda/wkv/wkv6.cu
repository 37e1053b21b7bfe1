// The recurrence of RWKV-6 with everything between the input matrices and the output matrix, and the gate of its channel mix.
//
//   y = S r + (sum of r u k) v      S <- S diag(w) + v k^T      w = exp(-exp(w_raw)), which may be 0
//   out = group norm(y) silu(gate)
//
// Peng et al., "Eagle and Finch" (2024). The state lies as RWKV-7's does, see wkv_state.cuh. Arithmetic is fp32; only the stored
// state may be fp16.
#include "wkv_state.cuh"

namespace rwkv {
namespace {

// Inputs of N tokens, [N, C] each, and a layer's vectors, [C] each.
struct Inputs {
    const __half *r, *k, *v, *gate;
    const float *w_raw, *bonus, *norm_weight, *norm_bias;
    __half* out;
};

// A token's inputs for two channels, as read.
struct Raw {
    __half2 r, k, v, gate;
    float2 w_raw;
    __device__ __forceinline__ void load(const Inputs& in, size_t at) {
        r = *reinterpret_cast<const __half2*>(in.r + at), k = *reinterpret_cast<const __half2*>(in.k + at);
        v = *reinterpret_cast<const __half2*>(in.v + at), gate = *reinterpret_cast<const __half2*>(in.gate + at);
        w_raw = load2(in.w_raw + at);
    }
};

struct Vectors {
    float2 bonus, norm_weight, norm_bias;
    __device__ __forceinline__ Vectors(const Inputs& in, int channel)
        : bonus(load2(in.bonus + channel)), norm_weight(load2(in.norm_weight + channel)), norm_bias(load2(in.norm_bias + channel)) {}
};

// What the recurrence reads of a token of one head. The vectors over keys lie as the lanes want them: see Keys::place.
struct alignas(16) Token {
    float r[HEAD], decay[HEAD], key[HEAD], value[HEAD];
};

// What the output needs of it besides S r, for two channels.
struct Finish {
    float2 own, gate;
};

__device__ __forceinline__ float decay6(float w_raw) { return __expf(-__expf(w_raw)); }

// A warp turns a head's inputs into a Token; each lane has channels 2 * lane and 2 * lane + 1.
template <class State>
__device__ __forceinline__ Finish prepare(const Raw& raw, const Vectors& of, Token& token) {
    const int i = threadIdx.x % LANES, to = Keys<State>::place(2 * i);
    const float2 r = __half22float2(raw.r), k = __half22float2(raw.k), v = __half22float2(raw.v);
    const float own = lane_sum(dot(r * of.bonus, k));
    store2(token.r + to, r), store2(token.decay + to, make_float2(decay6(raw.w_raw.x), decay6(raw.w_raw.y)));
    store2(token.key + to, k), store2(token.value + 2 * i, v);
    return Finish{make_float2(own * v.x, own * v.y), __half22float2(raw.gate)};
}

// A warp normalises a head's 64 outputs, two a lane, and writes what goes into the output matrix.
__device__ __forceinline__ void finish(float2 y, const Finish& with, const Vectors& of, __half* out) {
    y.x += with.own.x, y.y += with.own.y;
    const float mean = lane_sum(y.x + y.y) / HEAD;
    y.x -= mean, y.y -= mean;
    const float scale = rsqrtf(lane_sum(dot(y, y)) / HEAD + GROUP_NORM_EPS);
    store2(out, make_float2(fmaf(y.x * scale, of.norm_weight.x, of.norm_bias.x) * with.gate.x * sigmoid(with.gate.x),
        fmaf(y.y * scale, of.norm_weight.y, of.norm_bias.y) * with.gate.y * sigmoid(with.gate.y)));
}

// A warp takes its rows of a state, ROWS a lane from `value` on, through one token, and gives its outputs.
template <int ROWS>
__device__ __forceinline__ void advance(float (&s)[ROWS][KEYS], int value, const Token& token, Outputs& y) {
    float r[KEYS], w[KEYS], key[KEYS], read[ROWS];
    pick(token.r, r);
#pragma unroll
    for (int m = 0; m < ROWS; m++) read[m] = dot(s[m], r);
#pragma unroll
    for (int m = 0; m < ROWS; m++) read[m] = group_sum(read[m]);
    pick(token.decay, w), pick(token.key, key);
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        if (threadIdx.x % GROUP == 0) y.of_value[value + m * BAND] = read[m];
        const float v = token.value[value + m * BAND];
#pragma unroll
        for (int j = 0; j < KEYS; j++) s[m][j] = fmaf(s[m][j], w[j], v * key[j]);
    }
}

// One token for each row; a block takes one head of a row, each of its WARPS a band of the state. `inputs_ready`: the kernel before
// this one started after states and slots had been written, so they can be read while it runs.
template <class State, int WARPS>
__global__ void __launch_bounds__(WARPS* LANES, 32 / WARPS) wkv6_decode_kernel(
        Inputs in, State* state, const int64_t* slots, int heads, bool inputs_ready) {
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
        with = prepare<State>(raw, Vectors(in, channel), token);
    }
    __syncthreads();
    float s[ROWS][KEYS];
#pragma unroll
    for (int m = 0; m < ROWS; m++) keys[m].unpack(s[m]);
    advance(s, value, token, y);
#pragma unroll
    for (int m = 0; m < ROWS; m++) Keys<State>::store(at + m * BAND * HEAD, s[m]);
    __syncthreads();
    if (warp == 0) finish(load2(y.of_value + 2 * lane), with, Vectors(in, channel), in.out + input);
}

// Packed rows of any lengths: row b owns tokens starts[b] to starts[b + 1] - 1. A block walks one head of a row, STAGE tokens
// at a time: its warps prepare the tokens, each warp takes its band of the state through them, the warps finish them. The next
// tokens' inputs are on their way meanwhile.
template <class State, int WARPS, int STAGE>
__global__ void __launch_bounds__(WARPS* LANES, 24 / WARPS) wkv6_scan_kernel(
        Inputs in, State* state, const int32_t* starts, const int64_t* slots, int heads) {
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
            if (t < last) with[i] = prepare<State>(raw[i], of, tokens[t - begin]);
            if (t + STAGE < last) raw[i].load(in, (t + STAGE) * width + channel);
        }
        __syncthreads();
        const int count = min(STAGE, last - begin);
        for (int t = 0; t < count; t++) advance(s, value, tokens[t], y[t]);
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

// y = sigmoid(gate) y, eight values a thread.
__global__ void __launch_bounds__(256) gate_kernel(const __half* gate, __half* y, int eights) {
    release_next();
    wait_for_previous();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= eights) return;
    float g[8], v[8];
    load8(gate + size_t(i) * 8, g), load8(y + size_t(i) * 8, v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= sigmoid(g[j]);
#pragma unroll
    for (int j = 0; j < 8; j += 2) store2(y + size_t(i) * 8 + j, make_float2(v[j], v[j + 1]));
}

template <class State>
cudaError_t decode(const Inputs& in, void* state, const int64_t* slots, int rows, int heads, bool inputs_ready, int overlap,
        cudaStream_t stream) {
    constexpr int FEW_BLOCKS = 512, WARPS = 4;  // as in wkv.cu
    const Launch how = {dim3(rows * heads), dim3(WARPS * LANES), stream, overlap};
    if (rows * heads > FEW_BLOCKS)
        return start(wkv6_decode_kernel<State, WARPS>, how, in, static_cast<State*>(state), slots, heads, inputs_ready);
    Launch few = how;
    few.block.x *= 2;
    return start(wkv6_decode_kernel<State, 2 * WARPS>, few, in, static_cast<State*>(state), slots, heads, inputs_ready);
}

template <class State>
cudaError_t prefill(const Inputs& in, void* state, const int32_t* starts, const int64_t* slots, int rows, int heads, int overlap,
        cudaStream_t stream) {
    constexpr int WARPS = 8, STAGE = 16;
    const Launch how = {dim3(rows * heads), dim3(WARPS * LANES), stream, overlap};
    return start(wkv6_scan_kernel<State, WARPS, STAGE>, how, in, static_cast<State*>(state), starts, slots, heads);
}

}  // namespace
}  // namespace rwkv

// type: of the state, rwkv::FP16 or rwkv::FP32. starts: null where each row is one token.
RWKV_EXPORT int rwkv_wkv6(const __half* r, const __half* k, const __half* v, const __half* gate, const float* w_raw,
        const float* bonus, const float* norm_weight, const float* norm_bias, void* state, int type, const int32_t* starts,
        const int64_t* slots, __half* out, int rows, int heads, int inputs_ready, int overlap, cudaStream_t stream) {
    const rwkv::Inputs in = {r, k, v, gate, w_raw, bonus, norm_weight, norm_bias, out};
    const bool half = type == rwkv::FP16;
    if (!half && type != rwkv::FP32) return cudaErrorInvalidValue;
    if (starts)
        return half ? rwkv::prefill<__half>(in, state, starts, slots, rows, heads, overlap, stream)
                    : rwkv::prefill<float>(in, state, starts, slots, rows, heads, overlap, stream);
    return half ? rwkv::decode<__half>(in, state, slots, rows, heads, inputs_ready, overlap, stream)
                : rwkv::decode<float>(in, state, slots, rows, heads, inputs_ready, overlap, stream);
}

// y [count] = sigmoid(gate) y, count a multiple of 8.
RWKV_EXPORT int rwkv_gate(const __half* gate, __half* y, int count, int overlap, cudaStream_t stream) {
    if (count % 8) return cudaErrorInvalidValue;
    const rwkv::Launch how = {dim3((count / 8 + 255) / 256), dim3(256), stream, overlap};
    return rwkv::start(rwkv::gate_kernel, how, gate, y, count / 8);
}
