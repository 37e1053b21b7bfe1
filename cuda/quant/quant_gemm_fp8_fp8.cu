// Products of e4m3 weights and e4m3 rows: see quant_gemm.cuh.
#include "quant_gemm.cuh"

namespace rwkv {
namespace {

template <bool TRANSPOSED, int WGS, int BN>
constexpr Variant of() {
    return variant<E4M3_VALUES, true, TRANSPOSED, WGS, BN>();
}
const Variant VARIANTS[] = {of<false, 2, 64>(), of<false, 2, 80>(), of<false, 2, 96>(), of<false, 2, 128>(), of<false, 2, 160>(),
                            of<true, 2, 64>(),  of<true, 2, 80>(),  of<true, 2, 96>(),  of<true, 2, 128>(),  of<true, 2, 160>()};

}  // namespace
}  // namespace rwkv

RWKV_EXPORT int rwkv_quant_gemm_fp8_fp8_setup() { return rwkv::set_up(rwkv::VARIANTS); }

// See rwkv_quant_gemm_int8; x [batch, N, K] e4m3 in the order of fragments with scales token_scales [batch, N] fp32.
RWKV_EXPORT int rwkv_quant_gemm_fp8_fp8(
    const void* w_map, const void* x_map, const void* scales, const void* token_scales, void* out, void* active_mask, int N, int M,
    int width, int K, int batch, int transposed, int relu_square, int bm, int bn, int split, int stages, int clusters, int cast, int overlap,
    void* stream
) {
    using namespace rwkv;
    if (!token_scales) return cudaErrorInvalidValue;
    return multiply(
        VARIANTS, w_map, x_map, scales, token_scales, out, active_mask, N, M, width, K, batch, transposed, relu_square,
        {bm, bn, split, stages, clusters, cast, overlap}, stream
    );
}
