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
    const int gate = warp / 2, bytes = up.rank[gate] * 2, out_row = warp % 2 * 32 + group;  // this warp's part of the pairs
    float bias[4];
#pragma unroll
    for (int i = 0; i < 4; i++) bias[i] = up.bias[gate] ? up.bias[gate][head * HEAD + out_row + 8 * i] : 0.f;
    uint8_t* const staged = memory + up.weight_bytes();  // the row's hidden
    const int eights = up.total / 8;
    const uint8_t* const weights = memory + HEAD * up.first[gate] * 2 + out_row * bytes + quarter * 16;
    const uint8_t* const x = staged + up.first[gate] * 2 + quarter * 16;
    const int channel = head * HEAD + 2 * lane;
    const size_t input = size_t(row) * heads * HEAD + channel;
    const Vectors of(in, channel);
    __syncthreads();

    wait_for_previous();
#pragma unroll 1
    for (int i = threadIdx.x; i < eights; i += WARPS * LANES)
        reinterpret_cast<uint4*>(staged)[i] = reinterpret_cast<const uint4*>(up.hidden + int64_t(row) * up.total)[i];
    Raw raw;
    if (warp == 0) {
        raw.r = *reinterpret_cast<const __half2*>(in.r + input), raw.k = *reinterpret_cast<const __half2*>(in.k + input);
        raw.v = *reinterpret_cast<const __half2*>(in.v + input);
        if (in.v_mix) raw.v_first = *reinterpret_cast<const __half2*>(in.v_first + input);
    }
    wait(&come, 0);
    if (slot < 0) return;  // all of the block
    __syncthreads();
    float low[2][4] = {}, high[2][4] = {};  // of channels out_row and out_row + 8, and of 16 more; each in two halves
#pragma unroll 2
    for (int i = 0; i < bytes; i += FEW_STEP * 2) {
        uint4 b = make_uint4(0, 0, 0, 0);
        if (group == 0) b = *reinterpret_cast<const uint4*>(x + i);
        uint4 w[4];
#pragma unroll
        for (int m = 0; m < 4; m++) w[m] = *reinterpret_cast<const uint4*>(weights + 8 * m * bytes + i);
        mma(low[0], w[0].x, w[1].x, w[0].y, w[1].y, b.x, b.y);
        mma(high[0], w[2].x, w[3].x, w[2].y, w[3].y, b.x, b.y);
        mma(low[1], w[0].z, w[1].z, w[0].w, w[1].w, b.z, b.w);
        mma(high[1], w[2].z, w[3].z, w[2].w, w[3].w, b.z, b.w);
    }
    if (quarter == 0)
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const int c = m % 2 * 2;
            float sum = (m < 2 ? low[0][c] + low[1][c] : high[0][c] + high[1][c]) + bias[m];
            if (gate == 1 || gate == 2) sum = sigmoid(sum);
            if (gate > 0) sum = __half2float(__float2half_rn(sum));
            gates[gate][out_row + 8 * m] = sum;
        }
    __syncthreads();
    Finish with;
    if (warp == 0) {
        const auto pair = [&](int i) { return load2(&gates[i][2 * lane]); };
        const auto halves = [&](int i) { return __float22half2_rn(pair(i)); };
        raw.w_raw = pair(0), raw.a = halves(1), raw.v_mix = halves(2), raw.gate = halves(3);
        with = prepare<State>(raw, of, in, input, token);
    }
    __syncthreads();
    advance(keys, place, value, token, y);
    __syncthreads();
    if (warp == 0) finish(load2(y.of_value + 2 * lane), with, of, in.out + input);
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
    const int bytes = up.weight_bytes() + up.total * 2;
    if (bytes > FEW_SHARED) return cudaErrorInvalidValue;
    return start(wkv_pairs_kernel, {unsigned(heads * rows), WARPS * LANES, cudaStream_t(stream), overlap, 1, bytes}, in, up, state,
                 slots, heads);
}
