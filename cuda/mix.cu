// What stands between the matrices: embedding, residual sum, layer norm, and the blend of each token with the one before it.
//
// A thread holds eight neighbouring columns of a row, so a warp covers 256. Each warp takes mean and squared deviation of its
// own columns, and every warp then combines those of all warps in the same order: one barrier a row, no cancellation, and the
// same bits however a row is spread over blocks. Blends start from the normalised values as rounded to fp16, which is what
// the shift state keeps, so that a token's result does not depend on where a prompt was cut.
#ifndef RWKV_HIP
#include "linear/hopper.cuh"
#endif
#include "norm.cuh"

namespace rwkv {

constexpr int DECODE_ROWS = 2;     // rows that a block takes at once when there are enough of them
constexpr int MANY_ROWS = 128;     // which those are, of more than MANY_WIDTH columns
constexpr int MANY_WIDTH = 1024;
constexpr int MANY_THREADS = 256;  // of such a block, at most
constexpr int PREFILL_ROWS = 2;    // that a block of a prefill takes at once
constexpr int PREFILL_WARPS = 16;  // that a multiprocessor has room for then

__global__ void __launch_bounds__(MAX_THREADS) embed_kernel(
        const int64_t* ids, const int64_t* slots, const __half* table, float* x, int width) {
    const int64_t* const first = (slots ? slots : ids) + blockIdx.x;
    const __half* const columns = table + threadIdx.x * EACH;
    float* const to = x + size_t(blockIdx.x) * width + threadIdx.x * EACH;
    release_next();
    wait_for_previous_knowing(first, columns, to);
    int64_t id = *first;
    float v[EACH] = {};
    if (slots && id >= 0) id = ids[id];
    if (id >= 0) load8(columns + id * width, v);
    store8(to, v);
}

// Layer norm as in norm.cuh, of R rows that a block, or a cluster of them if SPREAD, takes alone. What does not depend on the rows is
// found in the constructor. The blocks of a cluster send their moments to where they are awaited: a barrier of all threads would
// first wait for everything that they have written.
template <bool SPREAD, int R = 1>
struct RowNorm {
    static constexpr int MOST = MAX_WIDTH / SPAN;  // warps
    struct Shared {
        Moments moments[R];
        uint64_t complete;
    };
    Shared& shared;
    float2* own;           // of this warp, of the first row
    const float2* other;   // of a warp, which this lane combines with those of other lanes; both halves of a warp have all
    float count, columns;  // of own, of other
    int width;
    bool live, sends;
    uint32_t sent_to, complete_at;  // of the block that this lane sends to

    // All threads call this. Those of a cluster meet behind it, in `begin`.
    __device__ __forceinline__ RowNorm(const Place& place, Shared& shared) : shared(shared), width(place.width), live(place.live) {
        const int warp = threadIdx.x / LANES + place.part * place.warps, lane = threadIdx.x % LANES;
        const int warps = place.parts * place.warps;
        const bool counts = lane % MOST < warps;
        own = shared.moments[0].of_warp + warp, other = shared.moments[0].of_warp + lane % MOST;
        count = SPREAD ? SPAN : fminf(SPAN, width - warp * SPAN);
        columns = !counts ? 0.f : SPREAD ? SPAN : fminf(SPAN, width - lane % MOST * SPAN);
        sends = lane < (SPREAD ? place.parts : 1);
#pragma unroll
        for (int r = 0; r < R; r++)
            if (!counts) shared.moments[r].of_warp[lane % MOST] = make_float2(0.f, 0.f);
#if __CUDA_ARCH__ >= 900
        if constexpr (SPREAD) {
            if (threadIdx.x == 0) {
                init_barrier(&shared.complete, 1);
                publish_barriers();
                expect_bytes(&shared.complete, R * warps * sizeof(float2));
            }
            __syncwarp();
            cluster_arrive_relaxed();
            const int rank = min(lane, place.parts - 1);
            sent_to = remote_address(own, rank), complete_at = remote_address(&shared.complete, rank);
        }
#endif
    }
    __device__ __forceinline__ void begin() const {
        if (SPREAD) cluster_wait();  // all blocks have started: their shared memory is there
    }
    // What is worth knowing of it before a wait, beside `columns`.
    __device__ __forceinline__ int places() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        return int(SPREAD ? sent_to | complete_at | shared_address(other) : shared_address(own) | shared_address(other));
#else
        return 0;
#endif
    }
    __device__ __forceinline__ void share(const float (&v)[EACH], int r = 0) const {
        float sum = 0.f, squares = 0.f;
#pragma unroll
        for (int j = 0; j < EACH; j++) sum += v[j];
        const float mean = over<true>(lane_sum(live ? sum : 0.f), count);
#pragma unroll
        for (int j = 0; j < EACH; j++) squares = fmaf(v[j] - mean, v[j] - mean, squares);
        squares = lane_sum(live ? squares : 0.f);
#if __CUDA_ARCH__ >= 900
        if constexpr (SPREAD) {
            if (sends)
                asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                             ::"r"(sent_to + r * int(sizeof(Moments))), "f"(mean), "f"(squares), "r"(complete_at) : "memory");
            return;
        }
#endif
        if (sends) own[r * MOST] = make_float2(mean, squares);
    }
    // Behind it all moments are there.
    __device__ __forceinline__ void meet() const {
#if __CUDA_ARCH__ >= 900
        if constexpr (SPREAD) return wait(&shared.complete, 0);
#endif
        __syncthreads();
    }
    __device__ __forceinline__ Halves normalize(
            const float (&v)[EACH], const float (&weight)[EACH], const float (&bias)[EACH], int r = 0) const {
        const float2 share = other[r * MOST];
        // With 0 added, so that it is no negative zero: norm.cuh sums over all lanes, of which half have none.
        const float mean = over<true>(sum_of_half(fmaf(columns, share.x, 0.f)), width);
        const float squares = sum_of_half(fmaf(columns * (share.x - mean), share.x - mean, share.y));
        const float scale = rsqrt_of_normal(over<true>(squares, width) + LAYER_NORM_EPS);
        Halves out;
#pragma unroll
        for (int j = 0; j < 4; j++)
            out.pair[j] = __floats2half2_rn(fmaf((v[2 * j] - mean) * scale, weight[2 * j], bias[2 * j]),
                fmaf((v[2 * j + 1] - mean) * scale, weight[2 * j + 1], bias[2 * j + 1]));
        return out;
    }

private:
    static __device__ __forceinline__ float sum_of_half(float v) {
#pragma unroll
        for (int d = MOST / 2; d; d /= 2) v += __shfl_xor_sync(ALL, v, d, LANES);
        return v;
    }
};

// Every row is one token of its own slot; a block, or a cluster of them if SPREAD, takes a row. `inputs_ready`: the kernel before
// does not write shift or slots, nor does one that may still run beside it, so they are read before it has ended.
template <int K, bool SPREAD>
__global__ void __launch_bounds__(MAX_THREADS) decode_kernel(
        float* x, const __half* y, const float* weight, const float* bias, const float* mix, __half* shift, const int64_t* slots,
        __half* out, int rows, int width, bool inputs_ready) {
    __shared__ typename RowNorm<SPREAD>::Shared shared;
    const Place place(width, SPREAD ? gridDim.x : 1, SPREAD ? blockIdx.x : 0);
    const RowNorm<SPREAD> norm(place, shared);
    const int row = blockIdx.y, column = place.live ? place.column : 0;  // all threads read, so that none branches
    const size_t at = size_t(row) * width + column;
    float scale[EACH], offset[EACH], ratios[K][EACH], v[EACH];
    load8_now(weight + column, scale), load8_now(bias + column, offset);
#pragma unroll
    for (int k = 0; k < K; k++) load8_now(mix + k * width + column, ratios[k]);
    if (!inputs_ready) {
        release_next();
        wait_for_previous();
    }
    const int64_t slot = slots[row];
    __half* const shift_at = shift + (slot < 0 ? 0 : slot) * width + column;
    Halves previous = zero_halves();
    if (slot >= 0) previous = load_halves_at_once(shift_at);
    float* const x_at = x + at;
    const __half* const y_at = y ? y + at : reinterpret_cast<const __half*>(x_at);
    __half* const out_at = out + at;
    // The residual stream was written long ago; asked for after the wait, it would come behind the next product's weights.
    prefetch(x_at);
    release_next();
    norm.begin();
    wait_for_previous_knowing(x_at, y_at, shift_at, out_at, norm.places(), norm.columns);
    load8(x_at, v);
    const Halves added = load_halves_at_once(y_at);
    if (y) add(v, added);
    norm.share(v);
    if (y && place.live) store8(x_at, v);
    norm.meet();
    const Halves normed = norm.normalize(v, scale, offset);
    if (!place.live) return;
    if (slot >= 0) store_halves_at_once(shift_at, normed);
#pragma unroll
    for (int k = 0; k < K; k++) store_halves_at_once(out_at + size_t(k) * rows * width, lerp(normed, previous, ratios[k]));
}

// The same for many rows, R to a block: everything is asked for before anything is stored, and the blends' proportions, which
// all rows share, one plane ahead.
template <int K, int R, bool SPREAD>
__global__ void __launch_bounds__(MANY_THREADS, 3) decode_many_kernel(
        float* x, const __half* y, const float* weight, const float* bias, const float* mix, __half* shift, const int64_t* slots,
        __half* out, int rows, int width, bool inputs_ready) {
    __shared__ typename RowNorm<SPREAD, R>::Shared shared;
    const Place place(width, SPREAD ? gridDim.x : 1, SPREAD ? blockIdx.x : 0);
    const RowNorm<SPREAD, R> norm(place, shared);
    const int first = blockIdx.y * R, column = place.live ? place.column : 0;  // all threads read, so that none branches
    float scale[EACH], offset[EACH], ratio[2][EACH], v[R][EACH];
    load8_now(weight + column, scale), load8_now(bias + column, offset), load8_now(mix + column, ratio[0]);
    if (!inputs_ready) {
        release_next();
        wait_for_previous();
    }
    int64_t slot[R];
    size_t at[R];
    Halves previous[R], added[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int row = min(first + r, rows - 1);
        slot[r] = first + r < rows ? slots[row] : -1, at[r] = size_t(row) * width + column;
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        previous[r] = zero_halves();
        if (slot[r] >= 0) previous[r] = load_halves_at_once(shift + slot[r] * width + column);
    }
    release_next();
    norm.begin();
    wait_for_previous();
#pragma unroll
    for (int r = 0; r < R; r++) load8(x + at[r], v[r]);
#pragma unroll
    for (int r = 0; r < R; r++) added[r] = load_halves_at_once(y ? y + at[r] : reinterpret_cast<const __half*>(x + at[r]));
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (y) add(v[r], added[r]);
        norm.share(v[r], r);
    }
    if (y && place.live)
#pragma unroll
        for (int r = 0; r < R; r++)
            if (first + r < rows) store8(x + at[r], v[r]);
    norm.meet();
    Halves normed[R];
#pragma unroll
    for (int r = 0; r < R; r++) normed[r] = norm.normalize(v[r], scale, offset, r);
    if (!place.live) return;
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (k + 1 < K) load8_now(mix + (k + 1) * width + column, ratio[(k + 1) & 1]);
#pragma unroll
        for (int r = 0; r < R; r++)
            if (first + r < rows)
                store_halves_at_once(out + size_t(k) * rows * width + at[r], lerp(normed[r], previous[r], ratio[k & 1]));
    }
#pragma unroll
    for (int r = 0; r < R; r++)
        if (slot[r] >= 0) store_halves_at_once(shift + slot[r] * width + column, normed[r]);
}

// What a warp takes next of x and y, its own columns of R tokens: copied to shared memory while it works on those before, and x
// in another order than lanes hold it, so that each access asks for whole sectors. HIP has no such copies and reads late.
template <int R>
struct Coming {
    static constexpr int CHUNKS = 3 * LANES;  // of 16 bytes: two a lane of x, one of y
    static constexpr int BYTES_OF_WARP = R * CHUNKS * 16;
    const float* x;
    const __half* y;
    uint4* memory;
    int lane, width;
    bool asks[3];  // for which of its chunks this lane asks

    __device__ __forceinline__ Coming(const float* x, const __half* y, int begin, uint4* memory, const Place& place)
        : x(x), y(y), memory(memory), lane(threadIdx.x % LANES), width(place.width) {
        const int first_column = place.column - lane * EACH, end_column = (place.part + 1) * (width / place.parts);
        asks[0] = first_column + lane * 4 < end_column;
        asks[1] = first_column + (LANES + lane) * 4 < end_column;
        asks[2] = y && place.live;
        this->x += size_t(begin) * width + first_column + lane * 4;
        if (y) this->y += size_t(begin) * width + place.column;
        this->memory += threadIdx.x / LANES * R * CHUNKS;
    }

    // Otherwise what eight lanes read at once would lie in the same banks twice.
    __device__ __forceinline__ static int swizzled(int chunk) { return chunk ^ (chunk / 8 & 1); }

    // The next R tokens, of which `left` are there.
    __device__ __forceinline__ void ask(int left) {
#ifndef RWKV_HIP
        __syncwarp();  // all lanes have taken what lies there
#pragma unroll
        for (int r = 0; r < R; r++)
            if (r < left) {
                uint4* const to = memory + r * CHUNKS;
                if (asks[0]) copy(to + swizzled(lane), x + r * width);
                if (asks[1]) copy(to + LANES + swizzled(lane), x + r * width + LANES * 4);
                if (asks[2]) copy(to + 2 * LANES + lane, y + r * width);
            }
        asm volatile("cp.async.commit_group;" ::: "memory");
        x += R * width;
        if (y) y += R * width;
#endif
    }
    __device__ __forceinline__ void wait() const {
#ifndef RWKV_HIP
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncwarp();
#endif
    }
    // Token number r of those asked for, which is at `from`; only lanes with columns call these.
    __device__ __forceinline__ void take(int r, const float* from, float (&v)[EACH]) const {
#ifdef RWKV_HIP
        load8(from, v);
#else
        const auto* here = reinterpret_cast<const float4*>(memory + r * CHUNKS);
        const float4 a = here[swizzled(2 * lane)], b = here[swizzled(2 * lane + 1)];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
#endif
    }
    __device__ __forceinline__ Halves take(int r, const __half* from) const {
#ifdef RWKV_HIP
        return load_halves_at_once(from);
#else
        return load_halves_at_once(reinterpret_cast<const __half*>(memory + r * CHUNKS + 2 * LANES + lane));
#endif
    }

#ifndef RWKV_HIP
    __device__ __forceinline__ static void copy(void* to, const void* from) {
        const uint32_t address = uint32_t(__cvta_generic_to_shared(to));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    }
#endif
};

#ifndef RWKV_HIP
extern __shared__ uint4 coming_tokens[];
#else
constexpr uint4* coming_tokens = nullptr;
#endif

// Packed rows of any lengths; a block takes `run` tokens one after another, R at a time. The first token of a run is left to
// edge_kernel unless it begins a row: its predecessor belongs to another block. previous_slot: for the first token of a row
// the slot whose shift state comes before it, or -2 for none; -1 for the others.
template <int K, int R, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) prefill_kernel(
        float* x, const __half* y, const float* weight, const float* bias, const float* mix, const __half* shift,
        const int32_t* previous_slot, __half* normed_rows, __half* out, int tokens, int width, int run) {
    __shared__ Moments moments[2][R];
    const Place place(width, gridDim.x, blockIdx.x);
    if (place.parts > 1) cluster_arrive_relaxed();
    const int begin = blockIdx.y * run, end = min(begin + run, tokens);
    Coming<R> coming(x, y, begin, coming_tokens, place);
    float scale[EACH] = {}, offset[EACH] = {}, ratio[2][EACH] = {};
    if (place.live) {
        load8_now(weight + place.column, scale), load8_now(bias + place.column, offset);
        if (K == 1) load8_now(mix + place.column, ratio[0]);
    }
    release_next();
    wait_for_previous();
    coming.ask(end - begin);
    Halves carried = zero_halves();
    if (place.parts > 1) cluster_wait();  // all blocks have started: their shared memory is there
    for (int first = begin, turn = 0; first < end; first += R, turn ^= 1) {
        const size_t at = size_t(first) * width + place.column;
        float v[R][EACH] = {};
        Halves added[R], kept[R], normed[R];
        int slot[R + 1];
#pragma unroll
        for (int r = 0; r <= R; r++) slot[r] = first + r < tokens ? previous_slot[first + r] : -2;
        coming.wait();
#pragma unroll
        for (int r = 0; r < R; r++) {
            added[r] = zero_halves();
            if (!place.live || first + r >= end) continue;
            coming.take(r, x + at + r * width, v[r]);
            if (y) added[r] = coming.take(r, y + at + r * width);
        }
        coming.ask(end - first - R);
#pragma unroll
        for (int r = 0; r < R; r++) {
            kept[r] = zero_halves();
            if (place.live && slot[r] >= 0 && first + r < end)
                kept[r] = load_halves_at_once(shift + size_t(slot[r]) * width + place.column);
        }
        if (y)
#pragma unroll
            for (int r = 0; r < R; r++) {
                add(v[r], added[r]);
                if (first + r < end) store8_in_pairs(x + at + r * width, v[r], place.live);
            }
        if (K > 1 && place.live) load8_now(mix + place.column, ratio[0]);
        share_moments<true>(v, place, moments[turn]);
        normalize_by<true>(v, scale, offset, place, moments[turn], normed);
        if (!place.live) continue;
        float from[R][EACH], way[R][EACH];  // as `lerp` goes, once for all planes
        bool blends[R];
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int token = first + r;
            if (slot[r] == -1) kept[r] = r ? normed[r ? r - 1 : 0] : carried;
            blends[r] = token < end && (token > begin || slot[r] != -1);
            if (token < end && (token == begin || token == end - 1 || slot[r + 1] != -1))
                store_halves_at_once(normed_rows + at + r * width, normed[r]);
#pragma unroll
            for (int j = 0; j < EACH; j += 2) {
                const float2 a = __half22float2(normed[r].pair[j / 2]), b = __half22float2(kept[r].pair[j / 2]);
                from[r][j] = a.x, from[r][j + 1] = a.y, way[r][j] = b.x - a.x, way[r][j + 1] = b.y - a.y;
            }
        }
        carried = normed[R - 1];
        __half* to = out + at;
#pragma unroll
        for (int k = 0; k < K; k++, to += size_t(tokens) * width) {
            if (k + 1 < K) load8_now(mix + (k + 1) * width + place.column, ratio[(k + 1) & 1]);
#pragma unroll
            for (int r = 0; r < R; r++) {
                Halves blend;
#pragma unroll
                for (int j = 0; j < EACH; j += 2)
                    blend.pair[j / 2] = __floats2half2_rn(fmaf(ratio[k & 1][j], way[r][j], from[r][j]),
                        fmaf(ratio[k & 1][j + 1], way[r][j + 1], from[r][j + 1]));
                if (!blends[r]) continue;
                if (K > 1)
                    store_passing(to + r * width, blend);
                else
                    store_halves_at_once(to + r * width, blend);
            }
        }
    }
}

// What prefill_kernel had to leave: the blends across runs (one block each), and each row's last token as its slot's shift state
// (one block each), which no block of this kernel reads.
template <int K>
__global__ void __launch_bounds__(MAX_THREADS, 3) edge_kernel(
        const float* mix, const int32_t* previous_slot, const int32_t* last_index, const int64_t* slots, const __half* normed_rows,
        __half* shift, __half* out, int tokens, int width, int run, int runs) {
    const int column = threadIdx.x * EACH;
    release_next();
    if (int(blockIdx.x) >= runs) {
        wait_for_previous();
        const int row = blockIdx.x - runs;
        const int64_t slot = slots[row];
        const Halves last = load_halves_at_once(normed_rows + size_t(last_index[row]) * width + column);
        if (slot >= 0) store_halves_at_once(shift + slot * width + column, last);
        return;
    }
    const int token = blockIdx.x * run;
    float ratio[2][EACH];
    load8_now(mix + column, ratio[0]);
    wait_for_previous();
    // All at once; a run that begins a row needs nothing of it.
    const __half* at = normed_rows + size_t(token) * width + column;
    const int slot = previous_slot[token];
    const Halves normed = load_halves_at_once(at), previous = load_halves_at_once(token ? at - width : at);
    if (slot != -1) return;
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (k + 1 < K) load8_now(mix + (k + 1) * width + column, ratio[(k + 1) & 1]);
        store_halves_at_once(out + (size_t(k) * tokens + token) * width + column, lerp(normed, previous, ratio[k & 1]));
    }
}

__global__ void __launch_bounds__(MAX_THREADS) add_norm_kernel(
        const float* x, const __half* y, const int64_t* index, const float* weight, const float* bias, __half* out, int width) {
    __shared__ RowNorm<false>::Shared shared;
    const Place place(width, 1, 0);
    const RowNorm<false> norm(place, shared);
    const int column = place.live ? place.column : 0;
    const size_t at = size_t(blockIdx.x) * width + column;
    const float* x_at = x + at;
    const __half* y_at = y ? y + at : reinterpret_cast<const __half*>(x_at);
    __half* const out_at = out + at;
    float scale[EACH], offset[EACH], v[EACH];
    load8_now(weight + column, scale), load8_now(bias + column, offset);
    release_next();
    wait_for_previous_knowing(x_at, y_at, out_at, norm.places(), norm.columns);
    if (index) {
        const size_t at = size_t(index[blockIdx.x]) * width + column;
        x_at = x + at, y_at = y ? y + at : reinterpret_cast<const __half*>(x_at);
    }
    load8(x_at, v);
    const Halves added = load_halves_at_once(y_at);
    if (y) add(v, added);
    norm.share(v);
    norm.meet();
    const Halves normed = norm.normalize(v, scale, offset);
    if (place.live) store_halves_at_once(out_at, normed);
}

static bool fits(int width) { return width > 0 && width % 64 == 0 && width <= MAX_WIDTH; }
// Blocks that share a row: one where they could not tell each other of their parts. No result depends on it.
static int together(int parts) { return HAS_CLUSTERS ? parts : 1; }
static bool splits(int width, int parts) { return parts == 1 || (parts > 1 && parts <= 8 && width % (parts * SPAN) == 0); }
// Threads for `columns` columns, in whole warps.
static int threads(int columns) { return (columns / EACH + LANES - 1) / LANES * LANES; }

template <int K>
static cudaError_t decode(float* x, const __half* y, const float* weight, const float* bias, const float* mix, __half* shift,
        const int64_t* slots, __half* out, int rows, int width, int parts, bool inputs_ready, int overlap, cudaStream_t stream) {
    const Launch how = {dim3(parts, rows), dim3(threads(width / parts)), stream, overlap, parts};
    if (rows < MANY_ROWS || width <= MANY_WIDTH || how.block.x > MANY_THREADS) {
        const auto kernel = parts > 1 ? decode_kernel<K, HAS_CLUSTERS> : decode_kernel<K, false>;
        return start(kernel, how, x, y, weight, bias, mix, shift, slots, out, rows, width, inputs_ready);
    }
    Launch many = how;
    many.grid.y = (rows + DECODE_ROWS - 1) / DECODE_ROWS;
    const auto kernel = parts > 1 ? decode_many_kernel<K, DECODE_ROWS, HAS_CLUSTERS> : decode_many_kernel<K, DECODE_ROWS, false>;
    return start(kernel, many, x, y, weight, bias, mix, shift, slots, out, rows, width, inputs_ready);
}

// THREADS: of a block, at most; how many registers each has depends on it.
template <int K, int THREADS>
static cudaError_t prefill_runs(Launch how, float* x, const __half* y, const float* weight, const float* bias, const float* mix,
        const __half* shift, const int32_t* previous_slot, __half* normed, __half* out, int tokens, int width, int run) {
    constexpr int R = PREFILL_ROWS;
    const auto kernel = prefill_kernel<K, R, THREADS, PREFILL_WARPS * LANES / THREADS>;
#ifndef RWKV_HIP
    constexpr int MOST = Coming<R>::BYTES_OF_WARP * (THREADS / LANES);
    static const cudaError_t prepared = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST);
    if (prepared != cudaSuccess) return prepared;
    how.shared = Coming<R>::BYTES_OF_WARP * (how.block.x / LANES);
#endif
    return start(kernel, how, x, y, weight, bias, mix, shift, previous_slot, normed, out, tokens, width, run);
}

template <int K>
static cudaError_t prefill(float* x, const __half* y, const float* weight, const float* bias, const float* mix, __half* shift,
        const int32_t* previous_slot, const int32_t* last_index, const int64_t* slots, __half* normed, __half* out, int tokens,
        int rows, int width, int run, int parts, int overlap, cudaStream_t stream) {
    const int runs = (tokens + run - 1) / run;
    const Launch main = {dim3(parts, runs), dim3(threads(width / parts)), stream, overlap, parts};
    auto run_tokens = prefill_runs<K, 128>;
    if (main.block.x > 128) run_tokens = prefill_runs<K, 256>;
    if (main.block.x > 256) run_tokens = prefill_runs<K, 384>;
    if (main.block.x > 384) run_tokens = prefill_runs<K, 512>;
    const cudaError_t error = run_tokens(main, x, y, weight, bias, mix, shift, previous_slot, normed, out, tokens, width, run);
    if (error != cudaSuccess) return error;
    const Launch edges = {dim3(runs + rows), dim3(width / EACH), stream, overlap};
    const __half* read = normed;
    return start(edge_kernel<K>, edges, mix, previous_slot, last_index, slots, read, shift, out, tokens, width, run, runs);
}

}  // namespace rwkv

using rwkv::start;

// x [rows, width] = rows of the table, by ids[row], or, with slots, by ids[slots[row]], where a slot of -1 gives zeros.
RWKV_EXPORT int rwkv_embed(const int64_t* ids, const int64_t* slots, const __half* table, float* x, int rows, int width,
        int overlap, cudaStream_t stream) {
    if (!rwkv::fits(width)) return cudaErrorInvalidValue;
    const rwkv::Launch how = {dim3(rows), dim3(width / rwkv::EACH), stream, overlap};
    return start(rwkv::embed_kernel, how, ids, slots, table, x, width);
}

// planes: 6 or 1; RWKV-6: 3 or 2. parts: blocks that share a row, each a multiple of 256 columns.
RWKV_EXPORT int rwkv_add_norm_mix_decode(float* x, const __half* y, const float* weight, const float* bias, const float* mix,
        __half* shift, const int64_t* slots, __half* out, int rows, int width, int planes, int parts, int inputs_ready, int overlap,
        cudaStream_t stream) {
    parts = rwkv::together(parts);
    if (!rwkv::fits(width) || !rwkv::splits(width, parts)) return cudaErrorInvalidValue;
    switch (planes) {
        case 6:
            return rwkv::decode<6>(x, y, weight, bias, mix, shift, slots, out, rows, width, parts, inputs_ready, overlap, stream);
        case 3:
            return rwkv::decode<3>(x, y, weight, bias, mix, shift, slots, out, rows, width, parts, inputs_ready, overlap, stream);
        case 2:
            return rwkv::decode<2>(x, y, weight, bias, mix, shift, slots, out, rows, width, parts, inputs_ready, overlap, stream);
        case 1:
            return rwkv::decode<1>(x, y, weight, bias, mix, shift, slots, out, rows, width, parts, inputs_ready, overlap, stream);
    }
    return cudaErrorInvalidValue;
}

// run: tokens a block takes one after another. normed [tokens, width] is scratch.
RWKV_EXPORT int rwkv_add_norm_mix_prefill(float* x, const __half* y, const float* weight, const float* bias, const float* mix,
        __half* shift, const int32_t* previous_slot, const int32_t* last_index, const int64_t* slots, __half* normed, __half* out,
        int tokens, int rows, int width, int planes, int run, int parts, int overlap, cudaStream_t stream) {
    parts = rwkv::together(parts);
    if (!rwkv::fits(width) || run < 1 || !rwkv::splits(width, parts)) return cudaErrorInvalidValue;
    switch (planes) {
        case 6:
            return rwkv::prefill<6>(x, y, weight, bias, mix, shift, previous_slot, last_index, slots, normed, out, tokens, rows,
                width, run, parts, overlap, stream);
        case 3:
            return rwkv::prefill<3>(x, y, weight, bias, mix, shift, previous_slot, last_index, slots, normed, out, tokens, rows,
                width, run, parts, overlap, stream);
        case 2:
            return rwkv::prefill<2>(x, y, weight, bias, mix, shift, previous_slot, last_index, slots, normed, out, tokens, rows,
                width, run, parts, overlap, stream);
        case 1:
            return rwkv::prefill<1>(x, y, weight, bias, mix, shift, previous_slot, last_index, slots, normed, out, tokens, rows,
                width, run, parts, overlap, stream);
    }
    return cudaErrorInvalidValue;
}

// out [rows, width] = layer norm of x + y at the positions in `index`, or of all.
RWKV_EXPORT int rwkv_add_norm(const float* x, const __half* y, const int64_t* index, const float* weight, const float* bias,
        __half* out, int rows, int width, int overlap, cudaStream_t stream) {
    if (!rwkv::fits(width)) return cudaErrorInvalidValue;
    const rwkv::Launch how = {dim3(rows), dim3(rwkv::threads(width)), stream, overlap};
    return start(rwkv::add_norm_kernel, how, x, y, index, weight, bias, out, width);
}
