// Sums over the ranks of one model, and the ways of ids and logits between rank 0 and the others, inside a captured step.
//
// Few tokens: each rank sends its part to all others and sums what comes, in the order of ranks, so that all have the same bits (a
// one-shot all-reduce). Many: each rank sums a share of the places, reading the others' parts and writing to all of them (two-shot,
// in place). One process drives all devices, which reach each other's memory; no block may wait for one that cannot run, so grids
// have no more blocks than run at once.
#include "exchange.cuh"

namespace rwkv {
namespace {

constexpr int FEW_THREADS = 128, MANY_THREADS = 512;
constexpr int FEW_PIECES = 2048;  // of a sum for which small blocks are taken, so that more multiprocessors send

#ifndef RWKV_HOST
struct Links {
    static __device__ __forceinline__ void store(uint64_t* to, const Packet& p) {
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(p.word[0]), "l"(p.word[1]) : "memory");
    }
    static __device__ __forceinline__ Packet load(const uint64_t* from) {
        Packet p;
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(p.word[0]), "=l"(p.word[1]) : "l"(from) : "memory");
        return p;
    }
    static __device__ __forceinline__ void store_word(uint64_t* to, uint64_t word) {
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
    }
    static __device__ __forceinline__ uint64_t load_word(const uint64_t* from) {
        uint64_t word;
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
        return word;
    }
    static __device__ __forceinline__ void signal(uint32_t* flag, uint32_t epoch) {
        __threadfence_system();  // also what the block's other threads wrote, and the kernels before
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
    }
    static __device__ __forceinline__ uint32_t seen(const uint32_t* flag) {
        uint32_t epoch;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(epoch) : "l"(flag) : "memory");
        return epoch;
    }
    static __device__ __forceinline__ uint64_t now() {
        uint64_t time;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
        return time;
    }
    static __device__ __forceinline__ void give_up(int32_t* trouble, Trouble what, int rank, uint32_t late, uint32_t epoch) {
        trouble[1] = rank, trouble[2] = int32_t(late), trouble[3] = int32_t(epoch);
        __threadfence_system();
        trouble[0] = what;
        __threadfence_system();
        __trap();
    }
};
#endif

struct Parts {
    uint4* of[MAX_RANKS];
};

__device__ __forceinline__ uint32_t as_bits(__half2 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
__device__ __forceinline__ void add_pair(float2& sum, uint32_t bits) {
    const float2 pair = __half22float2(*reinterpret_cast<__half2*>(&bits));
    sum.x += pair.x, sum.y += pair.y;
}
__device__ __forceinline__ uint32_t rounded(float2 sum) { return as_bits(__float22half2_rn(sum)); }

// part [4 * pieces] fp16 = the sum of all ranks' parts. `number` of the sum in this step, `sums` that a step has, an even number.
template <int MOST>
__global__ void __launch_bounds__(MANY_THREADS) sum_few(const __grid_constant__ Ranks ranks, uint2* part, int pieces, int number, int sums) {
    release_next();
    wait_for_previous();
    const uint32_t epoch = *ranks.step * uint32_t(sums) + uint32_t(number);
    const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
    for (int i = first; i < pieces; i += stride) {
        const uint2 own = part[i];
        send_piece<MOST, Links>(ranks, i, {own.x, own.y}, epoch);
    }
    for (int i = first; i < pieces; i += stride) {
        uint32_t words[MOST][2];
        const uint2 own = part[i];
        receive_piece<MOST, Links>(ranks, i, words, epoch);
        float2 low = {0.f, 0.f}, high = {0.f, 0.f};
#pragma unroll
        for (int rank = 0; rank < MOST; rank++) {
            if (rank >= ranks.count) break;
            add_pair(low, rank == ranks.rank ? own.x : words[rank][0]);
            add_pair(high, rank == ranks.rank ? own.y : words[rank][1]);
        }
        part[i] = make_uint2(rounded(low), rounded(high));
    }
}

// The same of 8 * eights values: this rank sums its share of them, in all ranks' parts.
template <int MOST>
__global__ void __launch_bounds__(MANY_THREADS) sum_many(const __grid_constant__ Ranks ranks, const __grid_constant__ Parts parts, int64_t eights, int number, int sums) {
    release_next();
    wait_for_previous();
    const uint32_t epoch = *ranks.step * uint32_t(sums) + uint32_t(number);
    meet<Links>(ranks, 0, blockIdx.x, threadIdx.x, epoch, LARGE_SUM);
    __syncthreads();
    const int64_t end = share_begin(eights, ranks.rank + 1, ranks.count);
    for (int64_t i = share_begin(eights, ranks.rank, ranks.count) + blockIdx.x * blockDim.x + threadIdx.x; i < end;
         i += gridDim.x * blockDim.x) {
        Packet halves[MOST];
#pragma unroll
        for (int rank = 0; rank < MOST; rank++)
            if (rank < ranks.count) halves[rank] = Links::load(reinterpret_cast<const uint64_t*>(parts.of[rank] + i));
        float2 sum[4] = {};
#pragma unroll
        for (int rank = 0; rank < MOST; rank++) {
            if (rank >= ranks.count) break;
#pragma unroll
            for (int j = 0; j < 4; j++) add_pair(sum[j], uint32_t(halves[rank].word[j / 2] >> j % 2 * 32));
        }
        const uint4 result = {rounded(sum[0]), rounded(sum[1]), rounded(sum[2]), rounded(sum[3])};
#pragma unroll
        for (int d = 0; d < MOST; d++) {
            if (d >= ranks.count) break;
            const int to = ranks.rank + d < ranks.count ? ranks.rank + d : ranks.rank + d - ranks.count;
            parts.of[to][i] = result;
        }
    }
    __syncthreads();
    meet<Links>(ranks, 1, blockIdx.x, threadIdx.x, epoch, LARGE_SUM);
}

// Begins a step: out [rows] int64 = rank 0's last_ids[slots], 0 for padding, on every rank. Without rows it only counts the step.
// One block. Behind step `last` comes step 1, so that no epoch is 0, which is what memory holds at the start.
__global__ void __launch_bounds__(1024) begin_step(
        Ranks ranks, const int64_t* last_ids, const int64_t* slots, int64_t* out, int rows, uint32_t last) {
    release_next();
    wait_for_previous();
    const uint32_t before = *ranks.step, step = before < last ? before + 1 : 1;
    __syncthreads();
    if (threadIdx.x == 0) *ranks.step = step;
    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        if (ranks.rank == 0) {
            const int64_t slot = slots[row], id = slot < 0 ? 0 : last_ids[slot];
            for (int to = 1; to < ranks.count; to++) Links::store_word(ranks.ids[to] + row, packed(uint32_t(id), step));
            out[row] = id;
        } else {
            uint64_t word;
            wait_for_all<Links>(ranks, IDS, step, [&] {
                word = Links::load_word(ranks.ids[ranks.rank] + row);
                return uint32_t(!has(word, step));
            });
            out[row] = uint32_t(word);
        }
    }
}

// Rank 0's logits [rows, stride] get this rank's columns, `eights` times eight of them from `column` on; rank 0 waits for all.
__global__ void __launch_bounds__(MANY_THREADS) join_logits(
        Ranks ranks, const uint4* own, int own_stride, uint4* logits, int stride, int column, int eights, int rows) {
    release_next();
    wait_for_previous();
    const uint32_t step = *ranks.step;
    const int64_t count = int64_t(rows) * eights;
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const int row = i / eights, at = i % eights;
        logits[int64_t(row) * stride + column + at] = own[int64_t(row) * own_stride + at];
    }
    __syncthreads();
    const int thread = threadIdx.x;
    if (ranks.rank) {
        if (thread == 0) Links::signal(flag_of(ranks, 0, 2, blockIdx.x, ranks.rank), step);
    } else if (thread > 0 && thread < ranks.count) {
        wait_for_all<Links>(ranks, LOGITS, step, [&] {
            return uint32_t(Links::seen(flag_of(ranks, 0, 2, blockIdx.x, thread)) != step) << thread;
        });
    }
}

#ifndef RWKV_HOST
int blocks_for(int64_t units, int threads) {
    const int64_t blocks = (units + threads - 1) / threads;
    return blocks < MAX_EXCHANGE_BLOCKS ? int(blocks) : MAX_EXCHANGE_BLOCKS;
}

template <int MOST>
int start_sum(const Ranks& ranks, const Parts& parts, int64_t count, int many, int number, int sums, int overlap, void* stream) {
    const auto on = cudaStream_t(stream);
    if (many) {
        const int64_t eights = count / 8, share = eights / ranks.count + 1;
        return start(sum_many<MOST>, {unsigned(blocks_for(share, MANY_THREADS)), MANY_THREADS, on, overlap}, ranks, parts, eights,
                     number, sums);
    }
    const int pieces = int(count / 4), threads = pieces <= FEW_PIECES ? FEW_THREADS : MANY_THREADS;
    return start(sum_few<MOST>, {unsigned(blocks_for(pieces, threads)), unsigned(threads), on, overlap}, ranks,
                 reinterpret_cast<uint2*>(parts.of[ranks.rank]), pieces, number, sums);
}

#endif

}  // namespace
}  // namespace rwkv

#ifndef RWKV_HOST
// Bytes of `Ranks`, which Python describes once more.
RWKV_EXPORT int rwkv_exchange_args_size() { return sizeof(rwkv::Ranks); }

// Loads all kernels on the current device.
RWKV_EXPORT int rwkv_exchange_setup() {
    const void* const kernels[] = {
        reinterpret_cast<const void*>(rwkv::sum_few<2>), reinterpret_cast<const void*>(rwkv::sum_few<4>),
        reinterpret_cast<const void*>(rwkv::sum_few<8>), reinterpret_cast<const void*>(rwkv::sum_many<2>),
        reinterpret_cast<const void*>(rwkv::sum_many<4>), reinterpret_cast<const void*>(rwkv::sum_many<8>),
        reinterpret_cast<const void*>(rwkv::begin_step), reinterpret_cast<const void*>(rwkv::join_logits),
    };
    cudaFuncAttributes attributes;
    for (const void* kernel : kernels)
        if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
    return cudaSuccess;
}

// Lets the current device reach the memory of another one.
RWKV_EXPORT int rwkv_exchange_reach(int other) {
    const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled) return error;
    cudaGetLastError();  // it is no error to us
    return cudaSuccess;
}

// 0 no way from one device to another, 1 through the bus, 2 through links that carry atomic operations: NVLink; or minus an error.
RWKV_EXPORT int rwkv_exchange_link(int from, int to) {
    int access = 0, atomics = 0;
    cudaError_t error = cudaDeviceGetP2PAttribute(&access, cudaDevP2PAttrAccessSupported, from, to);
    if (!error) error = cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, from, to);
    return error ? -int(error) : access ? 1 + (atomics != 0) : 0;
}

// Every rank's part, `count` fp16 values at parts[rank], becomes the sum of all; a multiple of 8. This rank's kernel, on its device.
// many: whether each rank sums a share; else at most 2 * words values. number: of the sum in its step; sums: that a step has, even.
RWKV_EXPORT int rwkv_exchange_sum(const void* ranks, const void* parts, int count, int many, int number, int sums, int overlap,
                                  void* stream) {
    const auto& known = *static_cast<const rwkv::Ranks*>(ranks);
    const auto& all = *static_cast<const rwkv::Parts*>(parts);
    if (count % 8 || sums % 2 || (!many && count / 2 > known.words)) return cudaErrorInvalidValue;
    if (known.count < 2 || known.count > rwkv::MAX_RANKS) return cudaErrorInvalidValue;
    if (known.count == 2) return rwkv::start_sum<2>(known, all, count, many, number, sums, overlap, stream);
    if (known.count <= 4) return rwkv::start_sum<4>(known, all, count, many, number, sums, overlap, stream);
    return rwkv::start_sum<8>(known, all, count, many, number, sums, overlap, stream);
}

// Begins a step of this rank, in which there are so many sums, an even number: see begin_step.
RWKV_EXPORT int rwkv_exchange_begin(const void* ranks, const void* last_ids, const void* slots, void* out, int rows, int sums,
                                    int overlap, void* stream) {
    if (sums < 2 || sums % 2) return cudaErrorInvalidValue;
    const unsigned threads = rows <= 128 ? 128 : 1024;
    return rwkv::start(rwkv::begin_step, {1, threads, cudaStream_t(stream), overlap}, *static_cast<const rwkv::Ranks*>(ranks),
                       static_cast<const int64_t*>(last_ids), static_cast<const int64_t*>(slots), static_cast<int64_t*>(out), rows,
                       rwkv::last_step(sums));
}

// Rank 0's logits [rows, stride] get this rank's: own [rows, own_stride], `columns` of them from `column` on; all multiples of 8.
// most_columns: of any rank.
RWKV_EXPORT int rwkv_exchange_join(const void* ranks, const void* own, int own_stride, void* logits, int stride, int column,
                                   int columns, int most_columns, int rows, int overlap, void* stream) {
    if (own_stride % 8 || stride % 8 || column % 8 || columns % 8 || columns > most_columns) return cudaErrorInvalidValue;
    const unsigned blocks = rwkv::blocks_for(int64_t(rows) * most_columns / 8, rwkv::MANY_THREADS);
    return rwkv::start(rwkv::join_logits, {blocks, rwkv::MANY_THREADS, cudaStream_t(stream), overlap},
                       *static_cast<const rwkv::Ranks*>(ranks), static_cast<const uint4*>(own), own_stride / 8,
                       static_cast<uint4*>(logits), stride / 8, column / 8, columns / 8, rows);
}
#endif
