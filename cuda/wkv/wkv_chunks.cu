// The wkv recurrence of whole prompts in matrix form, on tensor cores: 16 tokens at a time (wkv_chunk.cuh).
//
// A block walks one head of a row. Some of its warps prepare chunks, one chunk each, while four others, 16 values each, take the
// state through the chunks prepared before.
#include "wkv_chunk.cuh"

#ifndef RWKV_HIP

namespace rwkv {

constexpr int SCANNERS = HEAD / 16;  // warps that hold the state
constexpr float LARGEST_HALF = 65504.f;

struct alignas(128) Chunk {
    __half solved[CHUNK * HEAD], query[CHUNK * HEAD];  // after the scan: Y, fp32
    __half removed[CHUNK * HEAD], inserted[CHUNK * HEAD], value[CHUNK * HEAD];
    __half within[CHUNK * CHUNK];
    float half_decay[HEAD];  // from the start to the middle, and from there to the end
    float bonus[CHUNK];
};

__device__ __forceinline__ int output_at(int token, int value) { return token * HEAD + (value ^ token / 2 % 4 * 8); }

// Further parts of 16 x 16.
__device__ __forceinline__ int lane_row() { return threadIdx.x % 16; }
__device__ __forceinline__ int lane_column() { return threadIdx.x / 16 % 2 * 8; }
__device__ __forceinline__ uint4 left(const __half* m, int from) {
    return load_matrices<false>(m + wide_at(lane_row(), from + lane_column()));
}
__device__ __forceinline__ uint4 right_down(const __half* m, int from) {
    return load_matrices<true>(m + wide_at(lane_row(), from + lane_column()));
}
__device__ __forceinline__ uint4 right_across(const __half* m, int from) {
    return load_matrices<false>(m + wide_at(turned_row(), from + turned_column()));
}
__device__ __forceinline__ uint4 square_left(const __half* m) {
    return load_matrices<false>(m + square_at(lane_row(), lane_column()));
}

// Rounded to fp16, without infinities.
__device__ __forceinline__ void store_finite(__half* p, float2 v) {
    const __half2 largest = __float2half2_rn(LARGEST_HALF);
    *reinterpret_cast<__half2*>(p) = __hmax2(__hmin2(__floats2half2_rn(v.x, v.y), largest), __hneg2(largest));
}

// `b` where the mask is set, else `a`: one instruction, where a conditional became a branch.
__device__ __forceinline__ float select(float a, float b, uint32_t mask) {
    return __uint_as_float((__float_as_uint(a) & ~mask) | (__float_as_uint(b) & mask));
}
// Sums over a warp of 16 values each: lane 2 i and 2 i + 1 get the total of v[i].
__device__ __forceinline__ float sum_each(float (&v)[CHUNK]) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int size = CHUNK / 2; size; size /= 2) {
        const uint32_t upper = lane & (size * 2) ? ALL : 0;
#pragma unroll
        for (int j = 0; j < size; j++) {
            const float send = select(v[j + size], v[j], upper), keep = select(v[j], v[j + size], upper);
            v[j] = keep + __shfl_xor_sync(ALL, send, size * 2, LANES);
        }
    }
    return v[0] + __shfl_xor_sync(ALL, v[0], 1, LANES);
}
__device__ __forceinline__ float of_token(float each, int token) { return __shfl_sync(ALL, each, 2 * token, LANES); }

// A warp takes in a chunk's inputs: two channels a lane, `count` tokens from `at` on, `width` apart. The rest is as if it had
// neither decay nor key.
__device__ __forceinline__ void take_in(const WkvInputs& in, uint32_t at, uint32_t width, int count, int channel, Chunk& chunk) {
    const int column = threadIdx.x % LANES * 2;
    float2 through[CHUNK];  // w_raw, then the logarithm to base 2 of the decay from the start through a token
    __half2 k[CHUNK], a[CHUNK], r[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {  // without branches, which would wait for each token's loads
        const uint32_t here = at + min(t, count - 1) * width;
        through[t] = load2(in.w_raw + here);
        k[t] = *reinterpret_cast<const __half2*>(in.k + here), a[t] = *reinterpret_cast<const __half2*>(in.a + here);
        r[t] = *reinterpret_cast<const __half2*>(in.r + here);
    }
    const float2 k_k = load2(in.k_k + channel), k_a = load2(in.k_a + channel), r_k = load2(in.r_k + channel);
    float each[CHUNK];
    float2 total = make_float2(0.f, 0.f);
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const float scale = t < count ? LOG_DECAY_SCALE * LOG2_E : 0.f;
        total.x = fmaf(scale, reciprocal(1.f + power_of_2(-LOG2_E * through[t].x)), total.x);
        total.y = fmaf(scale, reciprocal(1.f + power_of_2(-LOG2_E * through[t].y)), total.y);
        through[t] = total;
        if (t >= count) k[t] = r[t] = __floats2half2_rn(0.f, 0.f);
        const float2 kk = __half22float2(k[t]) * k_k;
        each[t] = dot(kk, kk);
    }
    const float norms = rsqrtf(fmaxf(sum_each(each), 1e-24f));
    const float2 middle = make_float2(total.x / 2, total.y / 2);
    store2(chunk.half_decay + column, make_float2(power_of_2(middle.x), power_of_2(middle.y)));
    float2 before = make_float2(power_of_2(-middle.x), power_of_2(-middle.y));
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const float2 rise = make_float2(power_of_2(through[t].x - middle.x), power_of_2(through[t].y - middle.y));
        const float2 fall = make_float2(reciprocal(rise.x), reciprocal(rise.y));
        const float norm = of_token(norms, t);
        const float2 plain = __half22float2(k[t]), rate = __half22float2(a[t]), read = __half22float2(r[t]);
        const float2 kk = make_float2(plain.x * k_k.x * norm, plain.y * k_k.y * norm);
        const float2 key = make_float2(plain.x * fmaf(rate.x - 1.f, k_a.x, 1.f), plain.y * fmaf(rate.y - 1.f, k_a.y, 1.f));
        const int to = wide_at(t, column);
        store2(chunk.solved + to, kk * before);
        store_finite(chunk.query + to, read * rise);
        store2(chunk.removed + to, make_float2(-kk.x * rate.x * fall.x, -kk.y * rate.y * fall.y));
        store_finite(chunk.inserted + to, key * fall);
        each[t] = dot(read * r_k, key);
        before = rise;
    }
    const float bonus = sum_each(each);
    if (threadIdx.x % 2 == 0) chunk.bonus[threadIdx.x % LANES / 2] = bonus;
    __half2 v[CHUNK], v_mix[CHUNK], v_first[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const uint32_t here = at + min(t, count - 1) * width;
        v[t] = *reinterpret_cast<const __half2*>(in.v + here);
        v_mix[t] = *reinterpret_cast<const __half2*>((in.v_mix ? in.v_mix : in.v) + here);
        v_first[t] = *reinterpret_cast<const __half2*>((in.v_mix ? in.v_first : in.v) + here);
    }
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        float2 own = __half22float2(v[t]);
        const float2 share = __half22float2(v_mix[t]), other = __half22float2(v_first[t]);  // in layer 0: v itself
        own.x = fmaf(share.x, other.x - own.x, own.x), own.y = fmaf(share.y, other.y - own.y, own.y);
        if (t >= count) own = make_float2(0.f, 0.f);
        v[t] = __floats2half2_rn(own.x, own.y);
        *reinterpret_cast<__half2*>(chunk.value + wide_at(t, column)) = v[t];
    }
    if (in.v_mix) return;
#pragma unroll
    for (int t = 0; t < CHUNK; t++)
        if (t < count) *reinterpret_cast<__half2*>(in.v_first + at + t * width) = v[t];
}

// A warp makes of a chunk's inputs, already in place, the five matrices of the scan.
__device__ __forceinline__ void prepare(Chunk& chunk, Scratch& scratch) {
    const int lane = threadIdx.x % LANES, row = lane / 4, column = lane % 4 * 2;  // of a sum's first element
    float system[2][4] = {}, own[2][4] = {}, read_removed[2][4] = {}, within[2][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD; k += 16) {
        const uint4 a = left(chunk.solved, k), r = left(chunk.query, k);
        const uint4 b = right_across(chunk.removed, k), key = right_across(chunk.inserted, k);
        multiply(system, a, b), multiply(own, a, key), multiply(read_removed, r, b), multiply(within, r, key);
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
    const __half* inverse = reinterpret_cast<const __half*>(scratch.system);  // by columns, as is
    const __half* solved_own = inverse + CHUNK * CHUNK;
    const uint4 reads = as_left(read_removed[0], read_removed[1]);
    multiply(within, reads, square_right_across(solved_own));
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e += 2)
            store2(chunk.within + square_at(row + e * 4, column + n * 8), make_float2(within[n][e], within[n][e + 1]));

    const uint4 by_inverse = square_left_turned(inverse), by_own = square_left(solved_own);
    // Every product below replaces 16 x 16 parts that only itself reads.
#pragma unroll
    for (int k = 0; k < HEAD; k += 16) {
        float solved[2][4] = {}, query[2][4], inserted[2][4];
        multiply(solved, by_inverse, right_down(chunk.solved, k));
        const uint4 removed = right_down(chunk.removed, k);
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int at = wide_at(row + e * 4, k + column + n * 8);
                const float2 q = load2(chunk.query + at), i = load2(chunk.inserted + at);
                query[n][e] = q.x, query[n][e + 1] = q.y, inserted[n][e] = i.x, inserted[n][e + 1] = i.y;
                store2(chunk.solved + at, make_float2(solved[n][e], solved[n][e + 1]));
            }
        __syncwarp();
        multiply(query, reads, right_down(chunk.solved, k));
        multiply(inserted, by_own, removed);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int at = wide_at(row + e * 4, k + column + n * 8);
                store_finite(chunk.query + at, make_float2(query[n][e], query[n][e + 1]));
                store_finite(chunk.inserted + at, make_float2(inserted[n][e], inserted[n][e + 1]));
            }
    }
}

// A scanning warp takes its 16 values' part of the state, a sum of 16 x 64, through one chunk.
__device__ __forceinline__ void scan(float (&s)[HEAD / 8][4], Chunk& chunk, int value) {
    const int lane = threadIdx.x % LANES, row = lane / 4, column = lane % 4 * 2;
    float2 decay[HEAD / 8];
    float u[2][4] = {}, y[2][4] = {};
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++) {
        decay[n] = load2(chunk.half_decay + 8 * n + column);
        s[n][0] *= decay[n].x, s[n][1] *= decay[n].y, s[n][2] *= decay[n].x, s[n][3] *= decay[n].y;
    }
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++) {
        const uint4 state = as_left(s[2 * k], s[2 * k + 1]);
        multiply(u, state, right_across(chunk.solved, 16 * k));
        multiply(y, state, right_across(chunk.query, 16 * k));
    }
    const uint4 v = left_turned(chunk.value, value);
    multiply(y, v, square_right_across(chunk.within));
    const uint4 solution = as_left(u[0], u[1]);
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++) {
        const uint4 inserted = right_down(chunk.inserted, 16 * k), removed = right_down(chunk.removed, 16 * k);
        multiply(s[2 * k], v, inserted.x, inserted.y), multiply(s[2 * k + 1], v, inserted.z, inserted.w);
        multiply(s[2 * k], solution, removed.x, removed.y), multiply(s[2 * k + 1], solution, removed.z, removed.w);
    }
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++)
        s[n][0] *= decay[n].x, s[n][1] *= decay[n].y, s[n][2] *= decay[n].x, s[n][3] *= decay[n].y;
    asm volatile("bar.sync 1, %0;" ::"n"(SCANNERS * LANES) : "memory");  // all have read what the outputs now replace
    float* out = reinterpret_cast<float*>(chunk.solved);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[output_at(8 * n + column + e % 2, value + row + e / 2 * 8)] = y[n][e];
}

// A warp turns a scanned chunk's outputs into what goes into the output matrix: group norm, bonus, gate.
__device__ __forceinline__ void finish(
        const WkvInputs& in, uint32_t at, uint32_t width, int count, int channel, const Chunk& chunk) {
    const int column = threadIdx.x % LANES * 2;
    const float* out = reinterpret_cast<const float*>(chunk.solved);
    __half2 gate[CHUNK];
    float2 y[CHUNK];
    float each[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; t++)
        gate[t] = *reinterpret_cast<const __half2*>(in.gate + at + min(t, count - 1) * width);
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        y[t] = load2(out + output_at(t, column));
        each[t] = y[t].x + y[t].y;
    }
    const float means = sum_each(each) / HEAD;
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const float mean = of_token(means, t);
        y[t].x -= mean, y[t].y -= mean;
        each[t] = dot(y[t], y[t]);
    }
    const float scales = rsqrtf(sum_each(each) / HEAD + GROUP_NORM_EPS);
    const float2 weight = load2(in.norm_weight + channel), bias = load2(in.norm_bias + channel);
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const float scale = of_token(scales, t), bonus = chunk.bonus[t];
        const float2 v = load2(chunk.value + wide_at(t, column)), g = __half22float2(gate[t]);
        y[t].x = fmaf(bonus, v.x, fmaf(y[t].x * scale, weight.x, bias.x)) * g.x;
        y[t].y = fmaf(bonus, v.y, fmaf(y[t].y * scale, weight.y, bias.y)) * g.y;
    }
#pragma unroll
    for (int t = 0; t < CHUNK; t++)
        if (t < count) store2(in.out + at + t * width, y[t]);
}

template <int PREPARERS>
struct Buffers {
    Chunk chunks[2][PREPARERS];
    Scratch scratch[PREPARERS];
};

// Where all warps of a block wait for each other, from two places in the code.
__device__ __forceinline__ void turn_over() { asm volatile("bar.sync 0;" ::: "memory"); }

// In turn s the preparing warps finish the PREPARERS chunks of stage s - 2 and prepare those of stage s in the same place,
// while the scanning warps walk those of stage s - 1.
template <int PREPARERS>
__global__ void __launch_bounds__((PREPARERS + SCANNERS) * LANES, 8 / PREPARERS) wkv_chunks_kernel(
        WkvInputs in, void* state, bool half_state, const int32_t* starts, const int64_t* slots, int heads) {
    extern __shared__ __align__(128) unsigned char memory[];
    Buffers<PREPARERS>& buffers = *reinterpret_cast<Buffers<PREPARERS>*>(memory);
    const int head = blockIdx.x % heads, row = blockIdx.x / heads, warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    release_next();
    wait_for_previous();
    const int64_t slot = slots[row];
    if (slot < 0) return;
    const int first = starts[row], length = starts[row + 1] - first;
    const int chunks = (length + CHUNK - 1) / CHUNK, stages = (chunks + PREPARERS - 1) / PREPARERS;
    const uint32_t width = heads * HEAD;  // positions in [N, C] are 32-bit: 64-bit ones cost a fifth of the instructions
    if (warp < SCANNERS) {
        const size_t own = (slot * heads + head) * HEAD * HEAD + (warp * 16 + lane / 4) * HEAD + lane % 4 * 2;
        float s[HEAD / 8][4];
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const size_t at = own + e * 4 * HEAD + 8 * n;
                float2 pair;
                if (half_state)
                    pair = load2(static_cast<const __half*>(state) + at);
                else
                    pair = load2(static_cast<const float*>(state) + at);
                s[n][e] = pair.x, s[n][e + 1] = pair.y;
            }
        turn_over();
        for (int stage = 0; stage < stages; stage++) {
            const int count = min(PREPARERS, chunks - stage * PREPARERS);
            for (int c = 0; c < count; c++) scan(s, buffers.chunks[stage % 2][c], warp * 16);
            turn_over();
        }
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const size_t at = own + e * 4 * HEAD + 8 * n;
                const float2 pair = make_float2(s[n][e], s[n][e + 1]);
                if (half_state)
                    store2(static_cast<__half*>(state) + at, pair);
                else
                    store2(static_cast<float*>(state) + at, pair);
            }
    } else {
        const int preparer = warp - SCANNERS, channel = head * HEAD + lane * 2;
        for (int stage = 0; stage < stages + 2; stage++) {
            Chunk& chunk = buffers.chunks[stage % 2][preparer];
            const int old = ((stage - 2) * PREPARERS + preparer) * CHUNK, next = (stage * PREPARERS + preparer) * CHUNK;
            if (stage >= 2 && old < length) {
                finish(in, (first + old) * width + channel, width, min(CHUNK, length - old), channel, chunk);
                __syncwarp();
            }
            if (next < length) {
                take_in(in, (first + next) * width + channel, width, min(CHUNK, length - next), channel, chunk);
                __syncwarp();
                prepare(chunk, buffers.scratch[preparer]);
            }
            if (stage <= stages) turn_over();
        }
    }
}

template <int PREPARERS>
static cudaError_t chunks(const WkvInputs& in, void* state, bool half_state, const int32_t* starts, const int64_t* slots,
        int rows, int heads, int overlap, cudaStream_t stream) {
    const int shared = sizeof(Buffers<PREPARERS>);
    const cudaError_t allowed =
        cudaFuncSetAttribute(wkv_chunks_kernel<PREPARERS>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (allowed != cudaSuccess) return allowed;
    const Launch how = {dim3(rows * heads), dim3((PREPARERS + SCANNERS) * LANES), stream, overlap, 1, shared};
    return start(wkv_chunks_kernel<PREPARERS>, how, in, state, half_state, starts, slots, heads);
}

}  // namespace rwkv

// As rwkv_wkv_prefill. preparers: 4 or 8 warps that prepare; with 8, a block needs most of a multiprocessor's shared memory.
RWKV_EXPORT int rwkv_wkv_chunks(const __half* r, const __half* k, const __half* v, const float* w_raw, const __half* a,
        const __half* v_mix, const __half* gate, __half* v_first, const float* k_k, const float* k_a, const float* r_k,
        const float* norm_weight, const float* norm_bias, void* state, int type, const int32_t* starts, const int64_t* slots,
        __half* out, int rows, int heads, int preparers, int overlap, cudaStream_t stream) {
    const rwkv::WkvInputs in = {r, k, v, w_raw, a, v_mix, gate, v_first, k_k, k_a, r_k, norm_weight, norm_bias, out};
    if (type != rwkv::FP16 && type != rwkv::FP32) return cudaErrorInvalidValue;
    switch (preparers) {
        case 4: return rwkv::chunks<4>(in, state, type == rwkv::FP16, starts, slots, rows, heads, overlap, stream);
        case 8: return rwkv::chunks<8>(in, state, type == rwkv::FP16, starts, slots, rows, heads, overlap, stream);
    }
    return cudaErrorInvalidValue;
}

#endif
