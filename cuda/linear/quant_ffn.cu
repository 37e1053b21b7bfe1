// The sparse half of the channel mix with quantised weights: see sparse_ffn.cu.

#include "masked.cuh"
#include "sparse.cuh"

using namespace rwkv;

// out [N, C] = hidden [N, F] weight [F, C], F a multiple of 4, C of 64.
RWKV_EXPORT int rwkv_quant_sparse_ffn(const void* hidden, const void* values, const void* scales, void* out, int format,
                                      int num_tokens, int units, int width, int overlap, void* stream) {
    return with_format(format, [&](auto chosen) -> int {
        return start_sparse<decltype(chosen)::value>(hidden, values, scales, out, num_tokens, units, width, overlap, stream);
    });
}

// The same on Hopper with codes of 8 or 4 bits, N <= 16, F a multiple of 32, C of 128; `active_mask` as of rwkv_masked_ffn.
RWKV_EXPORT int rwkv_quant_masked_ffn(const void* hidden, const void* active_mask, const void* values, const void* scales, void* out,
                                      int format, int num_tokens, int units, int width, int overlap, void* stream) {
    return with_format(format, [&](auto chosen) -> int {
        constexpr int FORMAT = decltype(chosen)::value;
        if constexpr (upper_bytes(FORMAT, BLOCK) > 0) return cudaErrorNotSupported;
        else
            return (num_tokens <= 8 ? start_masked<FORMAT, 1> : start_masked<FORMAT, 2>)(
                hidden, active_mask, values, scales, out, num_tokens, units, width, overlap, stream);
    });
}
