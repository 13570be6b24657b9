// Sums of columns in two stages, for gradients of biases and of norms' parameters.
//
// First every block sums a share of the rows of its columns; then the shares' sums are added up in order, and added to the gradient. Both
// orders depend on the shape alone.
#include "device.cuh"

constexpr int LANES = 32;  // of a block, next to each other in a row
constexpr int SLICES = 8;  // of a block, with every eighth row each

// partials[share][c] = Σ x[row][c] over the rows of the share; x is [rows, n]. A thread takes V neighbouring columns.
template <class T, int V, class Load>
DEVICE void column_sums(const T *x, float *partials, uint32_t rows, uint32_t n, uint32_t share, Load load) {
    SHARED(float, sums, [SLICES][V][LANES]);
    const uint32_t lane = threadIdx.x % LANES, slice = threadIdx.x / LANES;
    const uint32_t c = (blockIdx.x * LANES + lane) * V;
    const uint32_t first = blockIdx.y * share, last = min(first + share, rows);
    float sum[V];
#pragma unroll
    for (int i = 0; i < V; i++) sum[i] = 0.0f;
    if (c < n) {
        const T *at = x + c;
        uint32_t row = first + slice;
        // Four rows in flight.
        for (; row + 3 * SLICES < last; row += 4 * SLICES) {
            const auto r0 = load(at + static_cast<uint64_t>(row) * n), r1 = load(at + static_cast<uint64_t>(row + SLICES) * n);
            const auto r2 = load(at + static_cast<uint64_t>(row + 2 * SLICES) * n), r3 = load(at + static_cast<uint64_t>(row + 3 * SLICES) * n);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] = (((sum[i] + r0[i]) + r1[i]) + r2[i]) + r3[i];
        }
        for (; row < last; row += SLICES) {
            const auto a = load(at + static_cast<uint64_t>(row) * n);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += a[i];
        }
    }
#pragma unroll
    for (int i = 0; i < V; i++) sums[slice][i][lane] = sum[i];
    __syncthreads();
    // The threads share the columns anew: thread t has the columns t, t + 256, … of the block's V·32.
    for (uint32_t j = threadIdx.x; j < V * LANES; j += blockDim.x) {
        const uint32_t column = blockIdx.x * LANES * V + j;
        if (column >= n) continue;
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < SLICES; s++) total += sums[s][j % V][j / V];
        partials[static_cast<uint64_t>(blockIdx.y) * n + column] = total;
    }
}

// One element, like a Vector.
struct One {
    float value;
    DEVICE float operator[](int) const { return value; }
};

// first[c] += Σ partials[p][c] for c < n, and second[c − n] += for those from n on; partials is [shares, width], in f32.
DEVICE void add_up(const float *partials, float *first, float *second, uint32_t shares, uint32_t width, uint32_t n) {
    SHARED(float, sums, [SLICES][LANES]);
    const uint32_t lane = threadIdx.x % LANES, slice = threadIdx.x / LANES;
    const uint32_t c = blockIdx.x * LANES + lane;
    float sum = 0.0f;
    if (c < width) {
#pragma unroll 4
        for (uint32_t p = slice; p < shares; p += SLICES) sum += partials[static_cast<uint64_t>(p) * width + c];
    }
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice > 0 || c >= width) return;
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < SLICES; s++) total += sums[s][lane];
    float *out = c < n ? first + c : second + (c - n);
    *out += total;
}

#define KERNELS(T, suffix)                                                                                           \
    KERNEL(column_sums_##suffix, const T *x, float *partials, uint32_t rows, uint32_t n, uint32_t share) {           \
        column_sums<T, VECTOR<T>>(x, partials, rows, n, share, [](const T *at) { return load_vector(at); });         \
    }                                                                                                                \
    KERNEL(column_sums_any_##suffix, const T *x, float *partials, uint32_t rows, uint32_t n, uint32_t share) {       \
        column_sums<T, 1>(x, partials, rows, n, share, [](const T *at) { return One{to_float(*at)}; });              \
    }
FOR_DTYPES(KERNELS)

KERNEL(add_shares, const float *partials, float *first, float *second, uint32_t shares, uint32_t width, uint32_t n) {
    add_up(partials, first, second, shares, width, n);
}
