// Biases of linear layers for products without an epilogue.
#include "device.cuh"

/// `y[row][column] += bias[column]`; blockIdx.x is the row.
template <class T, class Y>
DEVICE void add_bias(Y *y, const T *bias, uint64_t n) {
    const uint64_t column = static_cast<uint64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
    if (column >= n) return;
    Y *at = y + static_cast<uint64_t>(blockIdx.x) * n + column;
    *at = from_float<Y>(to_float(*at) + to_float(bias[column]));
}

KERNEL(add_bias_f32_f32, float *y, const float *bias, uint64_t n) { add_bias(y, bias, n); }
KERNEL(add_bias_bf16_bf16, bf16 *y, const bf16 *bias, uint64_t n) { add_bias(y, bias, n); }
KERNEL(add_bias_f16_f16, f16 *y, const f16 *bias, uint64_t n) { add_bias(y, bias, n); }
KERNEL(add_bias_bf16_f32, float *y, const bf16 *bias, uint64_t n) { add_bias(y, bias, n); }
KERNEL(add_bias_f16_f32, float *y, const f16 *bias, uint64_t n) { add_bias(y, bias, n); }
