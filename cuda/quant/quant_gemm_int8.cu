// Products of int8 weights and fp16 rows: see quant_gemm.cuh.
#include "quant_gemm.cuh"

// 0 where these kernels run on the current device, cudaErrorNotSupported elsewhere. Call once per device.
RWKV_EXPORT int rwkv_quant_gemm_int8_setup() { return rwkv::set_up(rwkv::FOR_HALF_ROWS<rwkv::INT8_VALUES>); }

// out [batch, N, width] fp16, width >= M, a multiple of 8: scales [batch, M] fp32 times the products of weights [batch, M, K], or
// `transposed` [batch, K, M], and x [batch, N, K] fp16; K a multiple of 64. The maps are of bytes, by rwkv_quant_gemm_map:
// w_map with boxes of 128 x 64, x_map of 128 x bn. relu_square: max(., 0)^2 of them.
RWKV_EXPORT int rwkv_quant_gemm_int8(
    const void* w_map, const void* x_map, const void* scales, const void* token_scales, void* out, void* active_mask, int N, int M,
    int width, int K, int batch, int transposed, int relu_square, int bm, int bn, int split, int stages, int clusters, int cast, int overlap,
    void* stream
) {
    using namespace rwkv;
    if (token_scales) return cudaErrorInvalidValue;
    return multiply(
        FOR_HALF_ROWS<INT8_VALUES>, w_map, x_map, scales, token_scales, out, active_mask, N, M, width, K, batch, transposed, relu_square,
        {bm, bn, split, stages, clusters, cast, overlap}, stream
    );
}

// Describe bytes to the copy engine, see describe_tensor.
RWKV_EXPORT int rwkv_quant_gemm_map(
    void* map, const void* tensor, int rank, const void* sizes, const void* strides, const void* box
) {
    return rwkv::describe_tensor(
        static_cast<CUtensorMap*>(map), tensor, rank, static_cast<const uint64_t*>(sizes), static_cast<const uint64_t*>(strides),
        static_cast<const uint32_t*>(box), CU_TENSOR_MAP_DATA_TYPE_UINT8
    );
}
