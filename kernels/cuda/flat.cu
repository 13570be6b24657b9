// Arithmetic, copies and casts of flat ranges. Memory-bound: a thread has four vectors of 16 bytes
// in flight.
#include "remainders.cuh"
#include "inplace.cuh"

constexpr int UNROLL = 4;

// Calls whole(at) for UNROLL vectors of `V` elements of this thread, `distance` apart; calls one(i)
// for elements that make no whole vector, or for all if operands are not aligned.
template <int V, class Whole, class One>
DEVICE void each(uint64_t n, bool vectors, Whole whole, One one) {
    const uint64_t distance = static_cast<uint64_t>(blockDim.x) * V;
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * distance * UNROLL + threadIdx.x * V;
    if (vectors && first + (UNROLL - 1) * distance + V <= n) {
        whole(first, distance);
        return;
    }
    for (int u = 0; u < UNROLL; u++)
        for (uint64_t i = first + u * distance; i < first + u * distance + V && i < n; i++) one(i);
}

template <class T>
DEVICE void add(T *dst, const T *src, uint64_t n) {
    each<VECTOR<T>>(
        n, aligned(dst, src),
        [&](uint64_t first, uint64_t distance) {
            Vector<T> d[UNROLL], s[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                d[u] = load_own(dst + first + u * distance),
                s[u] = load_vector(src + first + u * distance);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                store_vector(dst + first + u * distance,
                    Vector<T>::of([&](int i) { return d[u][i] + s[u][i]; }));
        },
        [&](uint64_t i) { dst[i] = from_float<T>(to_float(dst[i]) + to_float(src[i])); });
}

template <class T>
DEVICE void scale(T *t, float factor, uint64_t n) {
    each<VECTOR<T>>(
        n, aligned(t),
        [&](uint64_t first, uint64_t distance) {
            Vector<T> v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) v[u] = load_own(t + first + u * distance);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                store_vector(t + first + u * distance,
                    Vector<T>::of([&](int i) { return v[u][i] * factor; }));
        },
        [&](uint64_t i) { t[i] = from_float<T>(to_float(t[i]) * factor); });
}

// Elements of any type of `sizeof(T)` bytes.
template <class T>
DEVICE void zero(T *t, uint64_t n) {
    each<16 / sizeof(T)>(
        n, aligned(t),
        [&](uint64_t first, uint64_t distance) {
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                *reinterpret_cast<uint4 *>(t + first + u * distance) = make_uint4(0, 0, 0, 0);
        },
        [&](uint64_t i) { t[i] = 0; });
}

template <class T>
DEVICE void copy(T *dst, const T *src, uint64_t n) {
    each<16 / sizeof(T)>(
        n, aligned(dst, src),
        [&](uint64_t first, uint64_t distance) {
            uint4 v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                v[u] = __ldg(reinterpret_cast<const uint4 *>(src + first + u * distance));
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                *reinterpret_cast<uint4 *>(dst + first + u * distance) = v[u];
        },
        [&](uint64_t i) { dst[i] = src[i]; });
}

// A step is eight elements: 16 bytes of the narrower dtype, 16 or 32 of the other.
template <class D, class S>
DEVICE void cast(D *dst, const S *src, uint64_t n) {
    constexpr int LOADS = 8 / VECTOR<S>, STORES = 8 / VECTOR<D>;
    each<8>(
        n, aligned(dst, src),
        [&](uint64_t first, uint64_t distance) {
            Vector<S> in[UNROLL][LOADS];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
#pragma unroll
                for (int l = 0; l < LOADS; l++)
                    in[u][l] = load_vector(src + first + u * distance + l * VECTOR<S>);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
#pragma unroll
                for (int s = 0; s < STORES; s++)
                    store_vector(
                        dst + first + u * distance + s * VECTOR<D>, Vector<D>::of([&](int i) {
                            const int at = s * VECTOR<D> + i;
                            return in[u][at / VECTOR<S>][at % VECTOR<S>];
                        }));
        },
        [&](uint64_t i) { dst[i] = from_float<D>(to_float(src[i])); });
}

#define KERNELS(T, suffix)                                                                         \
    KERNEL(add_##suffix, T *dst, const T *src, uint64_t n) { add(dst, src, n); }                   \
    KERNEL(scale_##suffix, T *t, float factor, uint64_t n) { scale(t, factor, n); }
FOR_DTYPES(KERNELS)

#define MOVES(T, size)                                                                             \
    KERNEL(zero_##size, T *t, uint64_t n) { zero(t, n); }                                          \
    KERNEL(copy_##size, T *dst, const T *src, uint64_t n) { copy(dst, src, n); }
MOVES(uint8_t, 1)
MOVES(uint16_t, 2)
MOVES(uint32_t, 4)
MOVES(uint64_t, 8)

#define CASTS(D, to, S, from)                                                                      \
    KERNEL(cast_##from##_##to, D *dst, const S *src, uint64_t n) { cast(dst, src, n); }
    CASTS(float, f32, bf16, bf16) CASTS(float, f32, f16, f16) CASTS(bf16, bf16, float, f32)
        CASTS(bf16, bf16, f16, f16) CASTS(f16, f16, float, f32) CASTS(f16, f16, bf16, bf16)

    // If `low` is null, writes only the high halves.
    KERNEL(split_floats, uint16_t *high, uint16_t *low, const float *values, uint64_t n) {
    each<4>(
        n, aligned(values) && fours(high, low),
        [&](uint64_t first, uint64_t distance) {
            Vector<float> v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) v[u] = load_vector(values + first + u * distance);
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const uint64_t at = first + u * distance;
                if (low != nullptr) {
                    store_four(high + at, low + at, v[u]);
                } else {
                    for (int i = 0; i < 4; i++) high[at + i] = SplitFloat::of(v[u][i]).high;
                }
            }
        },
        [&](uint64_t i) {
            const SplitFloat split = SplitFloat::of(values[i]);
            high[i] = split.high;
            if (low != nullptr) low[i] = split.low;
        });
}
