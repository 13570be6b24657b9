// The basis of every kernel, and the only place that knows whether it is compiled for a GPU or for
// the emulator: qualifiers, types that tensors are stored in, conversions, and loads and stores of
// 16 bytes.
//
// KERNEL(name, parameters…) { … } defines a kernel that Rust launches by its name. Kernels are
// one-dimensional in threads.
#pragma once

#ifdef EMULATED
#include "../emulator/language.hpp"
#define DEVICE inline
/// The list of this file's kernels, in which the program finds them.
extern "C" {
::emulator::Kernel *EMULATED_KERNELS = nullptr;
}
#define KERNEL_BOUNDS(threads, blocks, name, ...)                                                  \
    extern "C" void name(__VA_ARGS__);                                                             \
    static ::emulator::Registered name##_registered(EMULATED_KERNELS, #name, name);                \
    extern "C" void name(__VA_ARGS__)
/// SHARED(float, tile, [32][33]); declares shared memory. In the emulator it initially holds NaNs.
#define SHARED(type, name, dimensions)                                                             \
    static thread_local type name dimensions;                                                      \
    ::emulator::poison_once(&name, sizeof(name))
#define DYNAMIC_SHARED(name) unsigned char *const name = ::emulator::dynamic_shared()
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
using bf16 = __nv_bfloat16;
using f16 = __half;
#define DEVICE __device__ __forceinline__
#define KERNEL_BOUNDS(threads, blocks, name, ...)                                                  \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
#define SHARED(type, name, dimensions) __shared__ type name dimensions
/// The dynamic shared memory of the launch, aligned to 1024 bytes as tensor copies with swizzling
/// require.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#endif

/// Kernels of at most 256 threads. For other limits: KERNEL_BOUNDS(threads, blocks per
/// multiprocessor, name, …).
#define KERNEL(name, ...) KERNEL_BOUNDS(256, 1, name, __VA_ARGS__)

/// Calls KERNELS(type, suffix) for every float dtype of tensors on a GPU.
#define FOR_DTYPES(KERNELS) KERNELS(float, f32) KERNELS(bf16, bf16) KERNELS(f16, f16)

DEVICE float to_float(float x) { return x; }
#ifdef EMULATED
DEVICE float to_float(bf16 x) { return emulator_float(x); }
DEVICE float to_float(f16 x) { return emulator_float(x); }
#else
DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
DEVICE float to_float(f16 x) { return __half2float(x); }
#endif

constexpr float LOG2_E = 1.4426950408889634f;

/// 2ˣ to 2⁻²² relative; results below the smallest normal number are 0.
#ifdef EMULATED
DEVICE float exp2_fast(float x) {
    const float y = std::exp2(x);
    return y < 0x1p-126f ? 0.0f : y;
}
#else
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

/// `x` rounded to nearest even.
template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
    return x;
}
#ifdef EMULATED
template <>
DEVICE bf16 from_float<bf16>(float x) {
    return emulator_bf16(x);
}
template <>
DEVICE f16 from_float<f16>(float x) {
    return emulator_f16(x);
}
#else
template <>
DEVICE bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
DEVICE f16 from_float<f16>(float x) {
    return __float2half_rn(x);
}
#endif

template <class T>
constexpr bool IS_BF16 = false;
template <>
constexpr bool IS_BF16<bf16> = true;

/// Number of elements of type T in the 16 bytes that a thread loads at once.
template <class T>
constexpr int VECTOR = 16 / sizeof(T);

/// 16 bytes of elements in registers.
template <class T>
struct Vector {
    uint4 raw;

    DEVICE float operator[](int i) const {
        if constexpr (IS_BF16<T>) {
            // The second of a pair is already in its place; extracting it alone would shift it
            // there and back.
            const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
            const uint32_t bits = i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16;
            float value;
            memcpy(&value, &bits, 4);
            return value;
        }
        return to_float(at(i));
    }

    DEVICE T at(int i) const {
        T value;
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
        if constexpr (sizeof(T) == 4) {
            memcpy(&value, &words[i], 4);
        } else {
            const uint16_t half = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
            memcpy(&value, &half, 2);
        }
        return value;
    }

    /// The values of `f(i)`, rounded.
    template <class F>
    DEVICE static Vector of(F f) {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            if constexpr (sizeof(T) == 4) {
                const T value = from_float<T>(f(w));
                memcpy(&words[w], &value, 4);
            } else {
                const T low = from_float<T>(f(2 * w)), high = from_float<T>(f(2 * w + 1));
                uint16_t halves[2];
                memcpy(&halves[0], &low, 2);
                memcpy(&halves[1], &high, 2);
                words[w] = static_cast<uint32_t>(halves[1]) << 16 | halves[0];
            }
        }
        return {make_uint4(words[0], words[1], words[2], words[3])};
    }
};

/// Loads 16 bytes that nothing writes during the kernel, from an address that is a multiple of 16.
template <class T>
DEVICE Vector<T> load_vector(const T *at) {
    return {__ldg(reinterpret_cast<const uint4 *>(at))};
}

template <class T>
DEVICE void store_vector(T *at, const Vector<T> &v) {
    *reinterpret_cast<uint4 *>(at) = v.raw;
}

/// Whether all these addresses are multiples of 16.
template <class... P>
DEVICE bool aligned(const P *...pointers) {
    return ((... | reinterpret_cast<uintptr_t>(pointers)) & 15) == 0;
}
