// Overwrites slots of a state array: with one row each of a source, or with zeros. Copies slots, each to or from a place of its own.
//
// The array is [outer, slots, row] and its source [outer, row], in units of 16 bytes, whatever the numbers are. A block keeps one
// piece of the source in registers and stores it to its share of the slots, so that one slot is spread over the whole GPU and
// many cost what their memory takes to write. The slots come by value with the launch: no copy of them, nothing to wait for.
#include "launch.cuh"

namespace rwkv {

constexpr int FILL_THREADS = 256;
constexpr int FILL_EACH = 2;                     // units of a thread
constexpr int PIECE = FILL_EACH * FILL_THREADS;  // units of a block
constexpr int SHARE = 32;                        // slots of a block
constexpr int LISTED = 960;                      // slots of a launch, whose arguments may be 4 KiB
constexpr int COPIED = 320;                      // slots of a launch that copies, likewise
constexpr int MOST_BLOCKS = 65535;               // along y or z
constexpr int UNIT = sizeof(uint4);

struct SlotList {
    int32_t count, slot[LISTED];
};

__global__ void __launch_bounds__(FILL_THREADS) fill_kernel(
        uint4* array, const uint4* source, const __grid_constant__ SlotList list, int num_slots, int units) {
    const int first = blockIdx.y * PIECE + threadIdx.x;
    const size_t row = blockIdx.z;
    uint4 kept[FILL_EACH];
#pragma unroll
    for (int j = 0; j < FILL_EACH; j++) {
        const int at = first + j * FILL_THREADS;
        kept[j] = source && at < units ? source[row * units + at] : make_uint4(0, 0, 0, 0);
    }
    const int end = min(int(blockIdx.x + 1) * SHARE, list.count);
    for (int i = blockIdx.x * SHARE; i < end; i++) {
        uint4* to = array + (row * num_slots + list.slot[i]) * units;
#pragma unroll
        for (int j = 0; j < FILL_EACH; j++) {
            const int at = first + j * FILL_THREADS;
            if (at < units) to[at] = kept[j];
        }
    }
}

struct CopyList {
    int32_t count, slot[COPIED];
    uint4* copy[COPIED];
};

// Blocks: (slots, pieces of a row, rows). A thread has all its units on their way before it stores the first.
template <bool TO_SLOTS>
__global__ void __launch_bounds__(FILL_THREADS) copy_kernel(
        uint4* array, const __grid_constant__ CopyList list, int num_slots, int units) {
    const int first = blockIdx.y * PIECE + threadIdx.x;
    const size_t row = blockIdx.z;
    uint4* const slot = array + (row * num_slots + list.slot[blockIdx.x]) * units;
    uint4* const copy = list.copy[blockIdx.x] + row * units;
    const uint4* const from = TO_SLOTS ? copy : slot;
    uint4* const to = TO_SLOTS ? slot : copy;
    uint4 kept[FILL_EACH];
#pragma unroll
    for (int j = 0; j < FILL_EACH; j++) {
        const int at = first + j * FILL_THREADS;
        kept[j] = at < units ? from[at] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < FILL_EACH; j++) {
        const int at = first + j * FILL_THREADS;
        if (at < units) to[at] = kept[j];
    }
}

}  // namespace rwkv

// array [outer, num_slots, row_bytes]: each of `slots` [count], in host memory and read before this returns, gets the rows of
// source [outer, row_bytes], or zeros without one. Slot -1 is passed over. Rows are a multiple of 16 bytes.
RWKV_EXPORT int rwkv_fill_slots(void* array, const void* source, const int64_t* slots, int count, int outer, int num_slots,
        int row_bytes, cudaStream_t stream) {
    using namespace rwkv;
    const int units = row_bytes / UNIT, pieces = (units + PIECE - 1) / PIECE;
    if (row_bytes % UNIT || uintptr_t(array) % UNIT || uintptr_t(source) % UNIT) return cudaErrorInvalidValue;
    if (pieces > MOST_BLOCKS || outer > MOST_BLOCKS) return cudaErrorInvalidValue;
    for (int i = 0; i < count; i++)
        if (slots[i] < -1 || slots[i] >= num_slots) return cudaErrorInvalidValue;
    for (int next = 0; next < count;) {
        SlotList list;
        for (list.count = 0; next < count && list.count < LISTED; next++)
            if (slots[next] >= 0) list.slot[list.count++] = int32_t(slots[next]);
        const Launch how = {dim3((list.count + SHARE - 1) / SHARE, pieces, outer), dim3(FILL_THREADS), stream};
        const auto to = static_cast<uint4*>(array);
        const auto from = static_cast<const uint4*>(source);
        const cudaError_t error = start(fill_kernel, how, to, from, list, num_slots, units);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

// What this library was compiled for, see common.cuh.
RWKV_EXPORT int rwkv_built_for() { return rwkv::BUILT_FOR; }

// array [outer, num_slots, row_bytes]: each of `slots` [count] is copied to its own of `copies` [count], contiguous [outer,
// row_bytes], or with `to_slots` from there. Both lists are in host memory and read before this returns; slots are distinct.
RWKV_EXPORT int rwkv_copy_slots(void* array, void* const* copies, const int64_t* slots, int count, int outer, int num_slots,
        int row_bytes, int to_slots, cudaStream_t stream) {
    using namespace rwkv;
    const int units = row_bytes / UNIT, pieces = (units + PIECE - 1) / PIECE;
    if (row_bytes % UNIT || uintptr_t(array) % UNIT || pieces > MOST_BLOCKS || outer > MOST_BLOCKS) return cudaErrorInvalidValue;
    for (int i = 0; i < count; i++)
        if (slots[i] < 0 || slots[i] >= num_slots || !copies[i] || uintptr_t(copies[i]) % UNIT) return cudaErrorInvalidValue;
    for (int next = 0; next < count;) {
        CopyList list;
        for (list.count = 0; next < count && list.count < COPIED; next++, list.count++) {
            list.slot[list.count] = int32_t(slots[next]);
            list.copy[list.count] = static_cast<uint4*>(copies[next]);
        }
        const Launch how = {dim3(list.count, pieces, outer), dim3(FILL_THREADS), stream};
        const auto all = static_cast<uint4*>(array);
        const auto kernel = to_slots ? copy_kernel<true> : copy_kernel<false>;
        const cudaError_t error = start(kernel, how, all, list, num_slots, units);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}
