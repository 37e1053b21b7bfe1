// The recurrence of many rows' decode steps with most of its writes saved: a state is read at every token but written at every
// third only. The tokens in between stand in a log, with 768 bytes a head where the state has 8192, and are done again, in
// registers, whenever the state is read. Every update is rounded as a store would have, so that outputs and states have the bits
// of wkv.cu, whatever was written when.
#include "wkv_token.cuh"

namespace rwkv {

constexpr int LOGGED_TOKENS = 2;                        // of a slot at most: the next one has its states written
constexpr int WARPS = 4, ROWS = HEAD / (WARPS * BAND);  // of a block, which takes a head; of a lane
static_assert(LOGGED_TOKENS < WARPS);

// What the recurrence needs to know of a token to do it once more to a head's state.
struct alignas(16) Logged {
    __half k[HEAD], a[HEAD];
    float w_raw[HEAD], v[HEAD];  // v with the first layer's share in it
};
static_assert(sizeof(Logged) == 768);

// Where a slot stands, for all layers alike: in one of LOGGED_TOKENS + 1 phases, at the last of which its states are written; tokens
// of the phases from `since` on are in the log only. `arrived` counts phases by heads: each head of the last layer adds one, so that
// no phase is over before all heads have read which it is.
struct Standing {
    int arrived, since;
};

// What a lane has of a logged token: two channels.
struct LoggedRaw {
    __half2 k, a;
    float2 w_raw, v;
    __device__ __forceinline__ void load(const Logged& from, int channel) {
        k = *reinterpret_cast<const __half2*>(from.k + channel), a = *reinterpret_cast<const __half2*>(from.a + channel);
        w_raw = load2(from.w_raw + channel), v = load2(from.v + channel);
    }
    __device__ __forceinline__ void store(Logged& to, int channel) const {
        *reinterpret_cast<__half2*>(to.k + channel) = k, *reinterpret_cast<__half2*>(to.a + channel) = a;
        store2(to.w_raw + channel, w_raw), store2(to.v + channel, v);
    }
};

// What a token does to a state: the part of Token that is left without r.
struct alignas(16) Update {
    float kk[HEAD], decay[HEAD], inserted[HEAD], key[HEAD], value[HEAD];
};

// A warp turns a logged token into an Update, with the operations of `prepare`.
__device__ __forceinline__ void prepare_again(const LoggedRaw& raw, float2 k_k, float2 k_a, Update& to) {
    const int i = threadIdx.x % LANES, place = Keys<__half>::place(2 * i);
    const float2 k = __half22float2(raw.k), a = __half22float2(raw.a);
    float2 kk = k * k_k;
    const float2 key = make_float2(k.x * fmaf(a.x - 1.f, k_a.x, 1.f), k.y * fmaf(a.y - 1.f, k_a.y, 1.f));
    const float norm = rsqrtf(fmaxf(lane_sum(dot(kk, kk)), 1e-24f));
    kk.x *= norm, kk.y *= norm;
    store2(to.kk + place, kk), store2(to.decay + place, make_float2(decay(raw.w_raw.x), decay(raw.w_raw.y)));
    store2(to.inserted + place, kk * a), store2(to.key + place, key), store2(to.value + 2 * i, raw.v);
}

// A warp does a token to its rows of a state, whose products with kk are known; half of a lane's keys at a time, for want of registers.
template <class T>
__device__ __forceinline__ void update(Keys<__half> (&keys)[ROWS], const float (&removed)[ROWS], int value, const T& token) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = half * HEAD / 2 + threadIdx.x % GROUP * 4;
        const float4 w = *reinterpret_cast<const float4*>(token.decay + at);
        const float4 inserted = *reinterpret_cast<const float4*>(token.inserted + at);
        const float4 key = *reinterpret_cast<const float4*>(token.key + at);
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
            const float v = token.value[value + m * BAND];
            const auto next = [&](float s, float w, float inserted, float key) {
                return fmaf(s, w, fmaf(v, key, -removed[m] * inserted));
            };
            __half2* pairs = reinterpret_cast<__half2*>(&keys[m].raw) + 2 * half;
            const float2 a = __half22float2(pairs[0]), b = __half22float2(pairs[1]);
            pairs[0] = __floats2half2_rn(next(a.x, w.x, inserted.x, key.x), next(a.y, w.y, inserted.y, key.y));
            pairs[1] = __floats2half2_rn(next(b.x, w.z, inserted.z, key.z), next(b.y, w.w, inserted.w, key.w));
        }
    }
}

__device__ __forceinline__ void redo(Keys<__half> (&keys)[ROWS], int value, const Update& token) {
    float kk[KEYS], removed[ROWS];
    pick(token.kk, kk);
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        float s[KEYS];
        keys[m].unpack(s);
        removed[m] = dot(s, kk);
    }
    const float own = group_sums(removed);
#pragma unroll
    for (int m = 0; m < ROWS; m++) removed[m] = group_sum_of<ROWS>(own, m);
    update(keys, removed, value, token);
}

__device__ __forceinline__ void write(const Keys<__half>& keys, __half* row) {
    store_once(reinterpret_cast<uint4*>(row + threadIdx.x % GROUP * KEYS), keys.raw);
}

__device__ __forceinline__ Standing load_standing(const Standing* of) {
    const int2 raw = __ldcg(reinterpret_cast<const int2*>(of));
    return Standing{raw.x, raw.y};
}

__device__ __forceinline__ int phase_of(int arrived, int heads) {
    int phase = 0;
#pragma unroll
    for (int t = 1; t <= LOGGED_TOKENS; t++) phase += arrived >= t * heads;
    return phase;
}

// As wkv_decode_kernel. `last_layer`: of those that share `standing`.
__global__ void __launch_bounds__(WARPS* LANES, 32 / WARPS) wkv_logged_kernel(
        WkvInputs in, __half* state, Logged* log, Standing* standing, const int64_t* slots, int heads, bool last_layer,
        bool inputs_ready) {
    __shared__ Token token;
    __shared__ Update logged[LOGGED_TOKENS];
    __shared__ Outputs y;
    __shared__ Finish with[LANES];  // registers are short
    const int head = blockIdx.x % heads, row = blockIdx.x / heads, warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    release_next();
    if (!inputs_ready) wait_for_previous();
    const int64_t slot = slots[row];
    const int value = warp * ROWS * BAND + lane / GROUP, channel = head * HEAD + 2 * lane;
    const int64_t place = slot * heads + head;
    __half* at = state + (place * HEAD + value) * HEAD;
    log += place * LOGGED_TOKENS;
    Keys<__half> keys[ROWS];
    int phase = 0, pending = 0;
    if (slot >= 0) {
        const Standing now = load_standing(standing + slot);
#pragma unroll
        for (int m = 0; m < ROWS; m++) keys[m].load(at + m * BAND * HEAD);
        phase = phase_of(now.arrived, heads), pending = phase - now.since;
        if (warp && warp <= pending) {
            LoggedRaw raw;
            raw.load(log[now.since + warp - 1], 2 * lane);
            prepare_again(raw, load2(in.k_k + channel), load2(in.k_a + channel), logged[warp - 1]);
        }
    }
    const bool writes = phase == LOGGED_TOKENS;
    wait_for_previous();
    if (slot < 0) return;
    const size_t input = size_t(row) * heads * HEAD + channel;
    if (warp == 0) {
        Raw raw;
        raw.load(in, input);
        with[lane] = prepare<__half>(raw, Vectors(in, channel), in, input, token);
        if (!writes) LoggedRaw{raw.k, raw.a, raw.w_raw, load2(token.value + 2 * lane)}.store(log[phase], 2 * lane);
    }
    __syncthreads();
    if (last_layer && threadIdx.x == 0) {
        // All threads have read where the slot stands. The last head to arrive begins the phases anew.
        const int before = atomicAdd(&standing[slot].arrived, 1);
        if (before == (LOGGED_TOKENS + 1) * heads - 1) *reinterpret_cast<int2*>(standing + slot) = make_int2(0, 0);
    }
#pragma unroll 1
    for (int i = 0; i < pending; i++) redo(keys, value, logged[i]);
    float removed[ROWS];
    outputs(keys, value, token, removed, y);
    if (writes) {
        update(keys, removed, value, token);
#pragma unroll
        for (int m = 0; m < ROWS; m++) write(keys[m], at + m * BAND * HEAD);
    }
    __syncthreads();
    if (warp == 0) finish(load2(y.of_value + 2 * lane), with[lane], Vectors(in, channel), in.out + input);
}

// Takes what is logged of some slots into their states, in all layers: a block a head of a slot and layer. k_k, k_a [layers, C].
__global__ void __launch_bounds__(WARPS* LANES) wkv_flush_kernel(__half* state, const Logged* log, const Standing* standing,
        const float* k_k, const float* k_a, const int64_t* slots, int num_slots, int heads) {
    __shared__ Update logged[LOGGED_TOKENS];
    const int head = blockIdx.x, layer = blockIdx.z, warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    release_next();
    wait_for_previous();
    const int64_t slot = slots[blockIdx.y];
    if (slot < 0) return;
    const Standing now = load_standing(standing + slot);
    const int pending = phase_of(now.arrived, heads) - now.since;
    if (!pending) return;
    const int value = warp * ROWS * BAND + lane / GROUP, channel = (layer * heads + head) * HEAD + 2 * lane;
    const int64_t place = (int64_t(layer) * num_slots + slot) * heads + head;
    __half* at = state + (place * HEAD + value) * HEAD;
    Keys<__half> keys[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; m++) keys[m].load(at + m * BAND * HEAD);
    if (warp < pending) {
        LoggedRaw raw;
        raw.load(log[place * LOGGED_TOKENS + now.since + warp], 2 * lane);
        prepare_again(raw, load2(k_k + channel), load2(k_a + channel), logged[warp]);
    }
    __syncthreads();
    for (int i = 0; i < pending; i++) redo(keys, value, logged[i]);
#pragma unroll
    for (int m = 0; m < ROWS; m++) write(keys[m], at + m * BAND * HEAD);
}

// From now on nothing of these slots counts as logged.
__global__ void wkv_forget_kernel(Standing* standing, const int64_t* slots, int count, int heads) {
    release_next();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && slots[i] >= 0) standing[slots[i]].since = phase_of(standing[slots[i]].arrived, heads);
}

}  // namespace rwkv

// log [slots, heads, LOGGED_TOKENS] of Logged and standing [slots] of Standing: see above. state is fp16.
RWKV_EXPORT int rwkv_wkv_decode_logged(const __half* r, const __half* k, const __half* v, const float* w_raw, const __half* a,
        const __half* v_mix, const __half* gate, __half* v_first, const float* k_k, const float* k_a, const float* r_k,
        const float* norm_weight, const float* norm_bias, __half* state, void* log, void* standing, const int64_t* slots,
        __half* out, int last_layer, int rows, int heads, int inputs_ready, int overlap, cudaStream_t stream) {
    using namespace rwkv;
    const WkvInputs in = {r, k, v, w_raw, a, v_mix, gate, v_first, k_k, k_a, r_k, norm_weight, norm_bias, out};
    const Launch how = {dim3(rows * heads), dim3(WARPS * LANES), stream, overlap};
    return start(wkv_logged_kernel, how, in, state, static_cast<Logged*>(log), static_cast<Standing*>(standing), slots, heads,
        bool(last_layer), bool(inputs_ready));
}

// All layers of some slots [count], which are distinct: state [layers, num_slots, heads, 64, 64], log likewise, k_k and k_a
// [layers, C]. forget: what is logged of them is dropped.
RWKV_EXPORT int rwkv_wkv_flush(__half* state, const void* log, void* standing, const float* k_k, const float* k_a,
        const int64_t* slots, int count, int layers, int num_slots, int heads, int forget, cudaStream_t stream) {
    using namespace rwkv;
    constexpr int THREADS = 128;
    const auto all = static_cast<Standing*>(standing);
    const Launch heads_of_all = {dim3(heads, count, layers), dim3(WARPS * LANES), stream};
    const Launch one_each = {dim3((count + THREADS - 1) / THREADS), dim3(THREADS), stream};
    if (!forget) {
        const Standing* read = all;
        const auto from = static_cast<const Logged*>(log);
        const cudaError_t error = start(wkv_flush_kernel, heads_of_all, state, from, read, k_k, k_a, slots, num_slots, heads);
        if (error != cudaSuccess) return error;
    }
    return start(wkv_forget_kernel, one_each, all, slots, count, heads);
}
