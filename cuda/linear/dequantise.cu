// A quantised matrix as fp16, in its natural order: numbers in fp16 times their scales, rounded once.

#include "quant.cuh"

namespace rwkv {
namespace {

constexpr int THREADS = 256;

__device__ __forceinline__ uint32_t scaled(uint32_t pair, float scale0, float scale1) {
    const float2 v = __half22float2(halves_of(pair));
    return bits_of(__floats2half2_rn(v.x * scale0, v.y * scale1));
}

template <int FORMAT>
__device__ __forceinline__ uint32_t load_upper(const uint8_t* plane, int64_t sixteenth) {  // of 16 values
    if constexpr (FORMAT == FP6) return reinterpret_cast<const uint32_t*>(plane)[sixteenth];
    else if constexpr (FORMAT == FP5) return spread_signs(reinterpret_cast<const uint16_t*>(plane)[sixteenth]);
    else return 0;
}

// A thread has what a lane quarter has of a block.
template <int FORMAT>
__global__ void __launch_bounds__(THREADS)
    dequantise_rows(const uint8_t* values, const void* scales, __half* out, int64_t count, int width) {
    release_next();
    const int64_t at = int64_t(blockIdx.x) * THREADS + threadIdx.x;  // of 16 values
    const bool inside = at < count;
    const int sixteenths = width / 16, quarter = threadIdx.x % 4;
    const int64_t row = inside ? at / sixteenths : 0;
    const int place = inside ? int(at - row * sixteenths) : 0;
    const uint8_t* const from = values + row * row_bytes(FORMAT, width);
    Codes<FORMAT> codes;
    if constexpr (wide_codes(FORMAT)) {
        const uint4 v = *reinterpret_cast<const uint4*>(from + place * 16);
        codes.lower[0] = v.x, codes.lower[1] = v.y, codes.lower[2] = v.z, codes.lower[3] = v.w;
    } else {
        const uint2 v = *reinterpret_cast<const uint2*>(from + place * 8);
        codes.lower[0] = v.x, codes.lower[1] = v.y;
    }
    codes.upper = load_upper<FORMAT>(from + lower_bytes(FORMAT, width), place);
    const float scale = unit<FORMAT>() * (grouped(FORMAT) ? __half2float(static_cast<const __half*>(scales)[row * (width / BLOCK) + place / 4])
                                                          : static_cast<const float*>(scales)[row]);
    uint4 v[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        v[h] = codes.decode(h);
        v[h] = {scaled(v[h].x, scale, scale), scaled(v[h].y, scale, scale), scaled(v[h].z, scale, scale), scaled(v[h].w, scale, scale)};
        v[h] = exchange(v[h], quarter);
    }
    wait_for_previous();  // which may still read what stood there
    if (!inside) return;
    uint4* const to = reinterpret_cast<uint4*>(out + row * width + place / 4 * BLOCK) + quarter;
    to[0] = v[0], to[4] = v[1];
}

// A thread has 16 neighbouring columns.
template <int FORMAT>
__global__ void __launch_bounds__(THREADS)
    dequantise_columns(const uint8_t* values, const void* scales, __half* out, int64_t count, int width) {
    release_next();
    const int64_t at = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= count) return;
    const int sixteenths = width / 16;
    const int64_t row = at / sixteenths;
    const int place = int(at - row * sixteenths);
    const uint8_t* const from = values + row * row_bytes(FORMAT, width);
    uint32_t pairs[8];
    float scale[16];
    if constexpr (wide_codes(FORMAT)) {
        const uint4 v = *reinterpret_cast<const uint4*>(from + place * 16);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint2 four = decode_bytes<FORMAT>(words[i]);
            pairs[2 * i] = four.x, pairs[2 * i + 1] = four.y;
        }
    } else {
        const uint2 v = *reinterpret_cast<const uint2*>(from + place * 8);
        const uint32_t words[2] = {v.x, v.y}, upper = load_upper<FORMAT>(from + lower_bytes(FORMAT, width), place);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 eight = decode_nibbles<FORMAT>(words[i], upper, 4 * i);
            pairs[4 * i] = permute(eight.x, eight.y, 0x5410), pairs[4 * i + 1] = permute(eight.z, eight.w, 0x5410);
            pairs[4 * i + 2] = permute(eight.x, eight.y, 0x7632), pairs[4 * i + 3] = permute(eight.z, eight.w, 0x7632);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        scale[i] = unit<FORMAT>() * (grouped(FORMAT) ? __half2float(static_cast<const __half*>(scales)[row * (width / BLOCK) + place / 4])
                                                     : static_cast<const float*>(scales)[place * 16 + i]);
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = scaled(pairs[i], scale[2 * i], scale[2 * i + 1]);
    wait_for_previous();
    uint4* const to = reinterpret_cast<uint4*>(out + row * width) + place * 2;
    to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]), to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

}  // namespace
}  // namespace rwkv

using namespace rwkv;

// out [rows, width] fp16, width a multiple of 64. `transposed`: each row is an input, stored in the columns' own order.
RWKV_EXPORT int rwkv_dequantise(const void* values, const void* scales, void* out, int format, int rows, int width, int transposed,
                                int overlap, void* stream) {
    if (width % BLOCK) return cudaErrorInvalidValue;
    return with_format(format, [&](auto chosen) -> int {
        constexpr int FORMAT = decltype(chosen)::value;
        const int64_t count = int64_t(rows) * (width / 16);
        const unsigned blocks = (count + THREADS - 1) / THREADS;
        return start(transposed ? dequantise_columns<FORMAT> : dequantise_rows<FORMAT>,
                     {blocks, THREADS, cudaStream_t(stream), overlap}, static_cast<const uint8_t*>(values), scales,
                     static_cast<__half*>(out), count, width);
    });
}
