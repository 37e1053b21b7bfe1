// As much of HIP as the kernels use, for a host compiler: a launch runs its blocks one after another on the CPU, the lanes of a
// block as fibers of one thread, see wavefronts.cpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __builtin_amdgcn_fence(...)
#define __builtin_amdgcn_wave_barrier() card::meet(32, card::spot(__builtin_frame_address(0)))

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

enum hipError_t : int { hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorLaunchFailure = 719 };
using hipStream_t = struct Stream*;
enum hipFuncAttribute { hipFuncAttributeMaxDynamicSharedMemorySize };

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

// What wavefronts.cpp does for a kernel.
namespace card {

struct Spot {  // where a lane is: the instruction, and how deep in its stack
    const void* instruction;
    std::ptrdiff_t depth;
    bool operator!=(const Spot& other) const { return instruction != other.instruction || depth != other.depth; }
};
__attribute__((noinline)) Spot spot(const void* frame, const void* instruction = __builtin_return_address(0));
void meet(int width, Spot at);    // of the lanes of each `width` neighbouring ones
void barrier(Spot at);            // of the block
int exchange(int word, int source, int width, Spot at);  // the word of the lane `source` of the same `width`
uint64_t ballot(bool vote, Spot at);
int lane_id();
int wavefront();
hipError_t launch(dim3 grid, dim3 block, void (*run)(void*), void* what);
hipError_t take_error();

}  // namespace card

#define CARD_SPOT card::spot(__builtin_frame_address(0), __builtin_return_address(0))

template <class... Parameters, class... Arguments>
void hipLaunchKernelGGL(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t, hipStream_t, Arguments... arguments) {
    auto lane = [&] { kernel(arguments...); };
    card::launch(grid, block, [](void* what) { (*static_cast<decltype(lane)*>(what))(); }, &lane);
}
inline hipError_t hipGetLastError() { return card::take_error(); }

__attribute__((noinline)) inline void __syncthreads() { card::barrier(CARD_SPOT); }
inline int __lane_id() { return card::lane_id(); }
__attribute__((noinline)) inline uint64_t __ballot(bool vote) { return card::ballot(vote, CARD_SPOT); }

template <class T>
T exchange_as(T value, int source, int width, card::Spot at) {
    static_assert(sizeof(T) == 4);
    int word;
    std::memcpy(&word, &value, 4);
    word = card::exchange(word, source, width, at);
    std::memcpy(&value, &word, 4);
    return value;
}
template <class T>
__attribute__((noinline)) T __shfl(T value, int source, int width = card::wavefront()) {
    return exchange_as(value, source, width, CARD_SPOT);
}
template <class T>
__attribute__((noinline)) T __shfl_xor(T value, int distance, int width = card::wavefront()) {
    return exchange_as(value, (card::lane_id() % width) ^ distance, width, CARD_SPOT);
}
template <class T>
__attribute__((noinline)) T __shfl_up(T value, int distance, int width = card::wavefront()) {
    const int lane = card::lane_id() % width;
    return exchange_as(value, lane < distance ? lane : lane - distance, width, CARD_SPOT);
}

// Lanes take turns at the meetings above alone, so that nothing comes between a read and its write.
template <class T, class V>
T atomicAdd(T* at, V value) {
    const T old = *at;
    *at = old + T(value);
    return old;
}
template <class T, class V>
T atomicOr(T* at, V value) {
    const T old = *at;
    *at = old | T(value);
    return old;
}
template <class T, class V>
T atomicMax(T* at, V value) {
    const T old = *at;
    if (T(value) > old) *at = T(value);
    return old;
}
template <class T, class V>
T atomicMin(T* at, V value) {
    const T old = *at;
    if (T(value) < old) *at = T(value);
    return old;
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}

inline float __uint_as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    shift &= 31;
    return shift ? high << shift | low >> (32 - shift) : high;
}
