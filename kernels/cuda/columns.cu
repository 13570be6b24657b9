// Sums of columns in two stages, for gradients of biases and of norms' parameters.
//
// First, every block sums a share of the rows of its columns. Then the shares' sums are added up in
// order, and added to the gradient. Both orders depend on the shape alone.
#include "device.cuh"

constexpr int LANES = 32;  // threads of a block that are adjacent along a row
constexpr int SLICES = 8;  // slices of a block that sums rows: each has every eighth row
constexpr int GROUPS = 32; // groups of a block that adds up shares: each has every 32nd share
constexpr int FLIGHT = 8;  // loads that a thread has in flight

// partials[share][c] = Σ x[row][c] over the rows of the share; x is [rows, n]. A thread takes V
// adjacent columns.
template <class T, int V, class Load>
DEVICE void column_sums(
    const T *x, float *partials, uint32_t rows, uint32_t n, uint32_t share, Load load) {
    SHARED(float, sums, [SLICES][V][LANES]);
    const uint32_t lane = threadIdx.x % LANES, slice = threadIdx.x / LANES;
    const uint32_t c = (blockIdx.x * LANES + lane) * V;
    const uint32_t first = blockIdx.y * share, last = min(first + share, rows);
    float sum[V];
#pragma unroll
    for (int i = 0; i < V; i++) sum[i] = 0.0f;
    if (c < n) {
        const T *at = x + c;
        for (uint32_t row = first + slice; row < last; row += FLIGHT * SLICES) {
            decltype(load(at)) in[FLIGHT];
#pragma unroll
            for (int f = 0; f < FLIGHT; f++)
                if (row + f * SLICES < last)
                    in[f] = load(at + static_cast<uint64_t>(row + f * SLICES) * n);
#pragma unroll
            for (int f = 0; f < FLIGHT; f++) {
                if (row + f * SLICES >= last) break;
#pragma unroll
                for (int i = 0; i < V; i++) sum[i] += in[f][i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < V; i++) sums[slice][i][lane] = sum[i];
    __syncthreads();
    // The threads redistribute the columns: thread t has the columns t, t + 256, … of the block's
    // V·32.
    for (uint32_t j = threadIdx.x; j < V * LANES; j += blockDim.x) {
        const uint32_t column = blockIdx.x * LANES * V + j;
        if (column >= n) continue;
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < SLICES; s++) total += sums[s][j % V][j / V];
        partials[static_cast<uint64_t>(blockIdx.y) * n + column] = total;
    }
}

// One element, with the interface of a Vector.
struct One {
    float value;
    DEVICE float operator[](int) const { return value; }
};

// first[c] += Σ partials[p][c] for c < n, and second[c − n] += for c ≥ n; partials is [shares,
// width], in f32.
DEVICE void add_up(const float *partials, float *first, float *second, uint32_t shares,
    uint32_t width, uint32_t n) {
    SHARED(float, sums, [GROUPS][LANES]);
    const uint32_t lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const uint32_t c = blockIdx.x * LANES + lane;
    float sum = 0.0f;
    if (c < width) {
#pragma unroll 8
        for (uint32_t p = group; p < shares; p += GROUPS)
            sum += partials[static_cast<uint64_t>(p) * width + c];
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group > 0 || c >= width) return;
    float total = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) total += sums[g][lane];
    float *out = c < n ? first + c : second + (c - n);
    *out += total;
}

#define KERNELS(T, suffix)                                                                         \
    KERNEL_BOUNDS(256, 3, column_sums_##suffix, const T *x, float *partials, uint32_t rows,        \
        uint32_t n, uint32_t share) {                                                              \
        column_sums<T, VECTOR<T>>(                                                                 \
            x, partials, rows, n, share, [](const T *at) { return load_vector(at); });             \
    }                                                                                              \
    KERNEL(column_sums_any_##suffix, const T *x, float *partials, uint32_t rows, uint32_t n,       \
        uint32_t share) {                                                                          \
        column_sums<T, 1>(                                                                         \
            x, partials, rows, n, share, [](const T *at) { return One{to_float(*at)}; });          \
    }
FOR_DTYPES(KERNELS)

KERNEL_BOUNDS(1024, 1, add_shares, const float *partials, float *first, float *second,
    uint32_t shares, uint32_t width, uint32_t n) {
    add_up(partials, first, second, shares, width, n);
}
