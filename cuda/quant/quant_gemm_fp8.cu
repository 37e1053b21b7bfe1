// Products of e4m3 weights and fp16 rows, the weights as fp16: see quant_gemm.cuh.
#include "quant_gemm.cuh"

RWKV_EXPORT int rwkv_quant_gemm_fp8_setup() { return rwkv::set_up(rwkv::FOR_HALF_ROWS<rwkv::E4M3_VALUES>); }

// See rwkv_quant_gemm_int8.
RWKV_EXPORT int rwkv_quant_gemm_fp8(
    const void* w_map, const void* x_map, const void* scales, const void* token_scales, void* out, void* active_mask, int N, int M,
    int width, int K, int batch, int transposed, int relu_square, int bm, int bn, int split, int stages, int clusters, int cast, int overlap,
    void* stream
) {
    using namespace rwkv;
    if (token_scales) return cudaErrorInvalidValue;
    return multiply(
        FOR_HALF_ROWS<E4M3_VALUES>, w_map, x_map, scales, token_scales, out, active_mask, N, M, width, K, batch, transposed, relu_square,
        {bm, bn, split, stages, clusters, cast, overlap}, stream
    );
}
