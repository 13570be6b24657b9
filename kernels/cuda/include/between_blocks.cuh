// Blocks that take turns at the same memory, by numbers of which each says whose turn it is. A
// block may only wait for others that were begun before it: whether later ones ever run while it
// waits, nobody promises.
#pragma once

#include "device.cuh"

#ifndef EMULATED

/// Waits until `number` is at least `value`; what its writer had written before is seen then. That
/// empties the first-level cache, so nothing but the looks before and after the waiting do it.
DEVICE void wait_for_number(const uint32_t *number, uint32_t value) {
    for (;;) {
        uint32_t now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(number) : "memory");
        if (now >= value) return;
        do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(number) : "memory");
        while (now < value);
    }
}

/// Sets `number` for other blocks, behind all that this thread has written or was told of.
DEVICE void set_number(uint32_t *number, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(number), "r"(value) : "memory");
}

/// Adds to four numbers without waiting for them (Hopper and later).
DEVICE void add_to(float4 *to, const float (&of)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(of[0]),
        "f"(of[1]), "f"(of[2]), "f"(of[3])
        : "memory");
}

#else

DEVICE void wait_for_number(const uint32_t *number, uint32_t value) {
    emulator::wait_outside([=] { return __atomic_load_n(number, __ATOMIC_ACQUIRE) >= value; },
        "a wait for another block");
}

DEVICE void set_number(uint32_t *number, uint32_t value) {
    __atomic_store_n(number, value, __ATOMIC_RELEASE);
}

DEVICE void add_to(float4 *to, const float (&of)[4]) {
    to->x += of[0];
    to->y += of[1];
    to->z += of[2];
    to->w += of[3];
}

#endif
