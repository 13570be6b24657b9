// Products of 16 × 16 tiles on tensor cores, and the copies that feed them: mma.sync.m16n8k16,
// ldmatrix, cp.async (sm_80 and later).
//
// The PTX ISA defines which thread holds which element of a fragment ("Matrix fragments for
// mma.m16n8k16"; "ldmatrix"). With g = lane / 4 and t = lane % 4:
//
// - A [16, 16]: register 0 holds (g, 2t), 1 (g + 8, 2t), 2 (g, 2t + 8), 3 (g + 8, 2t + 8), each
//   with its right neighbour;
// - B [16, 8]: register 0 holds (2t, g), 1 (2t + 8, g), each with the element below;
// - C [16, 8]: 0 and 1 are (g, 2t) and its right neighbour, 2 and 3 those of row g + 8.
//
// The emulated versions move and multiply the same elements between the same threads.
#pragma once

#include "device.cuh"

/// A 16-bit element type, and the tensor core's instruction for it.
struct Bf16 {
    /// `low` goes to the lower half.
    __device__ __forceinline__ static uint32_t pack(float low, float high);
    __device__ __forceinline__ static float2 unpack(uint32_t pair);
    __device__ __forceinline__ static void mma(
        float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
};

struct F16 {
    __device__ __forceinline__ static uint32_t pack(float low, float high);
    __device__ __forceinline__ static float2 unpack(uint32_t pair);
    __device__ __forceinline__ static void mma(
        float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
};

/// Sets fragments to zero.
template <int N>
DEVICE void clear(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[n][i] = 0.0f;
}

template <int M, int N>
DEVICE void clear(float (&c)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++) clear(c[m]);
}

#ifndef EMULATED

__device__ __forceinline__ uint32_t Bf16::pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float2 Bf16::unpack(uint32_t pair) {
    return float2{__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
}

__device__ __forceinline__ void Bf16::mma(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t F16::pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float2 F16::unpack(uint32_t pair) {
    float2 v;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(v.x), "=f"(v.y)
        : "r"(pair));
    return v;
}

__device__ __forceinline__ void F16::mma(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// The address in shared memory, as instructions take it.
DEVICE uint32_t shared_address(const void *at) { return (uint32_t)__cvta_generic_to_shared(at); }

/// Loads four 8 × 8 matrices of 16-bit elements. Lane 8m + i gives the address of row i of matrix m
/// (16 bytes, aligned to 16), and gets the elements (g, 2t) and (g, 2t + 1) of matrix m in register
/// m.
DEVICE void ldmatrix(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(shared_address(row))
        : "memory");
}

/// As `ldmatrix`, transposed: the elements (2t, g) and (2t + 1, g).
DEVICE void ldmatrix_transposed(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(shared_address(row))
        : "memory");
}

/// Stores in the layout that `ldmatrix` loads; Hopper and later.
DEVICE void stmatrix(void *row, const uint32_t (&r)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

/// Starts to copy 16 bytes from global to shared memory, or zeros if `valid` is false.
DEVICE void copy_16(void *to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
        "l"(from), "r"(valid ? 16 : 0)
        : "memory");
}

/// As `copy_16`, for 4 bytes.
DEVICE void copy_4(void *to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)),
        "l"(from), "r"(valid ? 4 : 0)
        : "memory");
}

/// Ends a group of this thread's copies.
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until all but the last N groups of this thread's copies are complete; other threads see
/// them after a barrier.
template <int N>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#else

uint32_t Bf16::pack(float low, float high) {
    return from_float<bf16>(low).bits | static_cast<uint32_t>(from_float<bf16>(high).bits) << 16;
}
float2 Bf16::unpack(uint32_t pair) {
    return {to_float(bf16{static_cast<uint16_t>(pair)}),
        to_float(bf16{static_cast<uint16_t>(pair >> 16)})};
}
uint32_t F16::pack(float low, float high) {
    return from_float<f16>(low).bits | static_cast<uint32_t>(from_float<f16>(high).bits) << 16;
}
float2 F16::unpack(uint32_t pair) {
    return {to_float(f16{static_cast<uint16_t>(pair)}),
        to_float(f16{static_cast<uint16_t>(pair >> 16)})};
}

/// A thread's part of A and B.
struct EmulatedOperands {
    uint32_t a[4], b[2];
};

template <class E>
DEVICE void emulated_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const EmulatedOperands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulator::exchange(~0u, "mma.sync", mine, [&](auto lanes) {
        const uint32_t g = emulator::thread().number % 32 / 4, t = emulator::thread().number % 4;
        float left[2][16], right[2][16]; // rows g and g + 8 of A, columns 2t and 2t + 1 of B
        for (uint32_t of = 0; of < 4; of++) {
            const EmulatedOperands row = lanes[4 * g + of];
            for (uint32_t r = 0; r < 4; r++) {
                const float2 pair = E::unpack(row.a[r]);
                left[r % 2][2 * of + r / 2 * 8] = pair.x;
                left[r % 2][2 * of + r / 2 * 8 + 1] = pair.y;
            }
            for (uint32_t column = 0; column < 2; column++) {
                const EmulatedOperands of_column = lanes[4 * (2 * t + column) + of];
                for (uint32_t r = 0; r < 2; r++) {
                    const float2 pair = E::unpack(of_column.b[r]);
                    right[column][2 * of + 8 * r] = pair.x;
                    right[column][2 * of + 8 * r + 1] = pair.y;
                }
            }
        }
        for (uint32_t i = 0; i < 4; i++) {
            float sum = 0.0f;
            for (uint32_t k = 0; k < 16; k++) sum += left[i / 2][k] * right[i % 2][k];
            c[i] += sum;
        }
        return 0;
    });
}

void Bf16::mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated_mma<Bf16>(c, a, b0, b1);
}
void F16::mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated_mma<F16>(c, a, b0, b1);
}

DEVICE void emulated_ldmatrix(uint32_t (&r)[4], const void *row, bool transposed) {
    if (reinterpret_cast<uintptr_t>(row) % 16)
        emulator::fail("ldmatrix: a row that is not aligned to 16 bytes");
    emulator::exchange(~0u, transposed ? "ldmatrix.trans" : "ldmatrix",
        static_cast<const uint16_t *>(row), [&](auto rows) {
            const uint32_t g = emulator::thread().number % 32 / 4,
                           t = emulator::thread().number % 4;
            for (uint32_t m = 0; m < 4; m++) {
                const uint32_t low = transposed ? rows[8 * m + 2 * t][g] : rows[8 * m + g][2 * t];
                const uint32_t high =
                    transposed ? rows[8 * m + 2 * t + 1][g] : rows[8 * m + g][2 * t + 1];
                r[m] = low | high << 16;
            }
            return 0;
        });
}

DEVICE void ldmatrix(uint32_t (&r)[4], const void *row) { emulated_ldmatrix(r, row, false); }
DEVICE void ldmatrix_transposed(uint32_t (&r)[4], const void *row) {
    emulated_ldmatrix(r, row, true);
}

DEVICE void stmatrix(void *row, const uint32_t (&r)[4]) {
    if (reinterpret_cast<uintptr_t>(row) % 16)
        emulator::fail("stmatrix: a row that is not aligned to 16 bytes");
    emulator::exchange(~0u, "stmatrix", static_cast<uint16_t *>(row), [&](auto rows) {
        const uint32_t g = emulator::thread().number % 32 / 4, t = emulator::thread().number % 4;
        for (uint32_t m = 0; m < 4; m++) memcpy(rows[8 * m + g] + 2 * t, r + m, 4);
        return 0;
    });
}

/// Copies land as late as allowed, at the wait for them. Code that reads too early finds the old
/// contents.
DEVICE void emulated_copy(void *to, const void *from, size_t bytes, bool valid) {
    if (reinterpret_cast<uintptr_t>(to) % bytes ||
        (valid && reinterpret_cast<uintptr_t>(from) % bytes))
        emulator::fail("cp.async: an address that is not aligned to %zu bytes", bytes);
    auto &groups = emulator::thread().copies;
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back({to, from, valid ? bytes : 0, bytes});
}

DEVICE void copy_16(void *to, const void *from, bool valid) { emulated_copy(to, from, 16, valid); }
DEVICE void copy_4(void *to, const void *from, bool valid) { emulated_copy(to, from, 4, valid); }
DEVICE void copies_commit() {
    auto &groups = emulator::thread().copies;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}
template <int N>
DEVICE void copies_wait() {
    emulator::finish_copies(N);
}

#endif
