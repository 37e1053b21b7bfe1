// The sparse half of the channel mix: out [N, C] = hidden [N, F] weight [F, C], where most units of hidden are off (zero) and
// their rows of weights need not be read.
//
//   sparse_ffn         each token reads the rows that are on in it
//   masked_ffn         up to 16 tokens read the rows that are on in any of them, once (Hopper)
//   build_active_mask  tells which those are, where the product that made hidden did not
//
// In both products a token's result depends neither on the other tokens nor on how many there are. fp16 operands, fp32 sums in an
// order that depends on the shapes alone; split sums are put together inside a cluster of blocks, in the order of their ranks.

#include "masked.cuh"
#include "sparse.cuh"

namespace rwkv {
namespace {

// A thread looks at a unit of all tokens.
constexpr int MASK_THREADS = 128;
__global__ void __launch_bounds__(MASK_THREADS)
    build_active_mask(const __half* hidden, uint32_t* active_mask, int num_tokens, int units) {
    const int unit = blockIdx.x * MASK_THREADS + threadIdx.x;
    release_next();
    wait_for_previous();
    bool on = false;
    for (int token = 0; token < num_tokens && unit < units; token++)
        on |= (__half_as_ushort(hidden[int64_t(token) * units + unit]) & 0x7fff) != 0;
    const uint32_t word = __ballot_sync(ALL, on);
    if (threadIdx.x % LANES == 0 && unit < units) active_mask[unit / LANES] = word;
}

}  // namespace
}  // namespace rwkv

using namespace rwkv;

// out [N, C] = hidden [N, F] weight [F, C], F a multiple of 4, C of 64.
RWKV_EXPORT int rwkv_sparse_ffn(const void* hidden, const void* weight, void* out, int num_tokens, int units, int width,
                                int overlap, void* stream) {
    return start_sparse<PLAIN>(hidden, weight, nullptr, out, num_tokens, units, width, overlap, stream);
}

// The same on Hopper, N <= 16, F a multiple of 32, C of 128. active_mask [F / 32] 32 bits: bit i of word w says whether unit
// 32 w + i is on in some token; written by rwkv_gemm or rwkv_build_active_mask.
RWKV_EXPORT int rwkv_masked_ffn(const void* hidden, const void* active_mask, const void* weight, void* out, int num_tokens,
                                int units, int width, int overlap, void* stream) {
    return (num_tokens <= 8 ? start_masked<PLAIN, 1> : start_masked<PLAIN, 2>)(
        hidden, active_mask, weight, nullptr, out, num_tokens, units, width, overlap, stream);
}

// That mask of hidden [N, F], F a multiple of 32.
RWKV_EXPORT int rwkv_build_active_mask(const void* hidden, void* active_mask, int num_tokens, int units, int overlap,
                                       void* stream) {
    if (units % LANES) return cudaErrorInvalidValue;
    const unsigned blocks = (units + MASK_THREADS - 1) / MASK_THREADS;
    return start(build_active_mask, {blocks, MASK_THREADS, cudaStream_t(stream), overlap}, static_cast<const __half*>(hidden),
                 static_cast<uint32_t*>(active_mask), num_tokens, units);
}
