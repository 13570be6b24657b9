// The wgmma.mma_async instructions of Hopper (sm_90a) that kernels use: products of 16 along k by
// the 128 threads of a warpgroup. C [64, N] consists of fragments of each warp's 16 rows, as in
// mma.m16n8k16. A is [64, 16], by its descriptor or as such fragments in registers; B is [N, 16],
// by its descriptor. For weights, B is [16, N]; then A may also be [16, 64].
#pragma once

#include <cstdint>

template <class E, int N>
struct Wgmma;

#define C_1(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define C_8(n)                                                                                     \
    C_1(n), C_1(n + 1), C_1(n + 2), C_1(n + 3), C_1(n + 4), C_1(n + 5), C_1(n + 6), C_1(n + 7)
#define C_64 C_8(0)
#define C_128 C_8(0), C_8(8)
#define OPERANDS_64                                                                                \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "  \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, "                                                \
    "%29, %30, %31}"
#define OPERANDS_128                                                                               \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "  \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, "                                                \
    "%29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "   \
    "%47, %48, %49, %50, %51, %52, %53, %54, %55, "                                                \
    "%56, %57, %58, %59, %60, %61, %62, %63}"

// Operands after C are numbered from C's number of registers on: A, one (R0) or four (R0 to R3),
// then B. The old C is read if READ is "eq", and not if it is "ne". The flags: keep the signs of A
// and B (1, 1), then whether operands in shared memory are transposed.
#define WGMMA_OF_TILES(TYPE, N, READ, R0, R1, TURNED)                                              \
    asm volatile("{.reg .pred p; setp." READ ".b32 p, 0, 0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " OPERANDS_##N  \
        ", " R0 ", " R1 ", p, 1, 1, " TURNED ", " TURNED ";}"                                      \
        : C_##N                                                                                    \
        : "l"(a), "l"(b))
#define WGMMA_OF_REGISTERS(TYPE, N, R0, R1, R2, R3, R4)                                            \
    asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0;\n"                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " OPERANDS_##N  \
        ", {" R0 ", " R1 ", " R2 ", " R3 "}, " R4 ", p, 1, 1, 1;}"                                 \
        : C_##N                                                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define WGMMA(E, TYPE, N, R0, R1, R2, R3, R4)                                                      \
    template <>                                                                                    \
    struct Wgmma<E, N> {                                                                           \
        /* C = A · Bᵀ: the old C is not read. */                                                   \
        __device__ __forceinline__ static void assign(                                             \
            float (&c)[N / 8][4], uint64_t a, uint64_t b) {                                        \
            WGMMA_OF_TILES(TYPE, N, "ne", R0, R1, "0");                                            \
        }                                                                                          \
        /* C += A · Bᵀ */                                                                          \
        __device__ __forceinline__ static void add(float (&c)[N / 8][4], uint64_t a, uint64_t b) { \
            WGMMA_OF_TILES(TYPE, N, "eq", R0, R1, "0");                                            \
        }                                                                                          \
        /* C = Aᵀ · B */                                                                           \
        __device__ __forceinline__ static void assign_turned(                                      \
            float (&c)[N / 8][4], uint64_t a, uint64_t b) {                                        \
            WGMMA_OF_TILES(TYPE, N, "ne", R0, R1, "1");                                            \
        }                                                                                          \
        /* C += Aᵀ · B */                                                                          \
        __device__ __forceinline__ static void add_turned(                                         \
            float (&c)[N / 8][4], uint64_t a, uint64_t b) {                                        \
            WGMMA_OF_TILES(TYPE, N, "eq", R0, R1, "1");                                            \
        }                                                                                          \
        /* C += A · B */                                                                           \
        __device__ __forceinline__ static void add_weighed(                                        \
            float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {                            \
            WGMMA_OF_REGISTERS(TYPE, N, R0, R1, R2, R3, R4);                                       \
        }                                                                                          \
    };

WGMMA(Bf16, "bf16", 64, "%32", "%33", "%34", "%35", "%36")
WGMMA(Bf16, "bf16", 128, "%64", "%65", "%66", "%67", "%68")
WGMMA(F16, "f16", 64, "%32", "%33", "%34", "%35", "%36")
WGMMA(F16, "f16", 128, "%64", "%65", "%66", "%67", "%68")

#undef C_1
#undef C_8
#undef C_64
#undef C_128
#undef OPERANDS_64
#undef OPERANDS_128
#undef WGMMA_OF_TILES
#undef WGMMA_OF_REGISTERS
#undef WGMMA
