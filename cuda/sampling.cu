// One token for each row of logits: penalties, temperature, filters without sorting the vocabulary, draw.
//
// The rules are those of sampling/reference.py, in the same order; so are the random numbers, and a seed gives
// the same text on CPU and GPU up to the rounding of sums at the borders between columns.
//
// A row is read once from memory, in parts of 256 columns, one warp a part: penalties are brought up to date on the way, and of
// each part its largest value and the mass of its weights are left in shared memory (`summarize`). From these follow the row's
// largest value and mass, and mostly also where to look: a greedy row or a draw from all columns reads one part again; a filter
// reads the parts that can hold kept columns again, puts the few columns above a bound on a list, and ranks them against one
// another (`list_staged`, `rank_list`). With min_p the parts' summaries are cut first (`apply_min_p`); what is below is then as
// good as masked. A boundary further down is searched for as in Rapid-Sampling (Triang-jyed-driung), by value
// and without sorting: a histogram of counts bounds the value from both sides, and the columns in between are listed (`search`).
// A row filtered by top_p alone, unless that is small, needs no boundary: as in FlashInfer's rejection sampling it is drawn from
// all columns until a draw is kept; the mass of larger columns and the number of equal ones decide that (`redraw`). Rows
// with noise need nothing but one pass (`noisy_argmax`).
//
// For few rows the blocks of a cluster share the parts of a row (Hopper and later). Sums go by parts, in the order of the
// columns: they depend neither on chance, nor on how many blocks share a row, nor on other rows.

// parts: 5
// left out with FP16_ALONE: 1 4
#include "parts.cuh"
#include "sampling/filter.cuh"
#include "sampling/noise.cuh"
#include "sampling/rejection.cuh"

namespace rwkv {

constexpr int DENSE_BLOCKS = 4;  // of MIN_THREADS on a multiprocessor

// Write down what a row's column means. All it needs is read anew: kept in registers meanwhile, it would cost every loop before.
__device__ __forceinline__ void write_result(const SampleArgs& a, int column) {
    if (threadIdx.x != 0 || cluster_rank() != 0) return;
    const Shared& sh = shared();
    const int index = int(blockIdx.x) / cluster_size();
    const bool finite = column >= 0;
    const int64_t slot = sh.slot, id = !finite ? 0 : a.ids ? a.ids[column] : a.first_id + column;
    a.out_ids[index] = id;
    a.out_finite[index] = finite;
    if (a.last_ids) a.last_ids[slot] = id;
    atomicAdd(reinterpret_cast<unsigned long long*>(a.step + slot), 1ull);  // not waited for
    if (!sh.penalties) return;
    a.pending_column[slot] = column;
    if (!finite) return;
    if (sh.seen) atomicOr(reinterpret_cast<uint32_t*>(sh.seen) + column / 32, 1u << column % 32);
    const bool again = sh.special[column / PART] >> column / 8 % LANES & 1 && sh.penalties[column] != 0.f;
    a.pending_penalty[slot] = again ? sh.controls.alpha_frequency : sh.controls.alpha_presence;
    atomicOr(&a.touched[slot * ((a.num_columns + PART - 1) / PART) + column / PART], 1u << column / 8 % LANES);
}

// DENSE: with fewer registers, so that more blocks of the least size share a multiprocessor.
template <class T, bool DENSE>
__global__ void __launch_bounds__(DENSE ? MIN_THREADS : MAX_THREADS, DENSE ? DENSE_BLOCKS : 1)
    sample_kernel(const __grid_constant__ SampleArgs a, const bool aligned) {
    Shared& sh = shared();
    const int t = threadIdx.x, size = cluster_size(), rank = cluster_rank(), index = int(blockIdx.x) / size;
    int shift = 0;
    while ((LANES * PART << shift) < a.num_columns) shift++;
    Row<T> row{a, static_cast<const T*>(a.logits) + index * a.stride, nullptr, index, 0, rank, size, shift,
               aligned ? a.num_columns / 8 : 0, false, false, 0};
    row.prefetch_share();
    if (t == 0) sh.num_staged = sh.num_above = 0;
    if (size > 1) cluster_arrive_relaxed<false>();
    const int64_t slot = a.slots[index];
    if (slot < 0) {
        if (t == 0 && rank == 0) a.out_ids[index] = 0, a.out_finite[index] = true;
        if (size > 1) cluster_wait<false>();
        return;
    }
    row.slot = slot;
    row.end_masked = a.step[slot] < a.first_end[slot];
    row.penalties = a.penalized[slot] ? a.penalties + slot * a.penalty_stride : nullptr;
    row.num_bias = a.num_bias[slot];
    const int mask_line = a.mask_lines[slot];
    const uint8_t* const allowed = mask_line < 0 ? nullptr : a.mask_words + int64_t(mask_line) * bytes_of_bits(a);
    const bool floored = a.min_p_depth[slot] < INFINITY;
    row.plain = !allowed && !row.end_masked && !row.any_special() && !floored;
    const int method = a.method[slot];
    const float temperature = a.temperature[slot];
    const bool by_count = a.top_k[slot] < a.num_columns, by_mass = a.top_p[slot] < INFINITY;
    const bool weigh = !floored && needs_masses(method, by_count, by_mass);
    if (t == num_threads() - 1) sh.controls = Controls(a, slot);
    if (t == 0) {
        sh.slot = slot, sh.penalties = row.penalties, sh.allowed = allowed, sh.floor = -INFINITY;
        sh.seen = row.penalties && a.repetition[slot] != 1.f ? a.seen + slot * bytes_of_bits(a) : nullptr;
    }
    if (size > 1) cluster_wait<false>();  // all blocks have begun
    if (row.num_bias) row.mark_bias();
    const bool noisy = method == GUMBEL || method == NOISE;
    if (noisy) {
        __syncthreads();
    } else {
        if (row.any_special()) {
            row.template summarize<true>(LOG2E / temperature, weigh, allowed);
        } else {
            row.template summarize<false>(LOG2E / temperature, weigh, allowed);
        }
        row.sync();
        if (sh.controls.min_p_depth < INFINITY) apply_min_p(row);
    }

    int column = -1;
    if (noisy) {
        column = noisy_argmax<DENSE>(row);
    } else if (method == GREEDY || method == PLAIN || method == REJECTION) {
        if (method != REJECTION && (t >= LANES || rank)) return;
        const uint32_t key = row.top_key();
        const Softmax softmax{temperature, value_of(key), LOG2E / temperature};
        if (method == GREEDY) {
            if (fabsf(softmax.top) < INFINITY) column = first_equal(row, key);
        } else if (row.finite(softmax)) {
            column = method == PLAIN ? plain_draw(row, softmax) : redraw(row, softmax);
        }
    } else {
        if (rank && by_count && a.top_k[slot] <= MAX_RANKED) return;
        if (t < LANES) plan_filter(row, sh.controls);
        __syncthreads();
        const Softmax softmax{temperature, sh.summary.top, LOG2E / temperature};
        if (row.finite(softmax)) column = filtered_draw(row, softmax);
    }
    write_result(a, column);
}

// How a launch is shaped.
struct Layout {
    int blocks = 1, threads = MIN_THREADS;  // blocks that share a row
    bool dense = false;
};

template <class T, bool DENSE>
cudaError_t start(const SampleArgs& a, const Layout& layout, cudaStream_t stream) {
    const bool aligned = a.stride * sizeof(T) % 16 == 0 && reinterpret_cast<uintptr_t>(a.logits) % 16 == 0;
    const auto kernel = sample_kernel<T, DENSE>;
#ifdef RWKV_HIP
    hipLaunchKernelGGL(kernel, dim3(a.num_rows), dim3(layout.threads), 0, stream, a, aligned);
    return cudaGetLastError();
#else
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {unsigned(layout.blocks), 1, 1};
    const dim3 grid(a.num_rows * layout.blocks), block(layout.threads);
    cudaLaunchConfig_t config = {grid, block, 0, stream, &cluster, layout.blocks > 1 ? 1u : 0u};
    return cudaLaunchKernelEx(&config, kernel, a, aligned);
#endif
}

extern template cudaError_t start<__half, false>(const SampleArgs&, const Layout&, cudaStream_t);
extern template cudaError_t start<__half, true>(const SampleArgs&, const Layout&, cudaStream_t);
#ifndef FP16_ALONE
extern template cudaError_t start<float, false>(const SampleArgs&, const Layout&, cudaStream_t);
extern template cudaError_t start<__nv_bfloat16, false>(const SampleArgs&, const Layout&, cudaStream_t);
#if IN_PART(1)
template cudaError_t start<float, false>(const SampleArgs&, const Layout&, cudaStream_t);
#endif
#if IN_PART(4)
template cudaError_t start<__nv_bfloat16, false>(const SampleArgs&, const Layout&, cudaStream_t);
#endif
#endif
#if IN_PART(2)
template cudaError_t start<__half, false>(const SampleArgs&, const Layout&, cudaStream_t);
#endif
#if IN_PART(3)
template cudaError_t start<__half, true>(const SampleArgs&, const Layout&, cudaStream_t);
#endif

#if IN_PART(0)
// Few rows: so that every multiprocessor has as many threads as it has registers for. Many: so that they take few rounds.
static cudaError_t layout_for(int num_rows, Layout& layout) {
#ifndef RWKV_HIP
    int device = 0, major = 0, processors = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
    while (2 * layout.threads <= MAX_THREADS && 2 * layout.threads * num_rows <= MAX_THREADS * processors) layout.threads *= 2;
    if (HAS_CLUSTERS && major >= 9)
        while (layout.blocks < MAX_BLOCKS && 2 * layout.blocks * num_rows <= processors) layout.blocks *= 2;
    const auto rounds = [&](int blocks) { return (num_rows + blocks * processors - 1) / (blocks * processors); };
    layout.dense = layout.threads == MIN_THREADS && rounds(DENSE_BLOCKS) < rounds(MAX_THREADS / MIN_THREADS);
#endif
    return cudaSuccess;
}

#endif
}  // namespace rwkv

#if IN_PART(0)
// Sample one token for each row. Returns a cudaError_t: cudaErrorInvalidValue for more than 131,072 columns or an unknown type.
RWKV_EXPORT int rwkv_sample(const rwkv::SampleArgs* args, cudaStream_t stream) {
    const rwkv::SampleArgs& a = *args;
    if (a.num_rows == 0) return cudaSuccess;
    if (a.num_columns > rwkv::PART * rwkv::MAX_PARTS) return cudaErrorInvalidValue;
    rwkv::Layout layout;
    if (cudaError_t error = rwkv::layout_for(a.num_rows, layout)) return error;
    if (a.type == rwkv::FP16)
        return layout.dense ? rwkv::start<__half, true>(a, layout, stream) : rwkv::start<__half, false>(a, layout, stream);
#ifndef FP16_ALONE
    if (a.type == rwkv::FP32) return rwkv::start<float, false>(a, layout, stream);
    if (a.type == rwkv::BF16) return rwkv::start<__nv_bfloat16, false>(a, layout, stream);
#endif
    return cudaErrorInvalidValue;
}

// Whether logits may be of this type.
RWKV_EXPORT int rwkv_sample_takes(int type) {
#ifndef FP16_ALONE
    if (type == rwkv::FP32 || type == rwkv::BF16) return true;
#endif
    return type == rwkv::FP16;
}

// What callers check their own idea of the arguments by, and the code of a `Method`, -1 for a name that is none.
RWKV_EXPORT int rwkv_sample_args_size() { return sizeof(rwkv::SampleArgs); }
RWKV_EXPORT int rwkv_sample_method(const char* name) {
    for (int i = 0; i < int(sizeof(rwkv::METHOD_NAMES) / sizeof(rwkv::METHOD_NAMES[0])); i++)
        if (!std::strcmp(name, rwkv::METHOD_NAMES[i])) return i;
    return -1;
}
#endif
