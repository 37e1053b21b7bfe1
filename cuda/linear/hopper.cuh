// Hopper's barriers in shared memory, copy engine (TMA) and matrix product of four warps (wgmma), a function to an instruction.
//
// The first part also works on later devices, the second wants code for sm_90a. Products read tiles with rows of 128 bytes, in
// the copy engine's 128-byte swizzle: piece i of 16 bytes of row r lies at i ^ r % 8.
#pragma once

#include "../cluster.cuh"
#include "../launch.cuh"

#include <cuda.h>

namespace rwkv {

#if __CUDA_ARCH__ >= 900

constexpr uint64_t READ_ONCE = 0x12F0000000000000, READ_AGAIN = 0x1000000000000000;  // L2 policies evict_first, evict_normal

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}
// What was initialised is seen by the copy engine and the other thread blocks of the cluster.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Arrive at this barrier of a thread block of the cluster; says nothing of what this thread wrote.
__device__ __forceinline__ void arrive_relaxed_at(uint64_t* barrier, int rank) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_address(barrier, rank)) : "memory");
}
// Copy neighbouring bytes of weights, a multiple of 16, into shared memory; they count towards `barrier`.
__device__ __forceinline__ void copy_row(void* to, const void* from, int bytes, uint64_t* barrier, uint64_t policy = READ_ONCE) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)
        ),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
// True in one lane of a warp, always the same one, whose lanes come together. The compiler then knows that one thread is at work:
// for any other condition it makes a loop over the lanes of each instruction that a warp has but once, such as a copy of a box.
__device__ __forceinline__ bool elected() {
    uint32_t v;
    asm volatile("{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.b32 %0, 1, 0, one; }" : "=r"(v));
    return v;
}
// Some whole warps of a thread block meet.
__device__ __forceinline__ void sync_threads(int barrier, int count) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(count) : "memory");
}

#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// What this thread stored in shared memory is seen by copies and products that start after the next barrier.
__device__ __forceinline__ void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copy the box at (c0, c1, c2[, c3]) of a tensor map into shared memory; its bytes count towards `barrier`.
__device__ __forceinline__ void copy_box(
    void* to, const CUtensorMap& map, uint64_t* barrier, uint64_t policy, int c0, int c1, int c2
) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void copy_box(
    void* to, const CUtensorMap& map, uint64_t* barrier, uint64_t policy, int c0, int c1, int c2, int c3
) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
        : "memory");
}

// Copy the box to the same place of the thread blocks of the cluster that `mask` has bits for; its bytes count towards the barrier
// of each that lies where `barrier` does.
__device__ __forceinline__ void copy_box_to_all(
    void* to, const CUtensorMap& map, uint64_t* barrier, uint64_t policy, int c0, int c1, int c2, uint16_t mask
) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "h"(mask), "l"(policy)
        : "memory");
}

// Ask for the box at (c0, c1, c2) of a tensor map to be brought into the L2 cache.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

// Fetch a tensor map before its first use.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copy to the place `to` of a thread block of the cluster; the bytes count towards `barrier` there.
__device__ __forceinline__ void copy_to_block(int rank, const void* to, const void* from, int bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            remote_address(to, rank)
        ),
        "r"(shared_address(from)), "r"(bytes), "r"(remote_address(barrier, rank))
        : "memory");
}

// Store 8x8 matrices of fp16 transposed: lane l holds two neighbouring columns of row l / 4 of each, and gives the address of a
// column: lanes 0 to 7 those of the first, and so on.
__device__ __forceinline__ void store_transposed(void* to, uint32_t a, uint32_t b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(to)), "r"(a), "r"(b)
                 : "memory");
}
__device__ __forceinline__ void store_transposed(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// What wgmma wants to know of an operand in shared memory: address, 128-byte swizzle, 8 rows of 128 bytes after one another.
__device__ __forceinline__ uint64_t describe(uint32_t tile) {
    const uint64_t units = 1024 / 16;
    return (tile & 0x3ffff) / 16 | units << 16 | units << 32 | uint64_t(1) << 62;
}
__device__ __forceinline__ uint64_t describe(const void* tile) { return describe(shared_address(tile)); }

// sums [64, BN] (+)= a [64, 16] b [BN, 16]^T, both in shared memory; TRANSPOSED: a is stored [16, 64].
template <int BN, bool TRANSPOSED>
struct Wgmma;

// The operand lists: %0 to %(BN / 2 - 1) are the sums.
#define S8 "%0,%1,%2,%3"
#define S16 S8 ",%4,%5,%6,%7"
#define S32 S16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define S64 S32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define S80 S64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define S96 S64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define S128 S96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define S160 S128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define S208 S160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103"
#define S256 \
    S208 ",%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define F4(i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define F8(i) F4(i), F4(i + 4)
#define F16(i) F8(i), F8(i + 8)
#define F32(i) F16(i), F16(i + 16)
#define F64(i) F32(i), F32(i + 32)
#define DEFINE_WGMMA(BN, A, B, ADD, TRANS, ...)                                                                        \
    template <bool TRANSPOSED>                                                                                         \
    struct Wgmma<BN, TRANSPOSED> {                                                                                     \
        static __device__ __forceinline__ void multiply(float (&s)[BN / 2], uint64_t a, uint64_t b, int add) {         \
            asm volatile(                                                                                              \
                "{ .reg .pred add; setp.ne.b32 add, %" #ADD ", 0;\n"                                                   \
                "wgmma.mma_async.sync.aligned.m64n" #BN "k16.f32.f16.f16 {" S##BN "}, %" #A ", %" #B                   \
                ", add, 1, 1, %" #TRANS ", 0; }"                                                                       \
                : __VA_ARGS__                                                                                          \
                : "l"(a), "l"(b), "r"(add), "n"(int(TRANSPOSED)));                                                     \
        }                                                                                                              \
    };
DEFINE_WGMMA(8, 4, 5, 6, 7, F4(0))
DEFINE_WGMMA(16, 8, 9, 10, 11, F8(0))
DEFINE_WGMMA(32, 16, 17, 18, 19, F16(0))
DEFINE_WGMMA(64, 32, 33, 34, 35, F32(0))
DEFINE_WGMMA(128, 64, 65, 66, 67, F64(0))
DEFINE_WGMMA(160, 80, 81, 82, 83, F64(0), F16(64))
DEFINE_WGMMA(256, 128, 129, 130, 131, F64(0), F64(64))
#undef DEFINE_WGMMA

// sums [64, BN] (+)= a b^T with a in registers and b [BN, K] in shared memory. Lane 4 g + q of warp w holds of rows 16 w + g and
// 16 w + g + 8 in a[0] and a[1] the K's first half, in a[2] and a[3] its second: of fp16 (K = 16) values 2 q and 2 q + 1 of each
// half, of e4m3 (K = 32) values 4 q to 4 q + 3.
template <int BN>
struct WgmmaHeld;

#define WGMMA_HELD(BN, A0, A1, A2, A3, B, ADD, TYPES, TAIL, ...)                                           \
    asm volatile(                                                                                          \
        "{ .reg .pred add; setp.ne.b32 add, %" #ADD ", 0;\n"                                               \
        "wgmma.mma_async.sync.aligned.m64n" #BN TYPES " {" S##BN "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 \
        "}, %" #B ", add, 1, 1" TAIL "; }"                                                                 \
        : __VA_ARGS__                                                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define DEFINE_WGMMA_HELD(BN, A0, A1, A2, A3, B, ADD, ...)                                                                 \
    template <>                                                                                                            \
    struct WgmmaHeld<BN> {                                                                                                 \
        static __device__ __forceinline__ void multiply_fp16(                                                              \
            float (&s)[BN / 2], const uint32_t (&a)[4], uint64_t b, int add                                                \
        ) {                                                                                                                \
            WGMMA_HELD(BN, A0, A1, A2, A3, B, ADD, "k16.f32.f16.f16", ", 0", __VA_ARGS__);                                 \
        }                                                                                                                  \
        static __device__ __forceinline__ void multiply_e4m3(                                                              \
            float (&s)[BN / 2], const uint32_t (&a)[4], uint64_t b, int add                                                \
        ) {                                                                                                                \
            WGMMA_HELD(BN, A0, A1, A2, A3, B, ADD, "k32.f32.e4m3.e4m3", "", __VA_ARGS__);                                  \
        }                                                                                                                  \
    };
DEFINE_WGMMA_HELD(16, 8, 9, 10, 11, 12, 13, F8(0))
DEFINE_WGMMA_HELD(32, 16, 17, 18, 19, 20, 21, F16(0))
DEFINE_WGMMA_HELD(64, 32, 33, 34, 35, 36, 37, F32(0))
DEFINE_WGMMA_HELD(80, 40, 41, 42, 43, 44, 45, F32(0), F8(32))
DEFINE_WGMMA_HELD(96, 48, 49, 50, 51, 52, 53, F32(0), F16(32))
DEFINE_WGMMA_HELD(128, 64, 65, 66, 67, 68, 69, F64(0))
DEFINE_WGMMA_HELD(160, 80, 81, 82, 83, 84, 85, F64(0), F16(64))
#undef DEFINE_WGMMA_HELD
#undef WGMMA_HELD
#undef S8
#undef S16
#undef S32
#undef S64
#undef S80
#undef S96
#undef S128
#undef S160
#undef S208
#undef S256
#undef F4
#undef F8
#undef F16
#undef F32
#undef F64

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Write a warpgroup's sums [64, BN] of wgmma to shared memory as rows of `to` [BN, PITCH], from column 64 * warpgroup on.
template <int BN, int PITCH>
__device__ __forceinline__ void spread_sums(const float (&sums)[BN / 2], float* to) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    to += lane % 4 * 2 * PITCH + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < BN / 8; j++, to += 8 * PITCH) {
        const float* s = sums + j * 4;
        to[0] = s[0], to[PITCH] = s[1], to[8] = s[2], to[PITCH + 8] = s[3];
    }
}

#endif

// Describe a tensor, of fp16 unless said, to the copy engine: sizes and the box that one copy takes, in values, innermost first; strides in bytes,
// from the second dimension on. What a box has outside the tensor arrives as zeros. Returns a CUDA error number.
inline int describe_tensor(
    CUtensorMap* map, const void* tensor, int rank, const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
    CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16
) {
    static void* const encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
        return function;
    }();
    if (!encode) return cudaErrorNotSupported;
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        map, type, rank, const_cast<void*>(tensor), sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    );
}

}  // namespace rwkv
