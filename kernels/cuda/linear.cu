// What linear layers need besides products: the gradient of a bias, and biases where a product has no epilogue for them.
#include "device.cuh"

constexpr int COLUMN_LANES = 32;
constexpr int ROW_LANES = 8;

// Block (x, y) sums part y of the rows of some columns: a thread has VECTOR columns and every eighth row of the part; then the eight
// sums of a column are added in their order.
template <class T>
DEVICE void sum_rows(const T *dy, float *partials, uint64_t rows, uint64_t n) {
    constexpr int V = VECTOR<T>;
    SHARED(float, sums, [ROW_LANES][COLUMN_LANES * V + 1]);
    const uint32_t column_lane = threadIdx.x % COLUMN_LANES, row_lane = threadIdx.x / COLUMN_LANES;
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * COLUMN_LANES * V;
    const uint64_t column = first + column_lane * V;
    const uint64_t part = (rows + gridDim.y - 1) / gridDim.y;
    const uint64_t begin = blockIdx.y * part, end = min(begin + part, rows);
    float sum[V] = {};
    if (aligned(dy) && n % V == 0) {
        if (column < n)
            for (uint64_t row = begin + row_lane; row < end; row += ROW_LANES) {
                const Vector<T> values = load_vector(dy + row * n + column);
#pragma unroll
                for (int i = 0; i < V; i++) sum[i] += values[i];
            }
    } else {
        for (uint64_t row = begin + row_lane; row < end; row += ROW_LANES)
#pragma unroll
            for (int i = 0; i < V; i++)
                if (column + i < n) sum[i] += to_float(dy[row * n + column + i]);
    }
#pragma unroll
    for (int i = 0; i < V; i++) sums[row_lane][column_lane * V + i] = sum[i];
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < COLUMN_LANES * V && first + c < n; c += COLUMN_LANES * ROW_LANES) {
        float total = 0.0f;
#pragma unroll
        for (int r = 0; r < ROW_LANES; r++) total += sums[r][c];
        partials[blockIdx.y * n + first + c] = total;
    }
}

/// `grad[column] += Σ partials[part][column]`, in order.
KERNEL(add_partials, const float *partials, float *grad, uint64_t parts, uint64_t n) {
    const uint64_t column = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= n) return;
    float total = 0.0f;
    for (uint64_t part = 0; part < parts; part++) total += partials[part * n + column];
    grad[column] += total;
}

/// `y[row][column] += bias[column]`; rows are blockIdx.x.
template <class T, class Y>
DEVICE void add_bias(Y *y, const T *bias, uint64_t n) {
    const uint64_t column = static_cast<uint64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
    if (column >= n) return;
    Y *at = y + static_cast<uint64_t>(blockIdx.x) * n + column;
    *at = from_float<Y>(to_float(*at) + to_float(bias[column]));
}

#define KERNELS(T, suffix) \
    KERNEL(sum_rows_##suffix, const T *dy, float *partials, uint64_t rows, uint64_t n) { sum_rows(dy, partials, rows, n); }
FOR_DTYPES(KERNELS)

KERNEL(add_bias_f32_f32, float *y, const float *bias, uint64_t n) { add_bias(y, bias, n); }
KERNEL(add_bias_bf16_bf16, bf16 *y, const bf16 *bias, uint64_t n) { add_bias(y, bias, n); }
KERNEL(add_bias_f16_f16, f16 *y, const f16 *bias, uint64_t n) { add_bias(y, bias, n); }
KERNEL(add_bias_bf16_f32, float *y, const bf16 *bias, uint64_t n) { add_bias(y, bias, n); }
KERNEL(add_bias_f16_f32, float *y, const f16 *bias, uint64_t n) { add_bias(y, bias, n); }
