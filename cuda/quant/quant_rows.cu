// Activations as e4m3 with a scale for each row, and e4m3 matrices turned over: what products of e4m3 take.
#include "../common.cuh"
#include "../launch.cuh"

#include <cuda_fp8.h>

namespace rwkv {
namespace {

constexpr float LARGEST = 448.f;  // of e4m3
constexpr int VALUES = 16;        // that a thread takes at once: a fragment of k
constexpr int MAX_THREADS = 256;
constexpr int MAX_CHUNKS = 4;  // of a thread

// Orders of the values of k in each 64. Of fragment s (16 values), values 2 q + {0, 1, 8, 9} stand at
enum Order : int {
    LIKE_WEIGHTS = 0,  // 16 q + 4 s, as matrices are stored, see rwkv_batch/model/quantized.py
    FRAGMENTS = 1,     // 16 s + 4 q, see quant_gemm.cuh
    NATURAL = 2,       // nothing is moved
};

__device__ __forceinline__ uint32_t four(float a, float b, float c, float d) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

// q [rows, K] = x [rows, K] / scales [rows], a block a row: the scale brings a row's largest value to the largest of e4m3.
// relu_square: of max(x, 0)^2. A NaN stays one. CHUNKS: how many times VALUES a thread takes.
template <int CHUNKS>
__global__ void __launch_bounds__(MAX_THREADS)
    quantise_rows(const __half* x, uint8_t* q, float* scales, int K, int order, int relu_square) {
    __shared__ float largest[MAX_THREADS / LANES];
    release_next();
    wait_for_previous();
    const int lane = threadIdx.x % LANES;
    uint4 in[CHUNKS][2] = {};
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const int at = (chunk * blockDim.x + threadIdx.x) * VALUES;
        if (at >= K) continue;
        const uint4* from = reinterpret_cast<const uint4*>(x + size_t(blockIdx.x) * K + at);
        in[chunk][0] = from[0], in[chunk][1] = from[1];
    }
    __half2 both = __floats2half2_rn(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < CHUNKS * VALUES / 2; i++) {
        const __half2 pair = reinterpret_cast<const __half2*>(in)[i];
        both = __hmax2(both, relu_square ? pair : __habs2(pair));
    }
    float most = fmaxf(__low2float(both), __high2float(both));
    most = lane_max(relu_square ? most * most : most);
    if (lane == 0) largest[threadIdx.x / LANES] = most;
    __syncthreads();
    most = lane_max(lane < blockDim.x / LANES ? largest[lane] : 0.f);
    if (threadIdx.x == 0) scales[blockIdx.x] = most / LARGEST;
    const float factor = most > 0.f ? LARGEST / most : 0.f;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const int at = (chunk * blockDim.x + threadIdx.x) * VALUES;
        float v[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            v[i] = __half2float(reinterpret_cast<const __half*>(in[chunk])[i]);
            if (relu_square) v[i] = v[i] < 0.f ? 0.f : v[i] * v[i];
            v[i] *= factor;
        }
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = order == NATURAL ? four(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3])
                                        : four(v[2 * i], v[2 * i + 1], v[2 * i + 8], v[2 * i + 9]);
        if (order == LIKE_WEIGHTS) {  // four lanes, which have a fragment each, give each other theirs of one quarter
#pragma unroll
            for (int d = 1; d < 4; d *= 2)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (i & d) continue;
                    const bool upper = lane & d;
                    const uint32_t got = __shfl_xor_sync(ALL, upper ? words[i] : words[i | d], d);
                    if (upper) words[i] = got;
                    else words[i | d] = got;
                }
        }
        if (at < K)
            *reinterpret_cast<uint4*>(q + size_t(blockIdx.x) * K + at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// to [columns, rows] = from [rows, columns] of bytes, in tiles of 64 x 64: a thread turns 4 x 4 over.
__global__ void __launch_bounds__(256) turn_over(const uint32_t* from, uint32_t* to, int rows, int columns) {
    __shared__ uint32_t tile[64][17];
    wait_for_previous();
    const int c = threadIdx.x % 16, r = threadIdx.x / 16 * 4;
    const size_t row = blockIdx.y * 64 + r, column = blockIdx.x * 64;
    uint32_t in[4];
#pragma unroll
    for (int i = 0; i < 4; i++) in[i] = from[((row + i) * columns + column) / 4 + c];
    const uint32_t a = __byte_perm(in[0], in[1], 0x5140), b = __byte_perm(in[2], in[3], 0x5140);
    const uint32_t d = __byte_perm(in[0], in[1], 0x7362), e = __byte_perm(in[2], in[3], 0x7362);
    tile[c * 4][r / 4] = __byte_perm(a, b, 0x5410), tile[c * 4 + 1][r / 4] = __byte_perm(a, b, 0x7632);
    tile[c * 4 + 2][r / 4] = __byte_perm(d, e, 0x5410), tile[c * 4 + 3][r / 4] = __byte_perm(d, e, 0x7632);
    __syncthreads();
    release_next();
#pragma unroll
    for (int i = 0; i < 4; i++) to[((column + r + i) * rows + blockIdx.y * 64) / 4 + c] = tile[r + i][c];
}

}  // namespace
}  // namespace rwkv

// q [rows, K] e4m3 and scales [rows] fp32 of x [rows, K] fp16; K a multiple of 64, at most 16,384; order as above.
RWKV_EXPORT int rwkv_quantise_rows(
    const void* x, void* q, void* scales, int rows, int K, int order, int relu_square, int overlap, void* stream
) {
    using namespace rwkv;
    if (K < 64 || K % 64 || K > MAX_THREADS * MAX_CHUNKS * VALUES || order < LIKE_WEIGHTS || order > NATURAL)
        return cudaErrorInvalidValue;
    const int fragments = K / VALUES, chunks = (fragments + MAX_THREADS - 1) / MAX_THREADS;
    const int threads = ((fragments + chunks - 1) / chunks + LANES - 1) / LANES * LANES;
    const Launch how = {dim3(rows), dim3(threads), cudaStream_t(stream), overlap};
    const auto kernel = chunks == 1 ? quantise_rows<1> : chunks == 2 ? quantise_rows<2> : chunks == 3 ? quantise_rows<3> : quantise_rows<4>;
    return start(kernel, how, static_cast<const __half*>(x), static_cast<uint8_t*>(q), static_cast<float*>(scales), K, order,
                 relu_square);
}

// to [columns, rows] = from [rows, columns], bytes; both sizes multiples of 64.
RWKV_EXPORT int rwkv_turn_over(const void* from, void* to, int rows, int columns, int overlap, void* stream) {
    using namespace rwkv;
    if (rows % 64 || columns % 64) return cudaErrorInvalidValue;
    const Launch how = {dim3(columns / 64, rows / 64), dim3(256), cudaStream_t(stream), overlap};
    return start(turn_over, how, static_cast<const uint32_t*>(from), static_cast<uint32_t*>(to), rows, columns);
}
