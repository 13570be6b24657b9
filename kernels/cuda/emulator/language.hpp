// Declarations that nvcc has built in, for g++, implemented by the emulator: qualifiers, built-in
// variables, vector types and intrinsics.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator.hpp"
#include "narrow.hpp"

#define __device__
#define __host__
#define __global__
#define __constant__ static const
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

#define threadIdx (::emulator::thread().index)
#define blockIdx (::emulator::block().index)
#define blockDim (::emulator::block().size)
#define gridDim (::emulator::block().grid)
static constexpr int warpSize = 32;

using std::max;
using std::min;

// Vector types.
#define EMULATOR_VECTOR(T, name, size)                                                       \
    struct alignas(sizeof(T) * 2) name##2 { T x, y; };                                       \
    struct name##3 { T x, y, z; };                                                           \
    struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) name##4 { T x, y, z, w; };       \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                        \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTOR(float, float, 4)
EMULATOR_VECTOR(double, double, 8)
EMULATOR_VECTOR(int32_t, int, 4)
EMULATOR_VECTOR(uint32_t, uint, 4)
EMULATOR_VECTOR(uint64_t, ulonglong, 8)
#undef EMULATOR_VECTOR

// Barriers, votes and shuffles.
static inline void __syncthreads() { emulator::barrier(0, emulator::block().num_threads, 0, "__syncthreads"); }
static inline int __syncthreads_count(int p) { return static_cast<int>(emulator::barrier(0, emulator::block().num_threads, p != 0, "__syncthreads_count")); }
static inline int __syncthreads_or(int p) { return __syncthreads_count(p) > 0; }
static inline int __syncthreads_and(int p) { return __syncthreads_count(p) == static_cast<int>(emulator::block().num_threads); }
static inline void __syncwarp(uint32_t mask = 0xffffffffu) {
    emulator::exchange(mask, "__syncwarp", 0, [](auto) { return 0; });
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline uint32_t __activemask() {
    emulator::fail("__activemask depends on how threads happen to be scheduled; name the mask");
}

template <class T>
static inline T __shfl_sync(uint32_t mask, T value, int from, int width = 32) {
    const uint32_t lane = emulator::thread().number % 32, base = lane & ~static_cast<uint32_t>(width - 1);
    return emulator::exchange(mask, "__shfl_sync", value, [=](auto all) { return all[base + (static_cast<uint32_t>(from) & static_cast<uint32_t>(width - 1))]; });
}
template <class T>
static inline T __shfl_xor_sync(uint32_t mask, T value, int with, int width = 32) {
    const uint32_t lane = emulator::thread().number % 32, other = lane ^ static_cast<uint32_t>(with);
    const bool inside = other / static_cast<uint32_t>(width) <= lane / static_cast<uint32_t>(width);
    return emulator::exchange(mask, "__shfl_xor_sync", value, [=](auto all) { return all[inside ? other : lane]; });
}
template <class T>
static inline T __shfl_down_sync(uint32_t mask, T value, uint32_t by, int width = 32) {
    const uint32_t lane = emulator::thread().number % 32, w = static_cast<uint32_t>(width);
    return emulator::exchange(mask, "__shfl_down_sync", value, [=](auto all) { return all[lane % w + by < w ? lane + by : lane]; });
}
template <class T>
static inline T __shfl_up_sync(uint32_t mask, T value, uint32_t by, int width = 32) {
    const uint32_t lane = emulator::thread().number % 32, w = static_cast<uint32_t>(width);
    return emulator::exchange(mask, "__shfl_up_sync", value, [=](auto all) { return all[lane % w >= by ? lane - by : lane]; });
}
static inline uint32_t __ballot_sync(uint32_t mask, int p) {
    return emulator::exchange(mask, "__ballot_sync", static_cast<uint32_t>(p != 0), [=](auto all) {
        uint32_t votes = 0;
        for (uint32_t l = 0; l < 32; l++)
            if (mask >> l & 1) votes |= all[l] << l;
        return votes;
    });
}
static inline int __any_sync(uint32_t mask, int p) { return __ballot_sync(mask, p) != 0; }
static inline int __all_sync(uint32_t mask, int p) { return __ballot_sync(mask, p) == mask; }

// Atomics: blocks run on several system threads.
template <class T>
static inline T emulator_atomic(T *at, T (*f)(T, T), T value) {
    T old;
    __atomic_load(at, &old, __ATOMIC_RELAXED);
    for (;;) {
        T next = f(old, value);
        if (__atomic_compare_exchange(at, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return old;
    }
}
template <class T>
static inline T atomicAdd(T *at, std::common_type_t<T> value) {
    static_assert(std::is_integral<T>::value, "sums of floats by atomics depend on the order of threads");
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
template <class T>
static inline T atomicOr(T *at, std::common_type_t<T> value) {
    return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}
template <class T>
static inline T atomicMax(T *at, std::common_type_t<T> value) {
    return emulator_atomic<T>(at, [](T a, T b) { return a < b ? b : a; }, value);
}
template <class T>
static inline T atomicMin(T *at, std::common_type_t<T> value) {
    return emulator_atomic<T>(at, [](T a, T b) { return b < a ? b : a; }, value);
}
template <class T>
static inline T atomicExch(T *at, std::common_type_t<T> value) {
    return emulator_atomic<T>(at, [](T, T b) { return b; }, value);
}
template <class T>
static inline T atomicCAS(T *at, std::common_type_t<T> expected, std::common_type_t<T> value) {
    T old = expected;
    __atomic_compare_exchange(at, &old, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return old;
}

// Bits.
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<uint32_t>(x)) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline uint32_t __brev(uint32_t x) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32); }
static inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64); }
static inline uint32_t __float_as_uint(float x) { return emulator_bits<uint32_t>(x); }
static inline int __float_as_int(float x) { return emulator_bits<int>(x); }
static inline float __uint_as_float(uint32_t x) { return emulator_bits<float>(x); }
static inline float __int_as_float(int x) { return emulator_bits<float>(x); }
static inline int64_t __double_as_longlong(double x) { return emulator_bits<int64_t>(x); }
static inline double __longlong_as_double(int64_t x) { return emulator_bits<double>(x); }
static inline float __uint2float_rn(uint32_t x) { return static_cast<float>(x); }
static inline float __int2float_rn(int x) { return static_cast<float>(x); }

// Arithmetic that rounds as written, and the approximate functions, which are exact here.
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fdividef(float a, float b) { return a / b; }
// Macros, because glibc has functions of these names.
#define __expf(x) std::exp(static_cast<float>(x))
#define __logf(x) std::log(static_cast<float>(x))
#define __log2f(x) std::log2(static_cast<float>(x))
#define __powf(x, y) std::pow(static_cast<float>(x), static_cast<float>(y))
#define __sinf(x) std::sin(static_cast<float>(x))
#define __cosf(x) std::cos(static_cast<float>(x))
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return std::sqrt(a); }
static inline float __double2float_rn(double a) { return static_cast<float>(a); }
static inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

// Loads and stores with hints.
template <class T>
static inline T __ldg(const T *at) { return *at; }
template <class T>
static inline T __ldcs(const T *at) { return *at; }
template <class T>
static inline T __ldcg(const T *at) { return *at; }
template <class T>
static inline void __stcs(T *at, T value) { *at = value; }
template <class T>
static inline void __stcg(T *at, T value) { *at = value; }

static inline void __trap() { emulator::fail("__trap"); }
