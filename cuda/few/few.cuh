// What the kernels of decode steps of few rows share.
//
// A launch in such a step does little, so what it costs beside its data counts: the instructions behind its wait above all, which run
// but once and have to be fetched, some cycles each. So these kernels do what they can before they wait, and what follows is short.
#pragma once

#include "../linear/hopper.cuh"
#include "../linear/products.cuh"
#include "../norm.cuh"

namespace rwkv {

constexpr int FEW = 8;           // rows, at most
constexpr int FEW_WARPS = 8;     // that multiply; one more loads
constexpr int FEW_STEP = 32;     // values of k that four lanes read with one 16-byte load each
constexpr int EACH_STEP = FEW_WARPS * FEW_STEP;
constexpr int FEW_PIECE = 1024;  // values of k to a stage
constexpr int STEPS = FEW_PIECE / EACH_STEP;  // of a warp, to a piece
constexpr int FEW_TILE = 8;      // rows of weights, to a tile
constexpr int FEW_BATCH = 4;     // tiles whose sums are added up at once
constexpr int FEW_STAGES = 16;   // at most
constexpr int FEW_THREADS = (FEW_WARPS + 1) * LANES;
constexpr int FEW_SHARED = 200 << 10;  // bytes of dynamic shared memory, at most

// Rows of `bytes`, a multiple of 64, lie so far apart in shared memory that fragments meet no bank twice.
__host__ __device__ constexpr int pitch_of(int bytes) { return bytes | 64; }
__host__ __device__ constexpr int pieces_of(int width) { return (width + FEW_PIECE - 1) / FEW_PIECE; }
__host__ __device__ constexpr int stage_pitch(int width) { return pitch_of((width < FEW_PIECE ? width : FEW_PIECE) * 2); }

// Products of the same K, each done by thread blocks of its own.
struct FewProducts {
    Products all;
    int first_block[MAX_PRODUCTS + 1];
    int width, stages;  // stages: of weights that are on the way at once

    // Deals out so many blocks, so that none has more tiles than need be. Gives how many have some.
    int deal(int blocks, int most_stages) {
        int most = (all.tiles + blocks - 1) / blocks;  // tiles of a block; behind the loop one more
        const auto tiles = [&](int i) { return all.first_tile[i + 1] - all.first_tile[i]; };
        for (int needed = blocks + 1; needed > blocks; most++) {
            needed = 0;
            for (int i = 0; i < MAX_PRODUCTS; i++) {
                first_block[i] = needed;
                needed += (tiles(i) + most - 1) / most;
            }
            first_block[MAX_PRODUCTS] = needed;
        }
        stages = min(min(most_stages, FEW_STAGES), max(2, (most - 1) * pieces_of(width)));
        return first_block[MAX_PRODUCTS];
    }
    __host__ __device__ int ring_bytes() const { return stages * FEW_TILE * stage_pitch(width); }
};

#if __CUDA_ARCH__ >= 900

// 16 bytes of shared memory; what is there when not `wanted` is not to be used. No branch, so that many are under way at once.
__device__ __forceinline__ uint4 load_shared_if(uint32_t from, bool wanted) {
    uint4 v;
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n"
        "@wanted ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "r"(from), "r"(int(wanted)));
    return v;
}
// The same of global memory that kernels write.
__device__ __forceinline__ uint4 load_global_if(const void* from, bool wanted) {
    uint4 v;
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n"
        "@wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(from), "r"(int(wanted)));
    return v;
}

// mma, or nothing when not `wanted`, which all lanes agree on: skipped, not multiplied by zeros, so that no sum's bits can change.
__device__ __forceinline__ void mma_if(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, bool wanted
) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %10, 0;\n"
        "@wanted mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3}; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(int(wanted)));
}

// The order in which a fragment of x is kept: what is multiplied by w.x and w.y, and by w.z and w.w, are the first and the second
// eight rows of one operand. No register has to hold zeros for rows that do not exist.
__device__ __forceinline__ uint4 interleave(const uint4& v) { return make_uint4(v.x, v.z, v.y, v.w); }

// Each row of a product depends on the same row of `a` alone: the second eight of sum[0] and the first of sum[1] are of no use.
__device__ __forceinline__ void multiply_step(float (&sum)[2][4], const uint4& a, const uint4& w, bool wanted) {
    mma_if(sum[0], a.x, a.y, a.z, a.w, w.x, w.y, wanted);
    mma_if(sum[1], a.x, a.y, a.z, a.w, w.z, w.w, wanted);
}
__device__ __forceinline__ float2 sums_of(const float (&sum)[2][4]) {
    return make_float2(sum[0][0] + sum[1][2], sum[0][1] + sum[1][3]);
}

__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, float2 v) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ float2 load_shared(uint32_t from) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}

// The same number, of which the compiler does not know how it came about: it keeps it instead of finding it again each time.
__device__ __forceinline__ uint32_t kept(uint32_t v) { return __shfl_sync(ALL, v, threadIdx.x % LANES); }
// The same of where something lies in shared memory.
template <class Of>
__device__ __forceinline__ Of& kept_place(Of& of) {
    return *static_cast<Of*>(__cvta_shared_to_generic(kept(shared_address(&of))));
}

// A block's part: tiles `first` to `last` - 1 of one product.
struct FewShare {
    int item, first, last;
    __device__ __forceinline__ explicit FewShare(const FewProducts& p) {
        const int block = blockIdx.x;
        item = 0;
#pragma unroll
        for (int i = 1; i < MAX_PRODUCTS; i++) item += block >= p.first_block[i];
        const int from = p.first_block[item], blocks = p.first_block[item + 1] - from;
        const int tiles = p.all.first_tile[item + 1] - p.all.first_tile[item];
        first = (block - from) * tiles / blocks, last = (block - from + 1) * tiles / blocks;
    }
};

struct FewRing {
    uint64_t full[FEW_STAGES], empty[FEW_STAGES];

    __device__ __forceinline__ void init(int stages) {
        for (int s = 0; s < stages; s++) init_barrier(full + s, 1), init_barrier(empty + s, FEW_WARPS);
        publish_barriers();
    }
};
struct FewPlace {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// What the loading warp does: all weights of the block's tiles; `then` once as many are under way as there are stages.
template <class Then>
__device__ __forceinline__ void load_tiles(const FewProducts& p, const FewShare& share, uint8_t* memory, FewRing& ring, Then then) {
    const int lane = threadIdx.x % LANES, pitch = stage_pitch(p.width);
    const __half* from = p.all.item[share.item].weight + (int64_t(share.first) * FEW_TILE + lane % FEW_TILE) * p.width;
    FewPlace at;
    int left = p.stages;
#pragma unroll 1
    for (int tile = share.first; tile < share.last; tile++, from += FEW_TILE * p.width)
#pragma unroll 1
        for (int k = 0; k < p.width; k += FEW_PIECE) {
            if (left-- == 0) then();
            const int bytes = min(FEW_PIECE, p.width - k) * 2;
            wait(ring.empty + at.stage, at.parity ^ 1);
            if (lane == 0) expect_bytes(ring.full + at.stage, bytes * FEW_TILE);
            __syncwarp();
            if (lane < FEW_TILE) copy_row(memory + (at.stage * FEW_TILE + lane) * pitch, from + k, bytes, ring.full + at.stage);
            at.advance(p.stages);
        }
    if (left >= 0) then();
}

// Tanh or sigmoid: long, and not to be repeated for every sum.
static __device__ __noinline__ float curve(float v, int activation) { return activate(activation, v); }

// What becomes of a tile's sums, of which eight warps have a part each. Lanes without a token of their own have the last one's.
struct FewResults {
    __half* to;  // of this lane: of token lane / 4, row lane % 4 * 2 of the block's first tile
    int activation;
    uint8_t* active_mask;  // of all tiles, or null: see rwkv_normed_product
    int first;             // tile of the block
    bool writes;

    __device__ __forceinline__ FewResults(const FewProducts& p, const FewShare& share, uint8_t* mask) {
        const Product& q = p.all.item[share.item];
        const int lane = threadIdx.x % LANES;
        to = static_cast<__half*>(q.out) + lane / 4 * q.out_stride + share.first * FEW_TILE + lane % 4 * 2;
        writes = lane / 4 < p.all.num_tokens;
        activation = q.activation, active_mask = mask, first = share.first;
    }
    // One warp does it for tile `tile` of the block. sums: in shared memory, this lane's of the first warp.
    __device__ __forceinline__ void store(uint32_t sums, int tile) const {
        const int lane = threadIdx.x % LANES;
        float v[2] = {};
#pragma unroll
        for (int w = 0; w < FEW_WARPS; w++) {
            const float2 part = load_shared(sums + w * LANES * sizeof(float2));
            v[0] += part.x, v[1] += part.y;
        }
        if (activation == RELU_SQUARE) v[0] = activate(RELU_SQUARE, v[0]), v[1] = activate(RELU_SQUARE, v[1]);
        if (activation > RELU_SQUARE) v[0] = curve(v[0], activation), v[1] = curve(v[1], activation);
        const __half2 pair = __floats2half2_rn(v[0], v[1]);
        if (writes) *reinterpret_cast<__half2*>(to + tile * FEW_TILE) = pair;
        if (!active_mask) return;
        const uint32_t bits = *reinterpret_cast<const uint32_t*>(&pair);
        const unsigned on = unsigned((bits & 0x7fff) != 0) | unsigned((bits & 0x7fff0000) != 0) << 1;
        const unsigned all = __reduce_or_sync(ALL, on << lane % 4 * 2);
        if (lane == 0) active_mask[first + tile] = uint8_t(all);
    }
};

using FewSums = float2[2][FEW_BATCH][FEW_WARPS][LANES];

// How a lane of the warps that multiply goes through the ring. All it needs is found once, in front of the wait.
struct FewReader {
    uint32_t own, full;  // in shared memory: where this lane's weights of the first stage begin, and the first barrier
    int stage_bytes, stages;
    FewPlace at;

    __device__ __forceinline__ FewReader(const FewProducts& p, const uint8_t* memory, const FewRing& ring) {
        const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, pitch = stage_pitch(p.width);
        own = kept(shared_address(memory) + lane / 4 * pitch + (warp * FEW_STEP + lane % 4 * 8) * 2);
        full = kept(shared_address(ring.full));
        stage_bytes = kept(FEW_TILE * pitch), stages = p.stages;
    }
    // The next piece's rows, once they are here.
    __device__ __forceinline__ uint32_t next() {
        wait(full + at.stage * sizeof(uint64_t), at.parity);
        return own + at.stage * stage_bytes;
    }
    // They have been read.
    __device__ __forceinline__ void done() {
        __syncwarp();
        if (threadIdx.x % LANES == 0) arrive(full + (FEW_STAGES + at.stage) * sizeof(uint64_t));
        at.advance(stages);
    }
};

// Where this lane's sums are in shared memory.
__device__ __forceinline__ uint32_t sums_at(const FewSums& sums) {
    return kept(shared_address(sums) + threadIdx.x % LANES * sizeof(float2));
}
// All tiles of a block, by the warps that multiply. multiply(sum, last): add a tile's products to `sum`; `last`: no tile
// follows. own: see sums_at.
template <class Multiply>
__device__ __forceinline__ void multiply_tiles(int tiles, uint32_t own, const FewResults& results, Multiply multiply) {
    constexpr int OF_WARP = LANES * sizeof(float2), OF_TILE = FEW_WARPS * OF_WARP, OF_BATCH = FEW_BATCH * OF_TILE;
    const int warp = threadIdx.x / LANES;
    __builtin_assume(tiles > 0);  // see `deal`
#pragma unroll 1
    for (int from = 0, flip = 0; from < tiles; from += FEW_BATCH, flip ^= 1) {
        const int count = min(FEW_BATCH, tiles - from);
        __builtin_assume(count > 0);
        const uint32_t batch = own + flip * OF_BATCH;
#pragma unroll 1
        for (int t = 0; t < count; t++) {
            float sum[2][4] = {};  // in two parts, so that a product need not wait for the one before
            multiply(sum, from + t + 1 == tiles);
            store_shared(batch + t * OF_TILE + warp * OF_WARP, sums_of(sum));
        }
        sync_threads(1, FEW_WARPS * LANES);
        const int t = (warp - FEW_BATCH * flip) & (FEW_WARPS - 1);  // of the tiles, which this warp finishes
        if (t < count) results.store(batch + t * OF_TILE, from + t);
    }
}

// Where this lane reads x in shared memory: rows of `width` values, `pitch_of` their bytes apart, fragments as of `interleave`.
__device__ __forceinline__ uint32_t staged_at(const FewProducts& p, const uint8_t* x) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, row = min(lane / 4, p.all.num_tokens - 1);
    return kept(shared_address(x) + row * pitch_of(p.width * 2) + (warp * FEW_STEP + lane % 4 * 8) * 2);
}

// All tiles, with what is multiplied in shared memory.
__device__ __forceinline__ void multiply_staged(
    int width, int tiles, FewReader& reader, uint32_t sums, const FewResults& results, uint32_t x
) {
    const int own = width - threadIdx.x / LANES * FEW_STEP;  // a warp has step s of a piece from k on where own - k > s * EACH_STEP
    uint4 a[STEPS], w[STEPS];
    __builtin_assume(width > 0);
    multiply_tiles(tiles, sums, results, [&](float (&sum)[2][4], bool) {
#pragma unroll 1
        for (int k = 0; k < width; k += FEW_PIECE) {
            const uint32_t rows = reader.next();
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                w[s] = load_shared_if(rows + s * EACH_STEP * 2, own - k > s * EACH_STEP);
                a[s] = load_shared_if(x + (k + s * EACH_STEP) * 2, own - k > s * EACH_STEP);
            }
            reader.done();
#pragma unroll
            for (int s = 0; s < STEPS; s++) multiply_step(sum, a[s], w[s], own - k > s * EACH_STEP);
        }
    });
}

// The same with what is multiplied in registers: `a`, of PIECES pieces, as many as the width has.
template <int PIECES>
__device__ __forceinline__ void multiply_held(
    int width, int tiles, FewReader& reader, uint32_t sums, const FewResults& results, const uint4 (&a)[PIECES * STEPS]
) {
    const int own = width - threadIdx.x / LANES * FEW_STEP;
    const auto has = [&](int c, int s) { return c + 1 < PIECES || own > c * FEW_PIECE + s * EACH_STEP; };  // the last may be short
    uint4 w[STEPS];
    multiply_tiles(tiles, sums, results, [&](float (&sum)[2][4], bool) {
#pragma unroll
        for (int c = 0; c < PIECES; c++) {
            const uint32_t rows = reader.next();
#pragma unroll
            for (int s = 0; s < STEPS; s++) w[s] = load_shared_if(rows + s * EACH_STEP * 2, has(c, s));
            reader.done();
#pragma unroll
            for (int s = 0; s < STEPS; s++) multiply_step(sum, a[c * STEPS + s], w[s], has(c, s));
        }
    });
}
// The same of one piece: a tile's weights are read among the products of the tile before, which alone are too few to wait with.
__device__ __forceinline__ void multiply_held_ahead(
    int width, int tiles, FewReader& reader, uint32_t sums, const FewResults& results, const uint4 (&a)[STEPS]
) {
    const int own = width - threadIdx.x / LANES * FEW_STEP;
    uint4 w[STEPS];
    const uint32_t first = reader.next();
#pragma unroll
    for (int s = 0; s < STEPS; s++) w[s] = load_shared_if(first + s * EACH_STEP * 2, own > s * EACH_STEP);
    reader.done();
    multiply_tiles(tiles, sums, results, [&](float (&sum)[2][4], bool last) {
        const uint32_t rows = last ? 0 : reader.next();
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            multiply_step(sum, a[s], w[s], own > s * EACH_STEP);
            w[s] = load_shared_if(rows + s * EACH_STEP * 2, !last && own > s * EACH_STEP);
        }
        if (!last) reader.done();
    });
}

#endif

}  // namespace rwkv
