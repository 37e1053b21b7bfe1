// Lets hipcc compile the CUDA sources: the names they use, in HIP's words.
//
// The sources work in groups of 32 lanes. A wavefront has 32 lanes or 64, then two groups, which may part from one another; the
// lanes of one group never do where they shuffle or vote. `make hip-check` compiles for both; test/test_hip.py runs both on a CPU.
#pragma once
#define RWKV_HIP 1

#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>

#include <cstdint>

#define RWKV_EXPORT extern "C" __attribute__((visibility("default")))

using cudaError_t = hipError_t;
using cudaStream_t = hipStream_t;
constexpr hipError_t cudaSuccess = hipSuccess;
constexpr hipError_t cudaErrorInvalidValue = hipErrorInvalidValue;
#define cudaGetLastError hipGetLastError
#define __grid_constant__

// HIP takes a second number for wavefronts of a SIMD unit, CUDA for blocks of a multiprocessor: only the first means the same.
#undef __launch_bounds__
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))

// bf16 is the upper half of an fp32; older HIP has no type of its own for it.
struct __nv_bfloat16 {
    uint16_t bits;
};
__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

// The least half that is not below x. HIP's own rounds to the nearest, as all its conversions do.
__device__ __forceinline__ __half half_from_above(float x) {
    __half h = __float2half(x);
    uint16_t bits;
    __builtin_memcpy(&bits, &h, sizeof(bits));
    if (__half2float(h) < x) bits = bits & 0x8000 ? bits - 1 : bits + 1;
    __builtin_memcpy(&h, &bits, sizeof(bits));
    return h;
}
#define __float2half_ru half_from_above

// Newer releases of HIP have these names too, with masks of 64 bits. The mask is that of a group: all of its lanes.
#define __shfl_xor_sync(mask, ...) __shfl_xor(__VA_ARGS__)
#define __shfl_up_sync(mask, ...) __shfl_up(__VA_ARGS__)
#define __shfl_sync(mask, ...) __shfl(__VA_ARGS__)

// What the lanes of a wavefront wrote before, they see behind it.
__device__ __forceinline__ void wavefront_fence() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}
#define __syncwarp wavefront_fence
