// Synchronization of blocks that take turns at the same memory. Numbers in memory say whose turn it
// is. A block may only wait for blocks that started before it: there is no guarantee that later
// blocks ever run while it waits.
#pragma once

#include "device.cuh"

#ifndef EMULATED

/// Waits until `number` is at least `value`. Then earlier writes of its writer are visible. An
/// acquire empties L1, so only the loads before and after the wait are acquires.
DEVICE void wait_for_number(const uint32_t *number, uint32_t value) {
    for (;;) {
        uint32_t now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(number) : "memory");
        if (now >= value) return;
        do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(number) : "memory");
        while (now < value);
    }
}

/// Sets `number` for other blocks, after everything that this thread has written or observed.
DEVICE void set_number(uint32_t *number, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(number), "r"(value) : "memory");
}

/// Adds to four floats without waiting for the result (Hopper and later).
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
