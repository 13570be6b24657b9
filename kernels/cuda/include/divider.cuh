// Division by a number that is known before the launch, as a multiplication and a shift.
//
// Granlund & Montgomery 1994, "Division by Invariant Integers using Multiplication", figure 4.1,
// for numbers below 2³¹.
#pragma once

#include "device.cuh"

/// A divisor from 1 to 2³¹, laid out as `Divider` of `gpu::items`.
struct Divider {
    uint32_t divisor, factor, shift;

    DEVICE uint32_t quotient(uint32_t n) const { return (__umulhi(n, factor) + n) >> shift; }

    /// Returns n / divisor; leaves the remainder in `n`.
    DEVICE uint32_t split(uint32_t &n) const {
        const uint32_t q = quotient(n);
        n -= q * divisor;
        return q;
    }
};
