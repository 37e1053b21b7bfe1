// The wkv recurrence of whole prompts in matrix form, on tensor cores, 16 tokens at a time, for few heads.
//
// In three kernels: all chunks of all heads are prepared at once, over the whole GPU, into memory that stays in the L2 cache; then
// warps on multiprocessors of their own take the state through them; then all outputs are finished at once. What is left for one
// chunk after another is a few products, whose operands come ahead of time by the copy engine. wkv_chunks.cu, where a block does
// all of a head, reads and writes less: that is better once there are heads enough to keep the GPU busy.
#include "wkv_spread.cuh"

#ifndef RWKV_HIP

#include "../linear/hopper.cuh"

namespace rwkv {
namespace {

static_assert(sizeof(Chunk) == 11136, "CHUNK_BYTES in rwkv_batch/kernels/mix.py");
constexpr int SCANNERS = HEAD / 16;  // blocks that hold a head's state, 16 values each
constexpr int APART = 4;             // warps of a block that prepare or finish chunks apart from each other
constexpr int PREPARING = 3;         // blocks of them that a multiprocessor holds
constexpr int RING = 8;              // chunks on their way to such a block

template <class Do>
__device__ __forceinline__ void with_state(void* state, bool half_state, size_t head, Do with) {
    if (half_state)
        with(static_cast<__half*>(state) + head * HEAD * HEAD);
    else
        with(static_cast<float*>(state) + head * HEAD * HEAD);
}

// A row's chunks begin in memory where those of all rows before it end at the latest: a row that begins at
// token s has as its first number s / 16 + its own. So there is room for tokens / 16 + rows of them.
__device__ __forceinline__ int first_chunk(const int32_t* starts, int row) { return starts[row] / CHUNK + row; }

// Which chunk of which row a number stands for; `place.count` is 0 where it stands for none.
struct Numbered {
    int64_t slot;
    Place place;
    __device__ __forceinline__ Numbered(
            int number, int head, int heads, int rows, const int32_t* starts, const int64_t* slots) {
        const int lane = threadIdx.x % LANES;
        int row = -1;
        for (int from = 0; from < rows; from += LANES) {
            const bool begun = from + lane < rows && first_chunk(starts, from + lane) <= number;
            row += __popc(__ballot_sync(ALL, begun));
        }
        slot = slots[row];
        const int done = (number - first_chunk(starts, row)) * CHUNK, left = starts[row + 1] - starts[row] - done;
        const uint32_t width = heads * HEAD;
        place = {(starts[row] + done) * width + head * HEAD, width, slot < 0 ? 0 : max(0, min(CHUNK, left)), head * HEAD};
    }
};

struct alignas(128) Preparing {
    __half raw[RAW];
    Scratch scratch;
};

__global__ void __launch_bounds__(APART * LANES, PREPARING) wkv_prepare_kernel(
        WkvInputs in, const int32_t* starts, const int64_t* slots, Chunk* chunks, int rows, int heads, int numbers) {
    extern __shared__ __align__(128) unsigned char memory[];
    Preparing& own = reinterpret_cast<Preparing*>(memory)[threadIdx.x / LANES];
    const int work = blockIdx.x * APART + threadIdx.x / LANES, number = work / heads;
    release_next();
    wait_for_previous();
    if (number >= numbers) return;
    const Numbered numbered(number, work % heads, heads, rows, starts, slots);
    if (numbered.place.count) prepare(in, numbered.place, chunks[work], own.scratch, own.raw);
}

__global__ void __launch_bounds__(APART * LANES, 4) wkv_finish_kernel(WkvInputs in, const int32_t* starts, const int64_t* slots,
        const Chunk* chunks, const float* outputs, int rows, int heads, int numbers) {
    const int work = blockIdx.x * APART + threadIdx.x / LANES, number = work / heads;
    release_next();
    wait_for_previous();
    if (number >= numbers) return;
    const Numbered numbered(number, work % heads, heads, rows, starts, slots);
    const Place& place = numbered.place;
    if (place.count)
        finish(in, place, chunks[work], [&](int token, int channel) { return outputs + place.token(token) + channel; });
}

struct Ring {
    Chunk chunks[RING];
    uint64_t full[RING], empty[RING];
};

// A block's first warp takes 16 values of a head's state through a row's chunks; the other has them copied.
__global__ void __launch_bounds__(2 * LANES, 1) wkv_scan_chunks_kernel(void* state, bool half_state,
        const int32_t* starts, const int64_t* slots, const Chunk* chunks, float* outputs, int heads) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    Ring& ring = *reinterpret_cast<Ring*>(memory);
    const int head = blockIdx.x / SCANNERS % heads, row = blockIdx.x / SCANNERS / heads;
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < RING; i++) init_barrier(&ring.full[i], 1), init_barrier(&ring.empty[i], 1);
        publish_barriers();
    }
    __syncthreads();
    release_next();
    wait_for_previous();
    const int64_t slot = slots[row];
    const int first = starts[row], length = starts[row + 1] - first, count = (length + CHUNK - 1) / CHUNK;
    if (slot < 0 || count == 0) return;
    const Chunk* from = chunks + size_t(first_chunk(starts, row)) * heads + head;
    if (warp == 1) {
        if (lane) return;
#pragma unroll 1
        for (int c = 0; c < count; c++) {
            const int at = c % RING;
            if (c >= RING) wait(&ring.empty[at], (c / RING - 1) % 2);
            expect_bytes(&ring.full[at], sizeof(Chunk));
            copy_row(&ring.chunks[at], from + size_t(c) * heads, sizeof(Chunk), &ring.full[at]);
        }
        return;
    }
    const int value = blockIdx.x % SCANNERS * 16;
    const uint32_t width = heads * HEAD;
    Part part;
    with_state(state, half_state, slot * heads + head, [&](auto* own) { part.load(own, value); });
    // Of the lane's first token and first value.
    float* out = outputs + (first + lane % 4 * 2) * width + head * HEAD + value + lane / 4;
    Opening ahead;
    wait(&ring.full[0], 0);
    ahead.load(ring.chunks[0]);
#pragma unroll 1
    for (int c = 0; c < count; c++, out += CHUNK * width) {
        const Opening now = ahead;
        float y[2][4];
        scan(part, ring.chunks[c % RING], now, value, y, [&] {
            if (c + 1 == count) return;
            wait(&ring.full[(c + 1) % RING], (c + 1) / RING % 2);
            ahead.load(ring.chunks[(c + 1) % RING]);
        });
        __syncwarp();
        if (lane == 0) arrive(&ring.empty[c % RING]);
        const int left = length - c * CHUNK - lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (8 * n + e % 2 < left) out[(8 * n + e % 2) * width + e / 2 * 8] = y[n][e];
    }
    with_state(state, half_state, slot * heads + head, [&](auto* own) { part.store(own, value); });
#endif
}

}  // namespace
}  // namespace rwkv

// As rwkv_wkv_chunks, on Hopper GPUs. `room` is for tokens / 16 + rows chunks of each head, aligned to 128 bytes; w_raw is
// overwritten.
RWKV_EXPORT int rwkv_wkv_spread(const __half* r, const __half* k, const __half* v, float* w_raw, const __half* a,
        const __half* v_mix, const __half* gate, __half* v_first, const float* k_k, const float* k_a, const float* r_k,
        const float* norm_weight, const float* norm_bias, void* state, int type, const int32_t* starts, const int64_t* slots,
        __half* out, void* room, int tokens, int rows, int heads, int overlap, cudaStream_t stream) {
    using namespace rwkv;
    if (type != FP16 && type != FP32) return cudaErrorInvalidValue;
    const WkvInputs in = {r, k, v, w_raw, a, v_mix, gate, v_first, k_k, k_a, r_k, norm_weight, norm_bias, out};
    Chunk* const chunks = static_cast<Chunk*>(room);
    const Chunk* const prepared = chunks;
    const float* const outputs = w_raw;
    const int numbers = tokens / CHUNK + rows, blocks = (numbers * heads + APART - 1) / APART;
    const int preparing = sizeof(Preparing) * APART, scanning = sizeof(Ring);
    int error = cudaFuncSetAttribute(wkv_prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, preparing);
    if (!error) error = cudaFuncSetAttribute(wkv_scan_chunks_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, scanning);
    if (error) return error;
    const Launch prepare = {dim3(blocks), dim3(APART * LANES), stream, overlap, 1, preparing};
    error = start(wkv_prepare_kernel, prepare, in, starts, slots, chunks, rows, heads, numbers);
    if (error) return error;
    const Launch scan = {dim3(rows * heads * SCANNERS), dim3(2 * LANES), stream, overlap, 1, scanning};
    error = start(wkv_scan_chunks_kernel, scan, state, type == FP16, starts, slots, prepared, w_raw, heads);
    if (error) return error;
    const Launch finish = {dim3(blocks), dim3(APART * LANES), stream, overlap};
    return start(wkv_finish_kernel, finish, in, starts, slots, prepared, outputs, rows, heads, numbers);
}

#endif
