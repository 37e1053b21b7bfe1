// Products of int8 weights and fp16 rows: see quant_gemm.cuh.
#include "quant_gemm.cuh"

namespace rwkv {
namespace {

template <bool TRANSPOSED, int WGS, int BN>
constexpr Variant of() {
    return variant<INT8_VALUES, false, TRANSPOSED, WGS, BN>();
}
const Variant VARIANTS[] = {of<false, 1, 16>(), of<false, 1, 32>(), of<false, 1, 64>(), of<false, 2, 16>(), of<false, 2, 32>(),
                            of<false, 2, 64>(), of<false, 2, 128>(), of<true, 1, 16>(), of<true, 1, 32>(), of<true, 1, 64>(),
                            of<true, 2, 16>(), of<true, 2, 32>(), of<true, 2, 64>(), of<true, 2, 128>()};

}  // namespace
}  // namespace rwkv

// 0 where these kernels run on the current device, cudaErrorNotSupported elsewhere. Call once per device.
RWKV_EXPORT int rwkv_quant_gemm_int8_setup() { return rwkv::set_up(rwkv::VARIANTS); }

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
    Shape p{static_cast<__half*>(out), static_cast<const float*>(scales), nullptr, static_cast<uint32_t*>(active_mask), N, M, width};
    p.batch = batch, p.activation = relu_square ? RELU_SQUARE : NONE;
    return launch(VARIANTS, w_map, x_map, p, K, transposed, {bm, bn, split, stages, clusters, cast, overlap}, stream);
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
