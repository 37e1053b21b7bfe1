// Kernels that go wrong on a card, to show that the emulated one tells.
#include "../../hip/compat.h"

namespace {

// 0: lanes shuffle at different places. 1: half a group never comes. 2: two groups of 32 reach different barriers, which only
// wavefronts of 32 can. 3: counts on lanes being in step. 4: takes bits of the other group for its own. 5: none.
__global__ void kernel(int mistake, int* out) {
    __shared__ int words[64];
    const int t = threadIdx.x;
    int v = t;
    if (mistake == 0) {
        if (t % 2) v = __shfl_xor_sync(~0u, v, 2, 32);
        else v = __shfl_xor_sync(~0u, v, 4, 32);
    }
    if (mistake == 1 && t % 32 < 16) v = __shfl_xor_sync(~0u, v, 1, 32);
    if (mistake == 2) {
        if (t < 32) __syncthreads();
        else __syncthreads();
    }
    if (mistake == 3 || mistake == 5) {
        words[t] = -1;
        __syncthreads();
        words[t] = t;
        if (mistake == 5) __syncwarp();
        v = words[t ^ 1];
    }
    if (mistake == 4) v = int(__ballot(true) >> 32);
    if (mistake == 5) v = __shfl_sync(~0u, v, 7, 32) + int(__ballot(t % 32 == 3) >> (__lane_id() & 32));
    __syncthreads();
    out[t] = v;
}

}  // namespace

RWKV_EXPORT int make_mistake(int mistake, int* out, hipStream_t stream) {
    for (int t = 0; t < 64; t++) out[t] = -1;
    hipLaunchKernelGGL(kernel, dim3(1), dim3(64), 0, stream, mistake, out);
    return hipGetLastError();
}
