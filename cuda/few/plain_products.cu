// Products of few rows (Hopper): out [N, M] = activation(x [N, K] weight [M, K]^T), K up to 4096, several of the same K in a launch,
// as stream_weights in linear/gemv.cu does them, but short.
#include "few.cuh"

namespace rwkv {
namespace {

struct PlainProducts {
    FewProducts products;
    uint8_t* active_mask;
};

// PIECES: of K, at most, of which a lane keeps what it multiplies by; or 0: that is too much and lies in shared memory.
template <int PIECES>
__global__ __launch_bounds__(FEW_THREADS, 2) void plain_products(const __grid_constant__ PlainProducts p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ FewSums sums;
    __shared__ FewRing ring;
    release_next();
    const FewShare share(p.products);
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, width = p.products.width;
    if (threadIdx.x == FEW_WARPS * LANES) ring.init(p.products.stages);
    __syncthreads();
    if (warp == FEW_WARPS) return load_tiles(p.products, share, memory, ring, [] { wait_for_previous(); });
    const FewResults results(p.products, share, p.active_mask);
    const Product& q = p.products.all.item[share.item];
    const int tiles = share.last - share.first;
    FewReader reader(p.products, memory, ring);
    const uint32_t sums_here = sums_at(sums);
    if constexpr (PIECES == 0) {
        uint8_t* const staged = memory + p.products.ring_bytes();
        const uint32_t own = staged_at(p.products, staged);
        wait_for_previous_knowing(q.x, results.to, results.activation);
        for (int row = 0; row < p.products.all.num_tokens; row++)
#pragma unroll 2
            for (int k = threadIdx.x * 8; k < width; k += FEW_WARPS * LANES * 8)
                *reinterpret_cast<uint4*>(staged + row * pitch_of(width * 2) + k * 2) =
                    interleave(*reinterpret_cast<const uint4*>(q.x + row * q.x_stride + k));
        sync_threads(1, FEW_WARPS * LANES);
        return multiply_staged(width, tiles, reader, sums_here, results, own);
    } else {
        const int row = min(lane / 4, p.products.all.num_tokens - 1);
        const __half* const x = q.x + row * q.x_stride + warp * FEW_STEP + lane % 4 * 8;
        uint4 a[PIECES * STEPS];
        wait_for_previous_knowing(x, results.to, results.activation);
#pragma unroll
        for (int s = 0; s < PIECES * STEPS; s++)
            a[s] = load_global_if(x + s * EACH_STEP, s < (PIECES - 1) * STEPS || s * EACH_STEP + warp * FEW_STEP < width);
#pragma unroll
        for (int s = 0; s < PIECES * STEPS; s++) a[s] = interleave(a[s]);
        if constexpr (PIECES == 1) multiply_held_ahead(width, tiles, reader, sums_here, results, a);
        else multiply_held<PIECES>(width, tiles, reader, sums_here, results, a);
    }
#endif
}

template <int PIECES>
int start_plain(const PlainProducts& p, unsigned blocks, int overlap, void* stream) {
    const auto kernel = plain_products<PIECES>;
    static const cudaError_t prepared = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED);
    if (prepared) return prepared;
    const int bytes = p.products.ring_bytes() + (PIECES ? 0 : p.products.all.num_tokens * pitch_of(p.products.width * 2));
    if (bytes > FEW_SHARED) return cudaErrorInvalidValue;
    return start(kernel, {blocks, FEW_THREADS, cudaStream_t(stream), overlap, 1, bytes}, p);
}

int start_plain(PlainProducts& p, int stages, int overlap, void* stream) {
    const int N = p.products.all.num_tokens, width = p.products.width;
    if (!device().hopper) return cudaErrorNotSupported;
    if (N < 1 || N > FEW || width % 64 || pieces_of(width) > 4 || stages < 2) return cudaErrorInvalidValue;
    const unsigned blocks = p.products.deal(device().processors, stages);
    return (width <= FEW_PIECE ? start_plain<1> : width <= 2 * FEW_PIECE ? start_plain<2> : start_plain<0>)(
        p, blocks, overlap, stream);
}

}  // namespace
}  // namespace rwkv

using namespace rwkv;

// out [N, M] = x [N, K] weight [M, K]^T, N <= 8, M a multiple of 8, K of 64, at most 4096. active_mask: see rwkv_normed_product.
RWKV_EXPORT int rwkv_plain_product(const void* x, const void* weight, void* out, void* active_mask, int num_tokens, int rows, int width,
                                   int relu_square, int stages, int overlap, void* stream) {
    if (rows % FEW_TILE) return cudaErrorInvalidValue;
    PlainProducts p{};
    p.active_mask = static_cast<uint8_t*>(active_mask);
    p.products.width = width, p.products.all.num_tokens = num_tokens;
    p.products.all.add({static_cast<const __half*>(x), static_cast<const __half*>(weight), nullptr, out, width, rows, rows, width,
                        relu_square ? RELU_SQUARE : NONE, false},
                       FEW_TILE);
    return start_plain(p, stages, overlap, stream);
}

// rkv [3, N, C] and hidden [N, R] of mixed [6, N, C], as rwkv_project: weight [3, C, C], lora_down [R, C].
RWKV_EXPORT int rwkv_plain_inputs(const void* mixed, const void* weight, const void* lora_down, void* rkv, void* hidden, int num_tokens,
                                  int width, int rank_w, int rank_a, int rank_v, int rank_g, int stages, int overlap, void* stream) {
    for (const int rank : {rank_w, rank_a, rank_v, rank_g})
        if (rank < 0 || rank % FEW_TILE) return cudaErrorInvalidValue;
    PlainProducts p{};
    p.products.width = width;
    Products& all = p.products.all;
    all.num_tokens = num_tokens;
    const int64_t C = width, N = num_tokens;
    for (int i = 0; i < 3; i++)
        all.add({static_cast<const __half*>(mixed) + i * N * C, static_cast<const __half*>(weight) + i * C * C, nullptr,
                 static_cast<__half*>(rkv) + i * N * C, width, width, width, width, NONE, false},
                FEW_TILE);
    add_lora_down(all, static_cast<const __half*>(mixed), static_cast<const __half*>(lora_down), static_cast<__half*>(hidden), width,
                  {rank_w, rank_a, rank_v, rank_g}, FEW_TILE);
    return start_plain(p, stages, overlap, stream);
}
