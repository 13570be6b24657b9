// The backward pass of LayerNorm and RMSNorm.
//
// With x̂ = (x − mean)·rstd and g = dy·weight: dx = rstd·(g − mean(g) − x̂·mean(g·x̂)) + residual
// (RMSNorm has no mean(g)); and dweight = Σ dy·x̂, dbias = Σ dy over the rows.
//
// One pass over x, dy and residual serves all. A block goes through its share of the rows, keeps
// its sums of the parameters' gradients in registers, and writes them as one row of `partials`
// [blocks, h or 2h]; columns.cu adds these up in order. Shares depend on the shape alone. With so
// many registers per thread, few threads fit on a multiprocessor. So each loads the next row before
// it computes the current one, which keeps memory busy.
#include "group.cuh"

/// A thread's part of a row: VECTORS vectors each of x, dy and the residual.
template <class T, int VECTORS>
struct Operands {
    Vector<T> x[VECTORS], dy[VECTORS], around[VECTORS];
    float mean, rstd;
};

// Rows of up to 32·ELEMENTS elements, one per warp at a time, or of up to blockDim.x·ELEMENTS, one
// per block. For WIDE rows a thread has half of the registers.
template <class T, int ELEMENTS, bool WHOLE_BLOCK, bool LAYER, bool WIDE = false>
DEVICE void rows_in_registers(const T *dy, const T *x, const float *mean_of, const float *rstd_of,
    const T *weight, const T *residual, T *dx, float *partials, uint32_t rows, uint32_t h,
    uint32_t share) {
    constexpr int V = VECTOR<T>, VECTORS = ELEMENTS / V;
    // Too few registers to hold the residual from the start.
    constexpr bool LATE = WIDE || (WHOLE_BLOCK && sizeof(T) == 4);
    // Enough registers to load the next row while this one is computed.
    constexpr bool AHEAD = !WIDE && sizeof(T) == 2;
    SHARED(float, slots, [2][2][32]);
    const uint32_t threads = WHOLE_BLOCK ? blockDim.x : 32;
    const uint32_t thread = WHOLE_BLOCK ? threadIdx.x : threadIdx.x % 32;
    const uint32_t first = blockIdx.x * share, last = min(first + share, rows);
    const uint32_t step = WHOLE_BLOCK ? 1 : blockDim.x / 32, warp = threadIdx.x / 32;

    float dweight[ELEMENTS], dbias[LAYER ? ELEMENTS : 1];
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        dweight[i] = 0.0f;
        if (LAYER) dbias[i] = 0.0f;
    }
    const float inv_h = 1.0f / float(h);

    const auto load = [&](uint32_t row) {
        Operands<T, VECTORS> of;
        const uint64_t start = static_cast<uint64_t>(row) * h;
        of.mean = LAYER ? mean_of[row] : 0.0f;
        of.rstd = rstd_of[row];
#pragma unroll
        for (int p = 0; p < VECTORS; p++) {
            const uint32_t at = (thread + p * threads) * V;
            if (at < h) {
                of.x[p] = load_vector(x + start + at);
                of.dy[p] = load_vector(dy + start + at);
                if (residual && !LATE) of.around[p] = load_vector(residual + start + at);
            }
        }
        return of;
    };
    const uint32_t begin = first + (WHOLE_BLOCK ? 0 : warp);
    Operands<T, VECTORS> next;
    if (AHEAD && begin < last) next = load(begin);
    for (uint32_t row = begin; row < last; row += step) {
        // The weight comes from L1, so it takes no registers between rows. It is loaded before the
        // next row, because it would have to wait for that row's loads.
        Vector<T> w[VECTORS];
#pragma unroll
        for (int p = 0; p < VECTORS; p++) {
            const uint32_t at = (thread + p * threads) * V;
            if (at < h) w[p] = load_vector(weight + at);
        }
        Operands<T, VECTORS> of = AHEAD ? next : load(row);
        if (AHEAD && row + step < last) next = load(row + step);
        const uint64_t start = static_cast<uint64_t>(row) * h;
        const float rstd = of.rstd;
        const auto centered = [&](int p, int i) {
            return LAYER ? of.x[p][i] - of.mean : of.x[p][i];
        };
        float along = 0.0f, across = 0.0f;
#pragma unroll
        for (int p = 0; p < VECTORS; p++) {
            if ((thread + p * threads) * V < h) {
#pragma unroll
                for (int i = 0; i < V; i++) {
                    const float normal = centered(p, i) * rstd, d = of.dy[p][i];
                    const float g = d * w[p][i];
                    dweight[p * V + i] += d * normal;
                    if (LAYER) dbias[p * V + i] += d;
                    along += g * normal;
                    across += g;
                }
            }
        }
        if (WHOLE_BLOCK) {
            // Rows alternate between two sets of slots, so the barrier of the row in between comes
            // before a set is written again.
            float (*now)[32] = slots[row % 2];
            along = over_block<Add>(along, now[0]);
            if (LAYER) across = over_block<Add>(across, now[1]);
        } else {
            along = over_warp<Add>(along);
            if (LAYER) across = over_warp<Add>(across);
        }
        // Three operations remain per element: rstd·(g − mean(g) − x̂·mean(g·x̂)) =
        // dy·(weight·rstd) − shift − (x − mean)·slope.
        const float slope = along * inv_h * rstd * rstd,
                    shift = LAYER ? across * inv_h * rstd : 0.0f;
        const auto gradient = [&](int p, int i, float around) {
            return of.dy[p][i] * (w[p][i] * rstd) +
                   ((LAYER ? around - shift : around) - centered(p, i) * slope);
        };
#pragma unroll
        for (int p = 0; p < VECTORS; p++) {
            const uint32_t at = (thread + p * threads) * V;
            if (at < h) {
                if (residual) {
                    if (LATE) of.around[p] = load_vector(residual + start + at);
                    store_vector(dx + start + at,
                        Vector<T>::of([&](int i) { return gradient(p, i, of.around[p][i]); }));
                } else {
                    store_vector(dx + start + at,
                        Vector<T>::of([&](int i) { return gradient(p, i, 0.0f); }));
                }
            }
        }
    }

    partials += static_cast<uint64_t>(blockIdx.x) * (LAYER ? 2 * h : h);
    if constexpr (WHOLE_BLOCK) {
#pragma unroll
        for (int p = 0; p < VECTORS; p++) {
            const uint32_t at = (thread + p * threads) * V;
            if (at < h) {
#pragma unroll
                for (int i = 0; i < V; i++) {
                    partials[at + i] = dweight[p * V + i];
                    if (LAYER) partials[h + at + i] = dbias[p * V + i];
                }
            }
        }
    } else {
        // Warps add their sums in order. Element i of a lane lies at i·32 + lane, so lanes use
        // different banks.
        SHARED(float, totals, [(LAYER ? 2 : 1) * 32 * ELEMENTS]);
        for (uint32_t turn = 0; turn < step; turn++) {
            if (turn == warp) {
#pragma unroll
                for (int i = 0; i < ELEMENTS; i++) {
                    const uint32_t at = i * 32 + thread;
                    totals[at] = turn == 0 ? dweight[i] : totals[at] + dweight[i];
                    if (LAYER)
                        totals[32 * ELEMENTS + at] =
                            turn == 0 ? dbias[i] : totals[32 * ELEMENTS + at] + dbias[i];
                }
            }
            __syncthreads();
        }
        for (uint32_t c = threadIdx.x; c < h; c += blockDim.x) {
            const uint32_t pack = c / V, at = (pack / 32 * V + c % V) * 32 + pack % 32;
            partials[c] = totals[at];
            if (LAYER) partials[h + c] = totals[32 * ELEMENTS + at];
        }
    }
}

// dx of one row of any width and alignment per block.
template <class T, bool LAYER>
DEVICE void any_rows(const T *dy, const T *x, const float *mean_of, const float *rstd_of,
    const T *weight, const T *residual, T *dx, uint32_t h) {
    SHARED(float, slots, [2][32]);
    const uint32_t row = blockIdx.x;
    const uint64_t start = static_cast<uint64_t>(row) * h;
    const float mean = LAYER ? mean_of[row] : 0.0f, rstd = rstd_of[row];
    float along = 0.0f, across = 0.0f;
    for (uint32_t c = threadIdx.x; c < h; c += blockDim.x) {
        const float g = to_float(dy[start + c]) * to_float(weight[c]);
        along += g * ((to_float(x[start + c]) - mean) * rstd);
        across += g;
    }
    along = over_block<Add>(along, slots[0]) / float(h);
    if (LAYER) across = over_block<Add>(across, slots[1]) / float(h);
    for (uint32_t c = threadIdx.x; c < h; c += blockDim.x) {
        const float normal = (to_float(x[start + c]) - mean) * rstd;
        const float g = to_float(dy[start + c]) * to_float(weight[c]);
        const float d = rstd * (LAYER ? g - across - normal * along : g - normal * along);
        dx[start + c] = from_float<T>(residual ? d + to_float(residual[start + c]) : d);
    }
}

// Sums of the parameters' gradients over `share` rows, one column per thread; for rows that are not
// kept in registers.
template <class T, bool LAYER>
DEVICE void any_parameters(const T *dy, const T *x, const float *mean_of, const float *rstd_of,
    float *partials, uint32_t rows, uint32_t h, uint32_t share) {
    const uint32_t c = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t first = blockIdx.y * share, last = min(first + share, rows);
    if (c >= h) return;
    float dweight = 0.0f, dbias = 0.0f;
    for (uint32_t row = first; row < last; row++) {
        const float d = to_float(dy[static_cast<uint64_t>(row) * h + c]),
                    mean = LAYER ? mean_of[row] : 0.0f;
        dweight += d * ((to_float(x[static_cast<uint64_t>(row) * h + c]) - mean) * rstd_of[row]);
        dbias += d;
    }
    partials += static_cast<uint64_t>(blockIdx.y) * (LAYER ? 2 * h : h);
    partials[c] = dweight;
    if (LAYER) partials[h + c] = dbias;
}

#define KERNELS_OF(T, suffix, norm, LAYER)                                                         \
    KERNELS_BY_WARPS(T, suffix, norm, LAYER, 8, 4)                                                 \
    KERNELS_BY_WARPS(T, suffix, norm, LAYER, 16, 4)                                                \
    KERNELS_BY_WARPS(T, suffix, norm, LAYER, 24, 3)                                                \
    KERNELS_BY_WARPS(T, suffix, norm, LAYER, 32, 2)                                                \
    KERNEL_BOUNDS(512, 1, norm##_backward_block_##suffix, const T *dy, const T *x,                 \
        const float *mean, const float *rstd, const T *weight, const T *residual, T *dx,           \
        float *partials, uint32_t rows, uint32_t h, uint32_t share) {                              \
        rows_in_registers<T, 16, true, LAYER>(                                                     \
            dy, x, mean, rstd, weight, residual, dx, partials, rows, h, share);                    \
    }                                                                                              \
    KERNEL(norm##_backward_any_##suffix, const T *dy, const T *x, const float *mean,               \
        const float *rstd, const T *weight, const T *residual, T *dx, uint32_t h) {                \
        any_rows<T, LAYER>(dy, x, mean, rstd, weight, residual, dx, h);                            \
    }                                                                                              \
    KERNEL(norm##_parameters_any_##suffix, const T *dy, const T *x, const float *mean,             \
        const float *rstd, float *partials, uint32_t rows, uint32_t h, uint32_t share) {           \
        any_parameters<T, LAYER>(dy, x, mean, rstd, partials, rows, h, share);                     \
    }
#define KERNELS_BY_WARPS(T, suffix, norm, LAYER, ELEMENTS, BLOCKS)                                 \
    KERNEL_BOUNDS(128, BLOCKS, norm##_backward_warp##ELEMENTS##_##suffix, const T *dy, const T *x, \
        const float *mean, const float *rstd, const T *weight, const T *residual, T *dx,           \
        float *partials, uint32_t rows, uint32_t h, uint32_t share) {                              \
        rows_in_registers<T, ELEMENTS, false, LAYER>(                                              \
            dy, x, mean, rstd, weight, residual, dx, partials, rows, h, share);                    \
    }
// For rows of more than 8192 elements. In f32 too many registers would spill.
#define KERNELS_OF_WIDE(T, suffix, norm, LAYER)                                                    \
    KERNEL_BOUNDS(1024, 1, norm##_backward_wide_##suffix, const T *dy, const T *x,                 \
        const float *mean, const float *rstd, const T *weight, const T *residual, T *dx,           \
        float *partials, uint32_t rows, uint32_t h, uint32_t share) {                              \
        rows_in_registers<T, 16, true, LAYER, true>(                                               \
            dy, x, mean, rstd, weight, residual, dx, partials, rows, h, share);                    \
    }
#define KERNELS(T, suffix)                                                                         \
    KERNELS_OF(T, suffix, layer_norm, true) KERNELS_OF(T, suffix, rms_norm, false)
FOR_DTYPES(KERNELS)
KERNELS_OF_WIDE(bf16, bf16, layer_norm, true)
KERNELS_OF_WIDE(bf16, bf16, rms_norm, false)
KERNELS_OF_WIDE(f16, f16, layer_norm, true)
KERNELS_OF_WIDE(f16, f16, rms_norm, false)
