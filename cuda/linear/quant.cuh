// Quantised matrices as rwkv_batch/model/quantized.py lays them out, and their way back to fp16 by moving bits.
//
// A matrix [rows, K] has each row's values in blocks of 64, of which lane quarter q (of four neighbouring lanes) has together
// what it needs for four fragments of 16 values of k: 2q, 2q + 1, 2q + 8 and 2q + 9 of each. So nothing has to be moved between
// lanes on the way to the tensor cores. The second matrix of the channel mix, [units, columns], has its columns in their order.
//
// What comes out are the matrix's values but for their scale, a factor of rows or of groups, and `unit`, a power of two. Both are
// put on sums of products, so that no rounding is added.
#pragma once

#ifdef RWKV_HIP
#include "../launch.cuh"

#include <type_traits>
#else
#include "products.cuh"
#endif

namespace rwkv {

enum Format : int { INT8 = 0, FP8 = 1, INT4 = 2, NF4 = 3, FP6 = 4, FP5 = 5 };
constexpr int PLAIN = -1;  // in the place of a format: fp16

constexpr int BLOCK = 64;  // values of k; in formats of groups, those that share a scale

__host__ __device__ constexpr bool grouped(int format) { return format == INT4 || format == NF4; }
__host__ __device__ constexpr bool wide_codes(int format) { return format == INT8 || format == FP8; }  // of 8 bits
// Bytes of so many values in the first plane, which has all bits or the lower four, and in the second, with those above.
__host__ __device__ constexpr int lower_bytes(int format, int values) { return wide_codes(format) ? values : values / 2; }
__host__ __device__ constexpr int upper_bytes(int format, int values) {
    return format == FP6 ? values / 4 : format == FP5 ? values / 8 : 0;
}
__host__ __device__ constexpr int row_bytes(int format, int values) {
    return lower_bytes(format, values) + upper_bytes(format, values);
}

// What decoded numbers are to be multiplied with.
template <int FORMAT>
__device__ __forceinline__ constexpr float unit() {
#if __CUDA_ARCH__ < 890
    if (FORMAT == FP8) return 256.f;
#endif
    return FORMAT == FP6 ? 4096.f : FORMAT == FP5 ? 16384.f : 1.f;
}

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
// (a & mask) | b.
__device__ __forceinline__ uint32_t select_or(uint32_t a, uint32_t mask, uint32_t b) {
#ifdef RWKV_HIP
    return (a & mask) | b;
#else
    uint32_t v;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(v) : "r"(a), "r"(mask), "r"(b));
    return v;
#endif
}
__device__ __forceinline__ uint32_t bits_of(__half2 v) { return *reinterpret_cast<uint32_t*>(&v); }
__device__ __forceinline__ __half2 halves_of(uint32_t v) { return *reinterpret_cast<__half2*>(&v); }

// Four numbers of 8 bits, (0, 1) and (2, 3).
template <int FORMAT>
__device__ __forceinline__ uint2 decode_bytes(uint32_t word) {
    if constexpr (FORMAT == INT8) {
        word ^= 0x80808080;  // from 0 to 255, which as the lower bits of 0x6400 are 1024 and more
        const __half2 zero = halves_of(0x64806480);
        return {bits_of(__hsub2(halves_of(permute(word, 0x64646464, 0x4140)), zero)),
                bits_of(__hsub2(halves_of(permute(word, 0x64646464, 0x4342)), zero))};
    } else {
        uint2 v;
#if __CUDA_ARCH__ >= 890
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
            : "=r"(v.x), "=r"(v.y)
            : "r"(word));
#else
        const uint32_t low = permute(word, 0, 0x1404), high = permute(word, 0, 0x3424);
        v.x = select_or(low, 0x80008000, low >> 1 & 0x3f803f80);
        v.y = select_or(high, 0x80008000, high >> 1 & 0x3f803f80);
#endif
        return v;
    }
}

// Eight numbers of at most 8 bits that lie in a word: (0, 4), (1, 5), (2, 6) and (3, 7). `upper`: the word of the second plane,
// in which `pairs` earlier ones are passed over.
template <int FORMAT>
__device__ __forceinline__ uint4 decode_nibbles(uint32_t word, uint32_t upper, int pairs) {
    static_assert(!wide_codes(FORMAT));
    if constexpr (FORMAT == INT4) {
        // As the lower bits of 0x6400, n is 1024 + n; four bits on, 1024 + 16 n.
        const uint32_t base = 0x64006400, next = word >> 8;
        const __half2 eight = halves_of(0x64086408), sixteenth = halves_of(0x2c002c00), shift = halves_of(0xd480d480);
        return {bits_of(__hsub2(halves_of(select_or(word, 0x000f000f, base)), eight)),
                bits_of(__hfma2(halves_of(select_or(word, 0x00f000f0, base)), sixteenth, shift)),
                bits_of(__hsub2(halves_of(select_or(next, 0x000f000f, base)), eight)),
                bits_of(__hfma2(halves_of(select_or(next, 0x00f000f0, base)), sixteenth, shift))};
    } else if constexpr (FORMAT == NF4) {
        // The levels' lower and upper bytes are looked up four codes at a time, among the levels 0 to 7 and 8 to 15.
        uint32_t found[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t codes = word >> 16 * h, place = codes & 0x7777, side = select_or(codes >> 1, 0x4444, 0x3210);
            found[h][0] = permute(permute(0x52339200, 0x00d4ea8d, place), permute(0x68e02618, 0x00c9800d, place), side);
            found[h][1] = permute(permute(0xb6b8b9bc, 0x00adb1b4, place), permute(0x3533312d, 0x3c393837, place), side);
        }
        const uint32_t a = permute(found[0][0], found[0][1], 0x5140), b = permute(found[0][0], found[0][1], 0x7362);
        const uint32_t c = permute(found[1][0], found[1][1], 0x5140), d = permute(found[1][0], found[1][1], 0x7362);
        return {permute(a, c, 0x5410), permute(a, c, 0x7632), permute(b, d, 0x5410), permute(b, d, 0x7632)};
    } else {
        // Exponent's lower bits and mantissa from the first plane; sign, and of fp6 the upper exponent, from the second.
        constexpr uint32_t ABOVE = FORMAT == FP6 ? 0x90009000 : 0x80008000;
        uint4 v = {word << 8, word << 4, word, word >> 4};
        uint32_t* const pair = &v.x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int turn = pairs + i;
            const uint32_t above = FORMAT == FP6 ? __funnelshift_l(upper, upper, 2 * turn) : upper << turn;
            pair[i] = select_or(pair[i], 0x0f000f00, above & ABOVE);
        }
        return v;
    }
}

// What a lane quarter has of a block of a row.
template <int FORMAT>
struct Codes {
    static constexpr int LOWER = lower_bytes(FORMAT, BLOCK) / 16, UPPER = upper_bytes(FORMAT, BLOCK) / 4;  // words, bytes
    uint32_t lower[LOWER];
    uint32_t upper;  // fp5: its two bytes are the upper ones of two halves

    // Fragments 2 * `half` and the next: of each the values of k 2q, 2q + 1 and 2q + 8, 2q + 9.
    __device__ __forceinline__ uint4 decode(int half) const {
        if constexpr (wide_codes(FORMAT)) {
            const uint2 a = decode_bytes<FORMAT>(lower[2 * half]), b = decode_bytes<FORMAT>(lower[2 * half + 1]);
            return {a.x, a.y, b.x, b.y};
        } else {
            return decode_nibbles<FORMAT>(lower[half], upper, 4 * half);
        }
    }
};

// Two bytes of fp5's second plane as halves' upper ones.
__device__ __forceinline__ uint32_t spread_signs(uint32_t two_bytes) { return permute(two_bytes, 0, 0x1404); }

// Lane i of four neighbouring ones gets word i of each: rows become columns.
__device__ __forceinline__ uint4 exchange(uint4 v, int quarter) {
    const bool odd = quarter & 1, high = quarter & 2;
    const uint32_t a = __shfl_xor_sync(ALL, odd ? v.x : v.y, 1), b = __shfl_xor_sync(ALL, odd ? v.z : v.w, 1);
    if (odd) v.x = a, v.z = b;
    else v.y = a, v.w = b;
    const uint32_t c = __shfl_xor_sync(ALL, high ? v.x : v.z, 2), d = __shfl_xor_sync(ALL, high ? v.y : v.w, 2);
    if (high) v.x = c, v.y = d;
    else v.z = c, v.w = d;
    return v;
}

// Calls `run` with the format as a constant.
template <class Run>
int with_format(int format, const Run& run) {
    switch (format) {
        case INT8: return run(std::integral_constant<int, INT8>());
        case FP8: return run(std::integral_constant<int, FP8>());
        case INT4: return run(std::integral_constant<int, INT4>());
        case NF4: return run(std::integral_constant<int, NF4>());
        case FP6: return run(std::integral_constant<int, FP6>());
        case FP5: return run(std::integral_constant<int, FP5>());
    }
    return cudaErrorInvalidValue;
}

}  // namespace rwkv
