// Stochastic rounding to bf16 that is independent of the parallel layout. The random words are
// those of `kernels::tensor::arguments::stochastic_rounding`, bit for bit.
#pragma once

#include "device.cuh"

/// How the elements of a range are rounded: by their indices in the whole parameter.
struct StochasticRounding {
    uint64_t row, column, width, pitch;
    uint32_t key, unused;

    /// Calls `f` with 0 to `n` − 1 and the words of that many elements, starting at the `at`-th of
    /// the range.
    template <class F>
    DEVICE void words(uint64_t at, int n, F f) const {
        uint64_t first = row, across = column + at;
        if (across >= width) {
            const uint64_t rows = across / width;
            first += rows * pitch;
            across -= rows * width;
        }
#pragma unroll
        for (int i = 0; i < n; i++) {
            const uint64_t number = first + across;
            f(i, mixed(static_cast<uint32_t>(number) ^ key ^
                       static_cast<uint32_t>(number >> 32) * 0x9E3779B9u));
            if (++across == width) across = 0, first += pitch;
        }
    }

    /// lowbias32 of C. Wellons.
    DEVICE static uint32_t mixed(uint32_t x) {
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15) * 0x846ca68bu;
        return x ^ x >> 16;
    }
};

/// `value` rounded to one of its two neighbours, by a random word; NaN stays NaN.
DEVICE uint16_t round_by(float value, uint32_t word) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return static_cast<uint16_t>(nan ? bits >> 16 | 0x40 : (bits + (word & 0xffff)) >> 16);
}
