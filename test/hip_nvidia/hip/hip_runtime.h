// As much of HIP as the kernels use, for nvcc: what runs is a card of NVIDIA, by HIP's names. HIP has such headers of its own, which
// the present toolkits no longer compile.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

using hipError_t = cudaError_t;
using hipStream_t = cudaStream_t;
constexpr hipError_t hipSuccess = cudaSuccess, hipErrorInvalidValue = cudaErrorInvalidValue;
constexpr auto hipFuncAttributeMaxDynamicSharedMemorySize = cudaFuncAttributeMaxDynamicSharedMemorySize;
inline hipError_t hipGetLastError() { return cudaGetLastError(); }
inline hipError_t hipFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute(kernel, attribute, value);
}

template <class... Parameters, class... Arguments>
void hipLaunchKernelGGL(
        void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, hipStream_t stream, Arguments... arguments) {
    kernel<<<grid, block, shared, stream>>>(arguments...);
}

template <class T>
__device__ __forceinline__ T __shfl(T value, int source, int width = 32) {
    return __shfl_sync(0xffffffffu, value, source, width);
}
template <class T>
__device__ __forceinline__ T __shfl_xor(T value, int distance, int width = 32) {
    return __shfl_xor_sync(0xffffffffu, value, distance, width);
}
template <class T>
__device__ __forceinline__ T __shfl_up(T value, int distance, int width = 32) {
    return __shfl_up_sync(0xffffffffu, value, distance, width);
}
__device__ __forceinline__ uint64_t vote_of_all(int vote) { return __ballot_sync(0xffffffffu, vote); }
__device__ __forceinline__ int __lane_id() { return int(threadIdx.x % 32); }
__device__ __forceinline__ void lanes_meet() { __syncwarp(); }

// What hip/compat.h gives CUDA's words for, CUDA has already.
#undef __grid_constant__
#define cudaSuccess success_in_hip
#define cudaErrorInvalidValue invalid_value_in_hip
#define __ballot vote_of_all
#define amdgpu_flat_work_group_size(least, most) launch_bounds(most)
#define __builtin_amdgcn_fence(...)
#define __builtin_amdgcn_wave_barrier() lanes_meet()
