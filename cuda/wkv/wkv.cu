// The recurrence of RWKV-7 with everything between the input matrices and the output matrix.
//
//   S <- S diag(w) - (S kk) (kk a)^T + v k^T      kk = normalised k * k_k, w = exp(-exp(-0.5) sigmoid(w_raw))
//   out = (group norm(S r) + (sum r k r_k) v) gate
//
// S is 64 values (rows) x 64 keys (columns). Eight neighbouring lanes hold a row, eight keys each. Both products with S come from
// one pass over it: S_new r = S (w r) - (S kk) (kk a . r) + v (k . r), so a token costs one round of sums over the lanes.
// Arithmetic is fp32; only the stored state may be fp16.
#include "wkv_token.cuh"

namespace rwkv {

// Of narrow models, how many blocks ahead a state is asked into the L2 cache: on an H200 0.1B with 320 and 960 rows takes 1.2 to 1.8 %
// less by it, wider ones up to 2 % more.
constexpr int NARROW_HEADS = 16, BLOCKS_AHEAD = 528;

// One token for each row; a block takes one head of a row, each of its WARPS a band of the state. `inputs_ready`: the kernel before
// this one started after states and slots had been written, so they can be read while it runs.
template <class State, int WARPS>
__global__ void __launch_bounds__(WARPS* LANES, 32 / WARPS) wkv_decode_kernel(
        WkvInputs in, State* state, const int64_t* slots, int heads, bool inputs_ready) {
    constexpr int ROWS = HEAD / (WARPS * BAND);  // of a lane
    // Few blocks all begin before the wait, and have registers left: they find in front of it what they can. Of many blocks most
    // begin behind it.
    constexpr bool AHEAD = WARPS > 4;
    __shared__ Token token;
    __shared__ Outputs y;
    __shared__ Finish finishes[AHEAD ? 1 : LANES];  // where registers are short
    const int head = blockIdx.x % heads, row = blockIdx.x / heads, warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int channel = head * HEAD + 2 * lane;
    const size_t input = size_t(row) * heads * HEAD + channel;
    const int64_t* const slot_at = slots + row;
    Vectors of;
    if (AHEAD && warp == 0) of.load_ahead(in, channel);
    release_next();
    if (!inputs_ready) wait_for_previous_knowing(slot_at);
    const int64_t slot = *slot_at;
    const int value = warp * ROWS * BAND + lane / GROUP;  // the lane's rows: value, value + BAND, ...
    State* at = state + (((slot < 0 ? 0 : slot) * heads + head) * HEAD + value) * HEAD;
    Keys<State> keys[ROWS];
    if (slot >= 0) {
#pragma unroll
        for (int m = 0; m < ROWS; m++) keys[m].load(at + m * BAND * HEAD);
    }
    if (!AHEAD && heads <= NARROW_HEADS && blockIdx.x + BLOCKS_AHEAD < gridDim.x) {
        const int block = blockIdx.x + BLOCKS_AHEAD;
        const int64_t next = slots[block / heads];
        const State* const of_head = state + (next * heads + block % heads) * HEAD * HEAD;
        constexpr int LINE = 128 / sizeof(State), LINES = HEAD * HEAD / LINE;
        if (next >= 0)
            for (int i = threadIdx.x; i < LINES; i += WARPS * LANES) prefetch(of_head + i * LINE);
    }
    if constexpr (AHEAD)
        wait_for_previous_knowing(at, in.w_raw + input, in.r + input, in.k + input, in.v + input, in.a + input, in.gate + input,
                                  in.v_mix + input, in.v_first + input, Keys<State>::place(2 * lane));
    else
        wait_for_previous();
    if (slot < 0) return;
    Finish with;
    if (warp == 0) {
        Raw raw;
        raw.load(in, input);
        if (!AHEAD) of = Vectors(in, channel);
        with = prepare<State>(raw, of, in, input, token);
        if (AHEAD) of.load_rest(in, channel);
        else finishes[lane] = with;
    }
    __syncthreads();
    advance(keys, at, value, token, y);
    __syncthreads();
    if (warp > 0) return;
    if (!AHEAD) of = Vectors(in, channel), with = finishes[lane];
    finish(load2(y.of_value + 2 * lane), with, of, in.out + input);
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
