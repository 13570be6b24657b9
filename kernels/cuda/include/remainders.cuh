// f32 values as two halves of 16 bits: the value rounded to bf16, ties away from zero, and the
// signed remainder. As `kernels::ops::remainders`, bit for bit.
#pragma once

#include "device.cuh"

struct SplitFloat {
    uint16_t high, low;

    DEVICE static SplitFloat of(float value) {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        const bool nan = (bits & 0x7fffffff) > 0x7f800000;
        return {static_cast<uint16_t>(nan ? bits >> 16 | 0x40 : (bits + 0x8000) >> 16),
            static_cast<uint16_t>(nan ? 0 : bits)};
    }

    DEVICE float value() const {
        const uint32_t bits =
            (static_cast<uint32_t>(high) << 16) +
            static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(low)));
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
};

// Halves of four adjacent values, at multiples of 8 bytes.
DEVICE void store_four(uint16_t *high, uint16_t *low, const Vector<float> &values) {
    uint16_t highs[4], lows[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const SplitFloat split = SplitFloat::of(values[i]);
        highs[i] = split.high, lows[i] = split.low;
    }
    uint2 raw;
    memcpy(&raw, highs, 8);
    *reinterpret_cast<uint2 *>(high) = raw;
    memcpy(&raw, lows, 8);
    *reinterpret_cast<uint2 *>(low) = raw;
}

DEVICE Vector<float> load_four(const uint16_t *high, const uint16_t *low) {
    const uint2 raws[2] = {
        *reinterpret_cast<const uint2 *>(high), *reinterpret_cast<const uint2 *>(low)};
    uint16_t highs[4], lows[4];
    memcpy(highs, &raws[0], 8);
    memcpy(lows, &raws[1], 8);
    return Vector<float>::of([&](int i) { return SplitFloat{highs[i], lows[i]}.value(); });
}

/// Whether these addresses are multiples of 8.
DEVICE bool fours(const uint16_t *high, const uint16_t *low) {
    return ((reinterpret_cast<uintptr_t>(high) | reinterpret_cast<uintptr_t>(low)) & 7) == 0;
}
