// Lets hipcc compile the CUDA sources: the names they use, in HIP's words.
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
#define cudaFuncSetAttribute hipFuncSetAttribute
constexpr hipFuncAttribute cudaFuncAttributeMaxDynamicSharedMemorySize = hipFuncAttributeMaxDynamicSharedMemorySize;
#define __grid_constant__

// bf16 is the upper half of an fp32; older HIP has no type of its own for it.
struct __nv_bfloat16 {
    uint16_t bits;
};
__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

// A wavefront has 32 or 64 lanes; groups of 32 never diverge from one another where these are called.
#define __shfl_xor_sync(mask, value, distance, width) __shfl_xor(value, distance, width)
#define __shfl_up_sync(mask, value, distance, width) __shfl_up(value, distance, width)
#define __shfl_sync(mask, value, lane, width) __shfl(value, lane, width)
// True when one of the wavefront's lanes is, which may be more than the 32 that ask.
#define __any_sync(mask, predicate) __any(predicate)
__device__ __forceinline__ void __syncwarp() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}
