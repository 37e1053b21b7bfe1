// How kernels are started: in clusters, and overlapping with the kernel before ("programmatic dependent launch").
#pragma once

#include "common.cuh"

namespace rwkv {

// What is done to a product's sums; squares go up to the largest fp16.
enum Activation : int { NONE = 0, RELU_SQUARE = 1, TANH = 2, SIGMOID = 3 };

// Waits until the kernels before have finished. Every block of every kernel calls this before it touches what they write or
// read; what no kernel writes (weights) may be loaded before, and what was written before the preceding one began (`inputs_ready`).
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The topmost bit alone, which no address has, nor a number that is not negative.
template <class Of>
__device__ __forceinline__ uint32_t topmost(const Of* address) {
    return uint32_t(reinterpret_cast<uint64_t>(address) >> 32) & 0x80000000u;
}
__device__ __forceinline__ uint32_t topmost(int number) { return uint32_t(number) & 0x80000000u; }
#ifndef RWKV_HIP
__device__ __forceinline__ uint32_t topmost(float number) { return __float_as_uint(number) & 0x80000000u; }
#endif
// The same wait, behind which none of these is still to be found: left alone, the compiler finds addresses where they are first used,
// and what follows the wait runs but once and has to be fetched. Addresses, and numbers that are not negative. It always waits.
template <class... Of>
__device__ __forceinline__ void wait_for_previous_knowing(const Of&... found) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t never = (topmost(found) | ...);
    asm volatile(
        "{ .reg .pred go; setp.eq.u32 go, %0, 0;\n"
        "@go griddepcontrol.wait; }" ::"r"(never)
        : "memory");
#endif
}
// Lets the next kernel start, up to its own wait, on multiprocessors that have room.
__device__ __forceinline__ void release_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct Launch {
    dim3 grid, block;
    cudaStream_t stream;
    int overlap = 0;  // whether the kernel may start before the one before it has finished
    int cluster = 1;  // blocks along x that share a cluster
    int shared = 0;   // bytes of dynamic shared memory
};

template <class... Parameters>
cudaError_t start(void (*kernel)(Parameters...), const Launch& how, Parameters... arguments) {
    if (how.grid.x == 0 || how.grid.y == 0) return cudaSuccess;
#ifdef RWKV_HIP
    hipLaunchKernelGGL(kernel, how.grid, how.block, how.shared, how.stream, arguments...);
    return cudaGetLastError();
#else
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {how.grid, how.block, size_t(how.shared), how.stream, attributes, 0};
    if (how.overlap && HAS_CLUSTERS) {  // other kernels do not wait, and would read what the one before has not written yet
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (how.cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs].val.clusterDim.x = how.cluster;
        attributes[config.numAttrs].val.clusterDim.y = 1;
        attributes[config.numAttrs++].val.clusterDim.z = 1;
    }
    return cudaLaunchKernelEx(&config, kernel, arguments...);
#endif
}

}  // namespace rwkv
