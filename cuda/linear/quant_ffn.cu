// The sparse half of the channel mix with quantised weights: see sparse_ffn.cu.

#include "sparse.cuh"

using namespace rwkv;

// out [N, C] = hidden [N, F] weight [F, C], F a multiple of 4, C of 64.
RWKV_EXPORT int rwkv_quant_sparse_ffn(const void* hidden, const void* values, const void* scales, void* out, int format,
                                      int num_tokens, int units, int width, int overlap, void* stream) {
    return with_format(format, [&](auto chosen) -> int {
        return start_sparse<decltype(chosen)::value>(hidden, values, scales, out, num_tokens, units, width, overlap, stream);
    });
}
