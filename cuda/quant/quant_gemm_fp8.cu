// Products of e4m3 weights and fp16 rows, the weights as fp16: see quant_gemm.cuh.
#include "quant_gemm.cuh"

namespace rwkv {
namespace {

template <bool TRANSPOSED, int WGS, int BN>
constexpr Variant of() {
    return variant<E4M3_VALUES, false, TRANSPOSED, WGS, BN>();
}
const Variant VARIANTS[] = {of<false, 1, 16>(), of<false, 1, 32>(), of<false, 1, 64>(), of<false, 2, 16>(), of<false, 2, 32>(),
                            of<false, 2, 64>(), of<false, 2, 128>(), of<true, 1, 16>(), of<true, 1, 32>(), of<true, 1, 64>(),
                            of<true, 2, 16>(), of<true, 2, 32>(), of<true, 2, 64>(), of<true, 2, 128>()};

}  // namespace
}  // namespace rwkv

RWKV_EXPORT int rwkv_quant_gemm_fp8_setup() { return rwkv::set_up(rwkv::VARIANTS); }

// See rwkv_quant_gemm_int8.
RWKV_EXPORT int rwkv_quant_gemm_fp8(
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
