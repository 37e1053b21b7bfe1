// Residual sum, layer norm, blend with the token before, and the products of the blends, in one launch, for few rows (Hopper):
// out = activation(mixed weight^T), mixed = lerp(layer norm of x + y, shift[slot], mix).
//
// Every thread block takes the norm of all rows itself, a warp for each 256 columns of a row, and then has its share of the tiles of 8
// rows of weights: they are on their way, by bulk copies, before the preceding kernel has ended. Norm and blends are those of mix.cu bit
// by bit, where a row's last part has 64, 128 or 256 columns. What others still read may not be written: the new residual stream goes to other memory, and the normalised rows,
// which become the shift state, to scratch; a later launch of these, or `last_norm`, takes them to their slots (`carried`). Sums have a
// fixed order that depends on the shapes alone, so a row's result depends neither on the others nor on their number.
#include "few.cuh"

namespace rwkv {
namespace {

struct Norm {
    const float* x;   // [N, C]
    float* x_out;     // x + y; other memory than x
    const __half* y;  // or null: nothing is added, and x_out not written
    const float *weight, *bias, *mix;
    const __half* shift;
    const int64_t* slots;
    __half* normed;         // [N, C]
    const __half* carried;  // [N, C] of an earlier launch, or null
    __half* carried_to;     // the shift state that they go to
};
struct NormedProducts {
    FewProducts products;     // whose x are the blends
    Norm norm;
    int plane[MAX_PRODUCTS];  // of `mix`, for each product
    uint8_t* active_mask;     // of the only product, or null: a bit for each of its results, whether it is not zero in some token

    int shared_bytes() const { return products.ring_bytes() + products.all.num_tokens * pitch_of(products.width * 2); }
};

#if __CUDA_ARCH__ >= 900

// The sum over P values, a power of 2, in the order of `lane_sum`.
template <int P>
__device__ __forceinline__ float sum_as_lanes(const float (&v)[P]) {
    if constexpr (P == 1) return v[0];
    else {
        float half[P / 2];
#pragma unroll
        for (int i = 0; i < P / 2; i++) half[i] = __fadd_rn(v[i], v[i + P / 2]);
        return sum_as_lanes(half);
    }
}

// What a row's warps found, put together: (mean, scale). columns: of each part.
template <int P>
__device__ __forceinline__ float2 combine(const float2 (&of_part)[P], const float (&columns)[P], int width) {
    float2 own[P];
    float terms[P];
#pragma unroll
    for (int i = 0; i < P; i++) own[i] = columns[i] > 0.f ? of_part[i] : make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < P; i++) terms[i] = __fmul_rn(columns[i], own[i].x);
    const float mean = sum_as_lanes(terms) / width;
#pragma unroll
    for (int i = 0; i < P; i++) terms[i] = fmaf(__fmul_rn(columns[i], own[i].x - mean), own[i].x - mean, own[i].y);
    return make_float2(mean, rsqrtf(sum_as_lanes(terms) / width + LAYER_NORM_EPS));
}

#endif

// PARTS: of 256 columns, of a row, at most.
template <int PARTS>
__global__ __launch_bounds__(FEW_THREADS, 2) void normed_products(const __grid_constant__ NormedProducts p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ FewSums sums;
    __shared__ float2 moments[FEW][PARTS];
    __shared__ FewRing ring;
    release_next();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int width = p.products.width, num_tokens = p.products.all.num_tokens;
    const FewShare share(p.products);
    if (threadIdx.x == FEW_WARPS * LANES) ring.init(p.products.stages);
    __syncthreads();
    const Norm& norm = p.norm;
    if (warp == FEW_WARPS) {
        load_tiles(p.products, share, memory, ring, [&] {
            wait_for_previous();
            if (!norm.carried) return;
            for (int i = blockIdx.x * LANES + lane; i < num_tokens * width / EACH; i += gridDim.x * LANES) {
                const int token = i * EACH / width, column = i * EACH - token * width;
                const int64_t slot = norm.slots[token];
                if (slot >= 0) store_halves(norm.carried_to + slot * width + column, load_halves(norm.carried + i * EACH));
            }
        });
        return;
    }
    const auto sync = [] { sync_threads(1, FEW_WARPS * LANES); };
    const int parts = (width + SPAN - 1) / SPAN, mixed_pitch = pitch_of(width * 2);
    uint8_t* const mixed = memory + p.products.ring_bytes();
    const FewResults results(p.products, share, p.active_mask);
    const int token = warp / parts, part = warp % parts, column = part * SPAN + lane * EACH, at = token * width + column;
    const bool live = token < num_tokens && column < width;        // whether this lane has columns
    const bool writes = live && warp % gridDim.x == blockIdx.x;  // and this block, of all that have them, writes them
    const float share_of_column = 1.f / fminf(SPAN, width - part * SPAN);
    float weight[EACH] = {}, bias[EACH] = {}, ratio[EACH] = {}, columns[PARTS];
    Halves previous = zero_halves(), added = zero_halves();
#pragma unroll
    for (int i = 0; i < PARTS; i++) columns[i] = i < parts ? fminf(SPAN, width - i * SPAN) : 0.f;
    if (live) {
        const int64_t slot = norm.slots[token];
        if (slot >= 0) previous = load_halves(norm.shift + slot * width + column);
        load8_now(norm.weight + column, weight), load8_now(norm.bias + column, bias);
        load8_now(norm.mix + p.plane[share.item] * width + column, ratio);
    }
    FewReader reader(p.products, memory, ring);
    const uint32_t sums_here = sums_at(sums), own = staged_at(p.products, mixed);
    const uint32_t moments_at = kept(shared_address(moments[token]));
    const float* const x_here = norm.x + at;
    const __half* const y_here = norm.y + at;
    wait_for_previous_knowing(x_here, y_here, results.to, results.activation, share_of_column);

    float v[EACH] = {};
    if (live) {
        load8(x_here, v);
        if (norm.y) added = load_halves_at_once(y_here);
    }
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = __half22float2(added.pair[i]);
        v[2 * i] += pair.x, v[2 * i + 1] += pair.y;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += v[i];
    const float mean = lane_sum(live ? sum : 0.f) * share_of_column;
#pragma unroll
    for (int i = 0; i < EACH; i++) squares = fmaf(v[i] - mean, v[i] - mean, squares);
    squares = lane_sum(live ? squares : 0.f);
    if (lane == 0 && token < num_tokens) store_shared(moments_at + part * sizeof(float2), make_float2(mean, squares));
    sync();
    if (token < num_tokens) {
        float2 found[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; i++) found[i] = load_shared(moments_at + i * sizeof(float2));
        const float2 of = combine(found, columns, width);
        Halves normed;
#pragma unroll
        for (int i = 0; i < 4; i++)
            normed.pair[i] = __floats2half2_rn(fmaf((v[2 * i] - of.x) * of.y, weight[2 * i], bias[2 * i]),
                                               fmaf((v[2 * i + 1] - of.x) * of.y, weight[2 * i + 1], bias[2 * i + 1]));
        const Halves blend = lerp(normed, previous, ratio);
        if (live)  // as `interleave` has it
            store_halves_at_once(reinterpret_cast<__half*>(mixed + token * mixed_pitch) + column,
                                 {blend.pair[0], blend.pair[2], blend.pair[1], blend.pair[3]});
        if (writes) {
            if (norm.y) store8(norm.x_out + at, v);
            store_halves(norm.normed + at, normed);
        }
    }
    sync();
    multiply_staged(width, share.last - share.first, reader, sums_here, results, own);
#endif
}

// The norm in front of the head, of x + y; and, by as many blocks again, rows [N, C] to their slots of a shift state [S, C].
__global__ void __launch_bounds__(MAX_THREADS) last_norm(const float* x, const __half* y, const float* weight, const float* bias,
                                                         __half* out, const __half* carried, __half* carried_to,
                                                         const int64_t* slots, int rows, int width) {
    __shared__ Moments moments[1];
    const Place place(width, 1, 0);
    const bool norms = int(blockIdx.x) < rows;
    const int row = norms ? blockIdx.x : blockIdx.x - rows;
    const size_t at = size_t(row) * width + place.column;
    const int64_t slot = norms ? 0 : slots[row];
    const float* const x_here = x + at;
    const __half *const y_here = y + at, *const carried_here = carried + at;
    __half *const out_here = out + at, *const carried_to_here = carried_to + slot * width + place.column;
    float scale[EACH] = {}, offset[EACH] = {}, v[1][EACH] = {};
    if (place.live && norms) load8_now(weight + place.column, scale), load8_now(bias + place.column, offset);
    release_next();
    wait_for_previous_knowing(x_here, y_here, carried_here, out_here);
    if (!norms) {
        if (slot >= 0 && place.live) store_halves_at_once(carried_to_here, load_halves_at_once(carried_here));
        return;
    }
    if (place.live) {
        const Halves added = load_halves_at_once(y_here);
        load8(x_here, v[0]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = __half22float2(added.pair[i]);
            v[0][2 * i] += pair.x, v[0][2 * i + 1] += pair.y;
        }
    }
    Halves normed[1];
    normalize(v, scale, offset, place, moments, normed);
    if (place.live) store_halves_at_once(out_here, normed[0]);
}

template <int PARTS>
int start_normed(const NormedProducts& p, unsigned blocks, int overlap, void* stream) {
    const auto kernel = normed_products<PARTS>;
    static const cudaError_t prepared = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED);
    if (prepared) return prepared;
    if (p.shared_bytes() > FEW_SHARED) return cudaErrorInvalidValue;
    return start(kernel, {blocks, FEW_THREADS, cudaStream_t(stream), overlap, 1, p.shared_bytes()}, p);
}

int start_normed(NormedProducts& p, int stages, int overlap, void* stream) {
    if (!device().hopper) return cudaErrorNotSupported;
    const int N = p.products.all.num_tokens, width = p.products.width, parts = (width + SPAN - 1) / SPAN;
    if (N < 1 || width < 64 || width % 64 || N * parts > FEW_WARPS || stages < 2) return cudaErrorInvalidValue;
    const unsigned blocks = p.products.deal(device().processors, stages);
    return (parts <= 4 ? start_normed<4> : start_normed<8>)(p, blocks, overlap, stream);
}

Norm norm_of(const void* x, void* x_out, const void* y, const void* weight, const void* bias, const void* mix, const void* shift,
             const void* slots, void* normed, const void* carried, void* carried_to) {
    return {static_cast<const float*>(x), static_cast<float*>(x_out), static_cast<const __half*>(y), static_cast<const float*>(weight),
            static_cast<const float*>(bias), static_cast<const float*>(mix), static_cast<const __half*>(shift),
            static_cast<const int64_t*>(slots), static_cast<__half*>(normed), static_cast<const __half*>(carried),
            static_cast<__half*>(carried_to)};
}

}  // namespace
}  // namespace rwkv

using namespace rwkv;

// Of N rows: rkv [3, N, C], weight [3, C, C], and hidden [N, R] of the LoRA pairs' lora_down [R, C], as rwkv_project makes them of what
// rwkv_add_norm_mix_decode makes of the same x, y, weight, bias, mix [6, C], shift and slots. x_out: see the top; normed [N, C] is what
// goes to shift[slots]. carried, carried_to: rows of an earlier launch and their shift state, or null. A thread block's warps take the
// norm: N * ceil(C / 256) <= 8. stages: of weights on the way at once, at most.
RWKV_EXPORT int rwkv_normed_inputs(const void* x, void* x_out, const void* y, const void* norm_weight, const void* norm_bias,
                                   const void* mix, const void* shift, const void* slots, void* normed, const void* carried,
                                   void* carried_to, const void* weight, const void* lora_down, void* rkv, void* hidden,
                                   int num_tokens, int width, int rank_w, int rank_a, int rank_v, int rank_g, int stages, int overlap,
                                   void* stream) {
    NormedProducts p{};
    p.norm = norm_of(x, x_out, y, norm_weight, norm_bias, mix, shift, slots, normed, carried, carried_to);
    p.products.width = width;
    Products& all = p.products.all;
    all.num_tokens = num_tokens;
    const int64_t C = width, N = num_tokens;
    for (int i = 0; i < 3; i++) {
        p.plane[all.count] = i;
        all.add({nullptr, static_cast<const __half*>(weight) + i * C * C, nullptr, static_cast<__half*>(rkv) + i * N * C, width, width,
                 width, width, NONE, false},
                FEW_TILE);
    }
    const LoraRanks ranks{rank_w, rank_a, rank_v, rank_g};
    const int rank[4] = {rank_w, rank_a, rank_v, rank_g}, plane[4] = {3, 4, 2, 5};
    for (int i = 0, count = all.count; i < 4; i++) {
        if (rank[i] < 0 || rank[i] % FEW_TILE) return cudaErrorInvalidValue;
        if (rank[i]) p.plane[count++] = plane[i];
    }
    add_lora_down(all, nullptr, static_cast<const __half*>(lora_down), static_cast<__half*>(hidden), width, ranks, FEW_TILE);
    return start_normed(p, stages, overlap, stream);
}

// The same for one product: out [N, M] of weight [M, C], with mix [C], M a multiple of 8. active_mask: null, or where to write M bits, 32
// to a word, that say which columns of out are not all zeros.
RWKV_EXPORT int rwkv_normed_product(const void* x, void* x_out, const void* y, const void* norm_weight, const void* norm_bias,
                                    const void* mix, const void* shift, const void* slots, void* normed, const void* carried,
                                    void* carried_to, const void* weight, void* out, void* active_mask, int num_tokens,
                                    int width, int rows, int relu_square, int stages, int overlap, void* stream) {
    if (rows % FEW_TILE) return cudaErrorInvalidValue;
    NormedProducts p{};
    p.norm = norm_of(x, x_out, y, norm_weight, norm_bias, mix, shift, slots, normed, carried, carried_to);
    p.products.width = width, p.products.all.num_tokens = num_tokens;
    p.active_mask = static_cast<uint8_t*>(active_mask);
    p.products.all.add({nullptr, static_cast<const __half*>(weight), nullptr, out, width, rows, rows, width,
                        relu_square ? RELU_SQUARE : NONE, false},
                       FEW_TILE);
    return start_normed(p, stages, overlap, stream);
}

// out [N, C] = layer norm of x + y, as rwkv_add_norm makes it; and of carried [N, C], the rows with a slot go to carried_to[slots].
RWKV_EXPORT int rwkv_last_norm(const float* x, const __half* y, const float* weight, const float* bias, __half* out,
                               const __half* carried, __half* carried_to, const int64_t* slots, int num_tokens, int width,
                               int overlap, cudaStream_t stream) {
    if (width % 64 || width > MAX_WIDTH || width < 64) return cudaErrorInvalidValue;
    const unsigned threads = (width / EACH + LANES - 1) / LANES * LANES;
    return start(last_norm, {2 * unsigned(num_tokens), threads, stream, overlap}, x, y, weight, bias, out, carried, carried_to, slots,
                 num_tokens, width);
}
