// Reorders rows. Memory-bound: a thread has four items, of up to 16 bytes, in flight.
#include "divider.cuh"

constexpr uint32_t UNROLL = 4;

// y[j, i] = x[i, j] for rows of `per_row` items: `a` rows that are `b` apart in x are adjacent in
// y.
template <class T>
DEVICE void swap_leading(
    T *y, const T *x, uint32_t items, const Divider per_row, const Divider a, uint32_t b) {
    const uint32_t first = blockIdx.x * blockDim.x * UNROLL + threadIdx.x;
    T values[UNROLL];
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; u++) {
        uint32_t column = first + u * blockDim.x;
        if (column >= items) break;
        uint32_t i = per_row.split(column);
        const uint32_t j = a.split(i);
        values[u] = x[static_cast<uint64_t>(i * b + j) * per_row.divisor + column];
    }
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; u++) {
        const uint32_t at = first + u * blockDim.x;
        if (at < items) y[at] = values[u];
    }
}

#define SWAPS(T, size)                                                                             \
    KERNEL(swap_leading_##size, T *y, const T *x, uint32_t items, const Divider per_row,           \
        const Divider a, uint32_t b) {                                                             \
        swap_leading(y, x, items, per_row, a, b);                                                  \
    }
SWAPS(uint8_t, 1) SWAPS(uint16_t, 2) SWAPS(uint32_t, 4) SWAPS(uint64_t, 8) SWAPS(uint4, 16)
