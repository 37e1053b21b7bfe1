// Thread blocks that share a cluster (Hopper and later): their barrier, and places in one another's shared memory. On other
// devices a block is alone: its rank is 0 of 1, and it waits for no other.
//
// The barrier has two halves. An arrival that is `relaxed` says only that the block has come this far: that it runs, or has read
// what it needed. One that is `release` also publishes what its threads wrote before; after their wait, all blocks see it.
// ALIGNED: the lanes of each warp come together, as the instruction then demands; where they may have parted it must be false.
#pragma once

#include "common.cuh"

namespace rwkv {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ int cluster_rank() {
    uint32_t v;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
    return int(v);
}
__device__ __forceinline__ int cluster_size() {
    uint32_t v;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(v));
    return int(v);
}

template <bool ALIGNED = true>
__device__ __forceinline__ void cluster_arrive_relaxed() {
    if constexpr (ALIGNED) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    else asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
template <bool ALIGNED = true>
__device__ __forceinline__ void cluster_arrive_release() {
    if constexpr (ALIGNED) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
template <bool ALIGNED = true>
__device__ __forceinline__ void cluster_wait() {
    if constexpr (ALIGNED) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
// Where p, in this block's shared memory, is in another block: as an address in the cluster's shared memory, and as a pointer.
__device__ __forceinline__ uint32_t remote_address(const void* p, int rank) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(rank));
    return remote;
}
template <class T>
__device__ __forceinline__ T* remote(T* p, int rank) {
    uint64_t q;
    asm("mapa.u64 %0, %1, %2;" : "=l"(q) : "l"(reinterpret_cast<uint64_t>(p)), "r"(rank));
    return reinterpret_cast<T*>(q);
}

#else

__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
template <bool ALIGNED = true>
__device__ __forceinline__ void cluster_arrive_relaxed() {}
template <bool ALIGNED = true>
__device__ __forceinline__ void cluster_arrive_release() {}
template <bool ALIGNED = true>
__device__ __forceinline__ void cluster_wait() {}
template <class T>
__device__ __forceinline__ T* remote(T* p, int) {
    return p;
}

#endif

// All threads of the `size` blocks of a cluster meet, and see what the others wrote before.
__device__ __forceinline__ void cluster_sync(int size) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) {
        cluster_arrive_release();
        cluster_wait();
        return;
    }
#endif
    __syncthreads();
}

// Write `value` to the same place in every block of the cluster; lane i of a warp serves block i.
__device__ __forceinline__ void cluster_store(float2* at, float2 value, int size) {
    const int lane = threadIdx.x % LANES;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) {
        if (lane < size)
            asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote_address(at, lane)), "f"(value.x), "f"(value.y)
                         : "memory");
        return;
    }
#endif
    if (lane == 0) *at = value;
}

}  // namespace rwkv
