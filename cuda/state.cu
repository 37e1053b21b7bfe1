// Overwrites slots of a state array: with one row each of a source, or with zeros.
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
