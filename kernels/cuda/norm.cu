// LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019) of rows of h elements, forward.
//
// A row is read once, into registers: up to 2048 elements per warp, up to 16384 per block. Mean and
// variance are computed from there, one after the other, so that no digits cancel. Rows that are
// wider, or not a multiple of 16-byte vectors, are read once more for each of the two, mostly from
// L2.
#include "group.cuh"

// Rows of up to 32·ELEMENTS elements, one per warp; or, if WHOLE_BLOCK, up to blockDim.x·ELEMENTS,
// one per block.
template <class T, int ELEMENTS, bool WHOLE_BLOCK, bool LAYER>
DEVICE void rows_in_registers(const T *x, const T *weight, const T *bias, T *y, float *mean_out,
    float *rstd_out, uint32_t rows, uint32_t h, float eps) {
    constexpr int V = VECTOR<T>, VECTORS = ELEMENTS / V;
    SHARED(float, slots, [2][32]);
    const uint32_t threads = WHOLE_BLOCK ? blockDim.x : 32;
    const uint32_t thread = WHOLE_BLOCK ? threadIdx.x : threadIdx.x % 32;
    const uint32_t row =
        WHOLE_BLOCK ? blockIdx.x : blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return; // a whole warp, in the variant without barriers
    x += static_cast<uint64_t>(row) * h;
    y += static_cast<uint64_t>(row) * h;

    Vector<T> values[VECTORS];
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < VECTORS; p++) {
        const uint32_t at = (thread + p * threads) * V;
        if (at < h) values[p] = load_vector(x + at);
    }
    float mean = 0.0f;
    if (LAYER) {
#pragma unroll
        for (int p = 0; p < VECTORS; p++) {
            if ((thread + p * threads) * V < h) {
#pragma unroll
                for (int i = 0; i < V; i++) sum += values[p][i];
            }
        }
        mean = (WHOLE_BLOCK ? over_block<Add>(sum, slots[0]) : over_warp<Add>(sum)) / float(h);
    }
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < VECTORS; p++) {
        if ((thread + p * threads) * V < h) {
#pragma unroll
            for (int i = 0; i < V; i++) {
                const float d = values[p][i] - mean;
                squares += d * d;
            }
        }
    }
    squares = WHOLE_BLOCK ? over_block<Add>(squares, slots[1]) : over_warp<Add>(squares);
    const float rstd = 1.0f / sqrtf(squares / float(h) + eps);
    if (thread == 0) {
        if (LAYER) mean_out[row] = mean;
        rstd_out[row] = rstd;
    }
#pragma unroll
    for (int p = 0; p < VECTORS; p++) {
        const uint32_t at = (thread + p * threads) * V;
        if (at < h) {
            const Vector<T> w = load_vector(weight + at), b = LAYER ? load_vector(bias + at) : w;
            store_vector(y + at, Vector<T>::of([&](int i) {
                const float normal = (values[p][i] - mean) * rstd * w[i];
                return LAYER ? normal + b[i] : normal;
            }));
        }
    }
}

// One row of any width and alignment per block.
template <class T, bool LAYER>
DEVICE void any_rows(const T *x, const T *weight, const T *bias, T *y, float *mean_out,
    float *rstd_out, uint32_t h, float eps) {
    SHARED(float, slots, [2][32]);
    const uint32_t row = blockIdx.x;
    x += static_cast<uint64_t>(row) * h;
    y += static_cast<uint64_t>(row) * h;
    float mean = 0.0f;
    if (LAYER) {
        float sum = 0.0f;
        for (uint32_t c = threadIdx.x; c < h; c += blockDim.x) sum += to_float(x[c]);
        mean = over_block<Add>(sum, slots[0]) / float(h);
    }
    float squares = 0.0f;
    for (uint32_t c = threadIdx.x; c < h; c += blockDim.x) {
        const float d = to_float(x[c]) - mean;
        squares += d * d;
    }
    const float rstd = 1.0f / sqrtf(over_block<Add>(squares, slots[1]) / float(h) + eps);
    if (threadIdx.x == 0) {
        if (LAYER) mean_out[row] = mean;
        rstd_out[row] = rstd;
    }
    for (uint32_t c = threadIdx.x; c < h; c += blockDim.x) {
        const float normal = (to_float(x[c]) - mean) * rstd * to_float(weight[c]);
        y[c] = from_float<T>(LAYER ? normal + to_float(bias[c]) : normal);
    }
}

#define KERNELS_OF(T, suffix, norm, LAYER)                                                         \
    KERNELS_BY_WARPS(T, suffix, norm, LAYER, 8, 8)                                                 \
    KERNELS_BY_WARPS(T, suffix, norm, LAYER, 16, 8)                                                \
    KERNELS_BY_WARPS(T, suffix, norm, LAYER, 24, 6)                                                \
    KERNELS_BY_WARPS(T, suffix, norm, LAYER, 32, 4)                                                \
    KERNELS_BY_WARPS(T, suffix, norm, LAYER, 64, 3)                                                \
    KERNEL_BOUNDS(1024, 1, norm##_block_##suffix, const T *x, const T *weight, const T *bias,      \
        T *y, float *mean, float *rstd, uint32_t rows, uint32_t h, float eps) {                    \
        rows_in_registers<T, 16, true, LAYER>(x, weight, bias, y, mean, rstd, rows, h, eps);       \
    }                                                                                              \
    KERNEL(norm##_any_##suffix, const T *x, const T *weight, const T *bias, T *y, float *mean,     \
        float *rstd, uint32_t h, float eps) {                                                      \
        any_rows<T, LAYER>(x, weight, bias, y, mean, rstd, h, eps);                                \
    }
#define KERNELS_BY_WARPS(T, suffix, norm, LAYER, ELEMENTS, BLOCKS)                                 \
    KERNEL_BOUNDS(128, BLOCKS, norm##_warp##ELEMENTS##_##suffix, const T *x, const T *weight,      \
        const T *bias, T *y, float *mean, float *rstd, uint32_t rows, uint32_t h, float eps) {     \
        rows_in_registers<T, ELEMENTS, false, LAYER>(                                              \
            x, weight, bias, y, mean, rstd, rows, h, eps);                                         \
    }
#define KERNELS(T, suffix)                                                                         \
    KERNELS_OF(T, suffix, layer_norm, true) KERNELS_OF(T, suffix, rms_norm, false)
FOR_DTYPES(KERNELS)
