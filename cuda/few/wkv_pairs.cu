// The recurrence of a decode step (wkv.cu) with the second halves of the low-rank pairs of w, a, v and g in front, in one launch
// (Hopper). A thread block has one head of a row: the pairs' weights of its 64 channels, which are on their way before the preceding
// kernel has ended, and the state. Two warps multiply a pair, 32 channels each.
#include "../wkv/wkv_token.cuh"
#include "few.cuh"

namespace rwkv {
namespace {

using State = __half;  // as stored

constexpr int WARPS = 8, GATES = 4;

struct PairsUp {
    const __half* hidden;           // [N, R]
    const __half* weight[GATES];    // [C, rank] of w, a, v, g
    const float* bias[GATES];       // [C] or null
    int rank[GATES], first[GATES];  // first: where a pair's values begin in a row of hidden
    int total;
    __host__ __device__ int weight_bytes() const { return HEAD * total * 2; }
};

__global__ void __launch_bounds__(WARPS* LANES, 2) wkv_pairs_kernel(
        WkvInputs in, const __grid_constant__ PairsUp up, State* state, const int64_t* slots, int heads) {
#if __CUDA_ARCH__ >= 900
    constexpr int BANDS = HEAD / (WARPS * BAND);  // rows of a state to a lane
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Token token;
    __shared__ Outputs y;
    __shared__ __align__(16) float gates[GATES][HEAD];  // w_raw, a, v_mix, gate
    __shared__ uint64_t come;
    release_next();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, group = lane / 4, quarter = lane % 4;
    const int head = blockIdx.x % heads, row = blockIdx.x / heads;
    if (threadIdx.x == 0) {
        init_barrier(&come, 1);
        publish_barriers();
        expect_bytes(&come, up.weight_bytes());
        for (int i = 0; i < GATES; i++)  // each pair's weights of a head lie together
            if (up.rank[i])
                copy_row(memory + HEAD * up.first[i] * 2, up.weight[i] + int64_t(head) * HEAD * up.rank[i], HEAD * up.rank[i] * 2,
                         &come);
    }
    const int64_t slot = slots[row];
    Keys<State> keys[BANDS];
    const int value = warp * BANDS * BAND + lane / GROUP;  // the lane's rows: value, value + BAND, ...
    State* const place = state + ((slot * heads + head) * HEAD + value) * HEAD;
    if (slot >= 0)
#pragma unroll
        for (int m = 0; m < BANDS; m++) keys[m].load(place + m * BAND * HEAD);
    // This warp's part of the pairs: eight rows of weights to a product, and of its 32 channels each lane finishes one.
    const int gate = warp / 2, rank = up.rank[gate], bytes = rank * 2, half = warp % 2, left = rank - lane * 8;
    const int own = half * 32 + group % 4 * 8 + quarter * 2 + group / 4;
    const float bias = up.bias[gate] ? up.bias[gate][head * HEAD + own] : 0.f;
    const __half* hidden = up.hidden + int64_t(row) * up.total + up.first[gate] + lane * 8;
    const uint32_t base = shared_address(memory), staged = base + up.weight_bytes() + (2 * up.first[gate] + half * rank) * 2;
    const uint32_t weights = kept(base + HEAD * up.first[gate] * 2 + (half * 32 + group) * bytes + quarter * 16);
    const uint32_t staged_to = kept(staged + lane * 16), x = kept(staged + quarter * 16), arrived = kept(shared_address(&come));
    float& result = kept_place(gates[gate][own]);
    const float2* const pairs = &kept_place(reinterpret_cast<const float2&>(gates[0][2 * lane]));
    Token& made = kept_place(token);
    Outputs& outputs = kept_place(y);
    const int channel = head * HEAD + 2 * lane, own_value = kept(value);
    const size_t input = size_t(row) * heads * HEAD + channel;
    const Vectors of(in, channel);
    const __half *const r = in.r + input, *const k = in.k + input, *const v = in.v + input, *const v_first = in.v_first + input;
    __half* const out = in.out + input;
    __syncthreads();

    wait_for_previous_knowing(hidden, r, k, v, v_first, out, place, bytes);
    uint4 values = load_global_if(hidden, left > 0);
    Raw raw;
    if (warp == 0) {
        raw.r = *reinterpret_cast<const __half2*>(r), raw.k = *reinterpret_cast<const __half2*>(k);
        raw.v = *reinterpret_cast<const __half2*>(v);
        if (in.v_mix) raw.v_first = *reinterpret_cast<const __half2*>(v_first);
    }
#pragma unroll 1
    for (int from = 0; from < left; from += LANES * 8) {
        store_shared(staged_to + from * 2, interleave(values));
        values = load_global_if(hidden += LANES * 8, from + LANES * 8 < left);
    }
    wait(arrived, 0);
    if (slot < 0) return;  // all of the block
    __syncwarp();
    float sum[4][2][4] = {};  // of eight channels each, in two parts
    uint4 b, w[4];
    const auto fetch = [&](int i) {
        b = load_shared_if(x + i, i < bytes);
#pragma unroll
        for (int m = 0; m < 4; m++) w[m] = load_shared_if(weights + 8 * m * bytes + i, i < bytes);
    };  // a step's values are read among the products of the step before
    fetch(0);
#pragma unroll 1
    for (int i = 0; i < bytes;) {
#pragma unroll
        for (int m = 0; m < 4; m++) multiply_step(sum[m], b, w[m], true);
        fetch(i += FEW_STEP * 2);
    }
    // All groups have multiplied the same row: each can take others of the sums.
    const float2 sums[4] = {sums_of(sum[0]), sums_of(sum[1]), sums_of(sum[2]), sums_of(sum[3])};
    const float2 low = group & 1 ? sums[1] : sums[0], high = group & 1 ? sums[3] : sums[2], both = group & 2 ? high : low;
    float gated = (group & 4 ? both.y : both.x) + bias;
    if (gate == 1 || gate == 2) gated = sigmoid(gated);
    if (gate > 0) gated = __half2float(__float2half_rn(gated));
    result = gated;
    __syncthreads();
    Finish with;
    if (warp == 0) {
        const auto pair = [&](int i) { return pairs[i * HEAD / 2]; };
        const auto halves = [&](int i) { return __float22half2_rn(pair(i)); };
        raw.w_raw = pair(0), raw.a = halves(1), raw.v_mix = halves(2), raw.gate = halves(3);
        with = prepare<State>(raw, of, in, input, made);
    }
    __syncthreads();
    advance(keys, place, own_value, made, outputs);
    __syncthreads();
    if (warp == 0) finish(load2(outputs.of_value + 2 * lane), with, of, out);
#endif
}

}  // namespace
}  // namespace rwkv

// rwkv_lora_up and rwkv_wkv_decode in one launch, for few rows: hidden [N, R], lora_up and biases as of the first, the rest as of the
// second, of fp16 states; without ranks of v, v goes to v_first. Ranks are multiples of 32. States and slots must have been written
// before the preceding kernel began.
RWKV_EXPORT int rwkv_wkv_pairs(const __half* r, const __half* k, const __half* v, const __half* hidden, const __half* lora_up,
        const float* w0, const float* a0, const float* v0, __half* v_first, const float* k_k, const float* k_a, const float* r_k,
        const float* norm_weight, const float* norm_bias, __half* state, const int64_t* slots, __half* out, int rows, int heads,
        int rank_w, int rank_a, int rank_v, int rank_g, int overlap, void* stream) {
    using namespace rwkv;
    if (!device().hopper) return cudaErrorNotSupported;
    const int ranks[GATES] = {rank_w, rank_a, rank_v, rank_g};
    PairsUp up{};
    up.hidden = hidden;
    for (int i = 0; i < GATES; i++) {
        if (ranks[i] < 0 || ranks[i] % FEW_STEP) return cudaErrorInvalidValue;
        up.rank[i] = ranks[i], up.first[i] = up.total;
        up.weight[i] = lora_up + int64_t(up.total) * heads * HEAD;
        up.total += ranks[i];
    }
    up.bias[0] = w0, up.bias[1] = a0, up.bias[2] = rank_v ? v0 : nullptr;
    const __half* const blends = rank_v ? v : nullptr;  // anything but null
    const WkvInputs in = {r, k, v, nullptr, nullptr, blends, nullptr, v_first, k_k, k_a, r_k, norm_weight, norm_bias, out};
    static const cudaError_t prepared =
        cudaFuncSetAttribute(wkv_pairs_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED);
    if (prepared) return prepared;
    const int bytes = up.weight_bytes() + 2 * up.total * 2;
    if (bytes > FEW_SHARED) return cudaErrorInvalidValue;
    return start(wkv_pairs_kernel, {unsigned(heads * rows), WARPS * LANES, cudaStream_t(stream), overlap, 1, bytes}, in, up, state,
                 slots, heads);
}
