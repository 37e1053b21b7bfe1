// The sparse half of the channel mix for few rows (Hopper), as sparse_ffn in linear/sparse.cuh: out [N, C] = hidden [N, F] weight [F, C],
// each row reading the rows of weights of its own active units. Here every warp lists its own units and reads their rows, so the warps
// of a block meet but once.
#include "../linear/sparse.cuh"
#include "few.cuh"

namespace rwkv {
namespace {

constexpr int VALUE_WARPS = 16, VALUE_SPLITS = CLUSTER;  // blocks that share the units of some columns

#if __CUDA_ARCH__ >= 900

// No branches, so that many are under way at once: a value of hidden, or 0, and entries of a list in shared memory, or 0.
__device__ __forceinline__ uint32_t load_value_if(const __half* from, bool wanted) {
    uint32_t v;
    asm volatile("{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0; mov.b32 %0, 0; @wanted ld.global.u16 %0, [%1]; }"
                 : "=&r"(v)
                 : "l"(from), "r"(int(wanted)));
    return v;
}
__device__ __forceinline__ void store_entry_if(uint32_t to, uint32_t entry, bool wanted) {
    asm volatile("{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0; @wanted st.shared.u32 [%0], %1; }" ::"r"(to), "r"(entry),
                 "r"(int(wanted))
                 : "memory");
}
__device__ __forceinline__ uint32_t load_entry_if(uint32_t from, bool wanted) {
    uint32_t v;
    asm volatile("{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0; mov.b32 %0, 0; @wanted ld.shared.u32 %0, [%1]; }"
                 : "=&r"(v)
                 : "r"(from), "r"(int(wanted)));
    return v;
}

#endif

// L: lanes to a row of weights, eight columns each.
template <int L>
__global__ __launch_bounds__(VALUE_WARPS* LANES, 2) void sparse_value(const __half* hidden, const __half* weight, __half* out, int rows,
                                                                       int units, int width) {
#if __CUDA_ARCH__ >= 900
    constexpr int CHUNKS = 4;   // of 32 units, that a warp lists at once
    constexpr int AT_ONCE = 8;  // rows of weights on their way
    constexpr int COLUMNS = L * EACH, OWN = COLUMNS / VALUE_SPLITS, GROUPS = LANES / L;
    __shared__ uint32_t lists[VALUE_WARPS][CHUNKS * LANES];  // of units that are on: value, and the number in the upper half
    __shared__ __align__(16) float parts[VALUE_WARPS][COLUMNS];
    __shared__ float gathered[VALUE_SPLITS][OWN];
    __shared__ uint64_t complete;
    release_next();
    if (threadIdx.x == 0) {
        init_barrier(&complete, 1);
        publish_barriers();
        expect_bytes(&complete, COLUMNS * 4);
    }
    cluster_arrive_relaxed();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, group = lane / L;
    const int rank = blockIdx.x % VALUE_SPLITS, row = blockIdx.x / VALUE_SPLITS % rows, column = blockIdx.x / VALUE_SPLITS / rows * COLUMNS;
    const int chunks = units / LANES, part = rank * VALUE_WARPS + warp, of = VALUE_SPLITS * VALUE_WARPS;
    const int begin = part * chunks / of, end = (part + 1) * chunks / of;
    const __half* values = hidden + int64_t(row) * units + begin * LANES + lane;
    const uint8_t* const columns = reinterpret_cast<const uint8_t*>(weight + column + lane % L * EACH);
    const uint32_t list = kept(shared_address(lists[warp]));
    const int to = row * width + column + rank * OWN + threadIdx.x;
    float sum[EACH] = {};
    cluster_wait();  // the others have begun
    wait_for_previous_knowing(values, columns, begin, end, to);
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk += CHUNKS, values += CHUNKS * LANES) {
        uint32_t value[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) value[c] = load_value_if(values + c * LANES, c < end - chunk);
        const uint32_t number = uint32_t(chunk * LANES + lane) << 16, below = (1u << lane) - 1;
        uint32_t until = list;
        __syncwarp();  // the list before has been read
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const bool on = (value[c] & 0x7fff) != 0;
            const unsigned all = __ballot_sync(ALL, on);
            store_entry_if(until + __popc(all & below) * 4, number + (c * LANES << 16) + value[c], on);
            until += __popc(all) * 4;
        }
        __syncwarp();
#pragma unroll 1
        for (uint32_t at = list + group * 4; at < until; at += AT_ONCE * GROUPS * 4) {
            const int left = until - at;
            uint32_t entry[AT_ONCE];
            uint4 w[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const bool there = j * GROUPS * 4 < left;
                entry[j] = load_entry_if(at + j * GROUPS * 4, there);
                w[j] = load_weights_if(reinterpret_cast<const __half*>(columns + uint64_t(entry[j] >> 16) * (2u * width)), there);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                if (j * GROUPS * 4 >= left) break;  // nothing but zeros follows
                const float strength = __half2float(__ushort_as_half(uint16_t(entry[j])));
                const __half2* const pairs = reinterpret_cast<const __half2*>(&w[j]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 pair = __half22float2(pairs[i]);
                    sum[2 * i] = fmaf(strength, pair.x, sum[2 * i]), sum[2 * i + 1] = fmaf(strength, pair.y, sum[2 * i + 1]);
                }
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int d = L; d < LANES; d *= 2)
#pragma unroll
        for (int i = 0; i < EACH; i++) sum[i] += __shfl_xor_sync(ALL, sum[i], d);
    if (group == 0) store8(&parts[warp][lane * EACH], sum);
    __syncthreads();
    if (threadIdx.x < COLUMNS) {
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < VALUE_WARPS; w++) total += parts[w][threadIdx.x];
        send(&gathered[rank][threadIdx.x % OWN], total, &complete, threadIdx.x / OWN);
    }
    if (threadIdx.x < OWN) {
        wait(&complete, 0);
        float total = 0.f;
#pragma unroll
        for (int s = 0; s < VALUE_SPLITS; s++) total += gathered[s][threadIdx.x];
        out[to] = __float2half_rn(total);
    }
#endif
}

template <int L>
int start_value(const void* hidden, const void* weight, void* out, int rows, int units, int width, int overlap, void* stream) {
    const unsigned blocks = width / (L * EACH) * rows * VALUE_SPLITS;
    return start(sparse_value<L>, {blocks, VALUE_WARPS * LANES, cudaStream_t(stream), overlap, VALUE_SPLITS},
                 static_cast<const __half*>(hidden), static_cast<const __half*>(weight), static_cast<__half*>(out), rows, units, width);
}

}  // namespace
}  // namespace rwkv

using namespace rwkv;

// As rwkv_sparse_ffn; F a multiple of 32, C of 64.
RWKV_EXPORT int rwkv_sparse_value(const void* hidden, const void* weight, void* out, int num_tokens, int units, int width, int overlap,
                                  void* stream) {
    if (!device().hopper) return cudaErrorNotSupported;
    if (num_tokens < 1 || num_tokens > FEW || units % LANES || units > 1 << 16 || width % 64) return cudaErrorInvalidValue;
    const auto suits = [&](int columns) { return width % columns == 0 && width / columns * VALUE_SPLITS >= device().processors * 3 / 4; };
    const auto kernel = suits(256) ? start_value<32> : suits(128) ? start_value<16> : start_value<8>;
    return kernel(hidden, weight, out, num_tokens, units, width, overlap, stream);
}
