// Optimizer steps over flat ranges of f32, in place and in one pass. The pass also rounds the new
// parameters to the weights that a 16-bit model computes with. Parameters stored as bf16 weights
// and remainders (remainders.cuh) are joined in registers.
//
// AdamW: Loshchilov & Hutter 2019; SGD with momentum: as in PyTorch. A thread has four elements of
// every operand in flight. One launch steps many consecutive parameters: a table says where their
// weight decay changes. The gradient factor, and the decision to step at all, may come from a
// verdict on the device (cuda/squares.cu), so that nothing waits for it. AdamW's moments may be
// kept in bf16, the second rounded stochastically (stochastic_rounding.cuh): another table has the
// parameters of the rounding.
#include "stochastic_rounding.cuh"
#include "remainders.cuh"
#include "inplace.cuh"

constexpr uint32_t SEGMENTS = 64;

/// Ranges of a step, in order, and the weight-decay factor of each.
struct Segments {
    uint64_t ends[SEGMENTS];
    float decay[SEGMENTS];
    uint32_t count;
    uint32_t unused;

    /// The first element of a segment.
    DEVICE uint64_t begin(uint32_t segment) const { return segment == 0 ? 0 : ends[segment - 1]; }

    /// The segment of element `at`.
    DEVICE uint32_t find(uint64_t at) const {
        uint32_t low = 0, high = count - 1;
        while (low < high) {
            const uint32_t middle = (low + high) / 2;
            if (at < ends[middle]) high = middle;
            else low = middle + 1;
        }
        return low;
    }
};

/// The rounding of each segment's elements.
struct StochasticRoundings {
    static constexpr bool THERE = true;
    StochasticRounding of[SEGMENTS];
};

/// No stochastic rounding.
struct NoStochasticRounding {
    static constexpr bool THERE = false;
};

// Fused operations are written explicitly: an element has the same bits in a vector and alone, for
// every partition of a range.
struct AdamW {
    float grad_scale, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, step_size;

    /// `keep` is 1 − lr·weight_decay.
    DEVICE void step(float &p, float g, float &m, float &v, float keep) const {
        g = __fmul_rn(g, grad_scale);
        m = __fmaf_rn(one_minus_beta1, __fsub_rn(g, m), m);
        v = __fmaf_rn(beta2, v, __fmul_rn(__fmul_rn(one_minus_beta2, g), g));
        const float denominator = __fmaf_rn(__fsqrt_rn(v), inv_sqrt_correction2, eps);
        p = __fmaf_rn(-step_size, __fdiv_rn(m, denominator), __fmul_rn(p, keep));
    }
};

struct Sgd {
    float grad_scale, lr, momentum;

    DEVICE void step(float &p, float g, float &buffer, float &, float decay) const {
        buffer = __fmaf_rn(momentum, buffer, __fmaf_rn(decay, p, __fmul_rn(grad_scale, g)));
        p = __fmaf_rn(-lr, buffer, p);
    }
};

/// Parameters without weights.
struct Alone {
    float *p;

    DEVICE bool vectors() const { return aligned(p); }
    DEVICE Vector<float> four(uint64_t at) const { return load_own(p + at); }
    DEVICE void put_four(uint64_t at, const Vector<float> &values) const {
        store_vector(p + at, values);
    }
    DEVICE float one(uint64_t at) const { return p[at]; }
    DEVICE void put_one(uint64_t at, float value) const { p[at] = value; }
};

/// Parameters, and their rounded copies as weights.
template <class W>
struct Rounded {
    float *p;
    W *weight;

    DEVICE bool vectors() const {
        return aligned(p) && reinterpret_cast<uintptr_t>(weight) % (4 * sizeof(W)) == 0;
    }
    DEVICE Vector<float> four(uint64_t at) const { return load_own(p + at); }
    DEVICE void put_four(uint64_t at, const Vector<float> &values) const {
        store_vector(p + at, values);
        if constexpr (sizeof(W) == 4) {
            store_vector(weight + at, values);
        } else {
            W four[4];
#pragma unroll
            for (int i = 0; i < 4; i++) four[i] = from_float<W>(values[i]);
            uint2 raw;
            memcpy(&raw, four, 8);
            *reinterpret_cast<uint2 *>(weight + at) = raw;
        }
    }
    DEVICE float one(uint64_t at) const { return p[at]; }
    DEVICE void put_one(uint64_t at, float value) const {
        p[at] = value, weight[at] = from_float<W>(value);
    }
};

/// Parameters in two halves; the high halves are the weights.
struct InSplitFloats {
    uint16_t *low, *high;

    DEVICE bool vectors() const { return fours(high, low); }
    DEVICE Vector<float> four(uint64_t at) const { return load_four(high + at, low + at); }
    DEVICE void put_four(uint64_t at, const Vector<float> &values) const {
        store_four(high + at, low + at, values);
    }
    DEVICE float one(uint64_t at) const { return SplitFloat{high[at], low[at]}.value(); }
    DEVICE void put_one(uint64_t at, float value) const {
        const SplitFloat split = SplitFloat::of(value);
        high[at] = split.high, low[at] = split.low;
    }
};

/// States in f32, or in bf16: rounded to nearest, or by random words.
template <class T>
struct Kept {
    static constexpr bool NARROW = sizeof(T) == 2;
    T *at;

    DEVICE bool vectors() const { return reinterpret_cast<uintptr_t>(at) % (4 * sizeof(T)) == 0; }
    DEVICE void four(uint64_t i, float *values) const {
        T raw[4];
        if constexpr (NARROW) {
            const uint2 words = *reinterpret_cast<const uint2 *>(at + i);
            memcpy(raw, &words, 8);
        } else {
            const uint4 words = *reinterpret_cast<const uint4 *>(at + i);
            memcpy(raw, &words, 16);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) values[j] = to_float(raw[j]);
    }
    DEVICE void put_four(uint64_t i, const float *values, const uint32_t *words) const {
        T raw[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            raw[j] = rounded(values[j], words == nullptr ? nullptr : words + j);
        if constexpr (NARROW) {
            uint2 all;
            memcpy(&all, raw, 8);
            *reinterpret_cast<uint2 *>(at + i) = all;
        } else {
            uint4 all;
            memcpy(&all, raw, 16);
            *reinterpret_cast<uint4 *>(at + i) = all;
        }
    }
    DEVICE float one(uint64_t i) const { return to_float(at[i]); }
    DEVICE void put_one(uint64_t i, float value, const uint32_t *word) const {
        at[i] = rounded(value, word);
    }
    DEVICE static T rounded(float value, const uint32_t *word) {
        if constexpr (NARROW) {
            if (word != nullptr) {
                const uint16_t bits = round_by(value, *word);
                T out;
                memcpy(&out, &bits, 2);
                return out;
            }
        }
        return from_float<T>(value);
    }
};

/// The second state of a rule that has only one.
struct NoState {
    DEVICE bool vectors() const { return true; }
    DEVICE void four(uint64_t, float *values) const {
#pragma unroll
        for (int j = 0; j < 4; j++) values[j] = 0.0f;
    }
    DEVICE void put_four(uint64_t, const float *, const uint32_t *) const {}
    DEVICE float one(uint64_t) const { return 0.0f; }
    DEVICE void put_one(uint64_t, float, const uint32_t *) const {}
};

// `verdict` is null if the rule holds the gradient factor.
template <class Rule, class Parameters, class First, class Second, class Rounding>
DEVICE void step(Rule rule, const float *verdict, const Segments &segments,
    const Rounding &roundings, Parameters parameters, const float *g, First first, Second second,
    uint64_t n) {
    const uint64_t at = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (at >= n) return;
    if (verdict != nullptr) {
        if (verdict[2] == 0.0f) return;
        rule.grad_scale = verdict[1];
    }
    uint32_t segment = segments.find(at);
    const bool in_one = at + 4 <= n && at + 4 <= segments.ends[segment];
    if (in_one && parameters.vectors() && aligned(g) && first.vectors() && second.vectors()) {
        const Vector<float> ps = parameters.four(at), gs = load_vector(g + at);
        const float decay = segments.decay[segment];
        float new_p[4], new_first[4], new_second[4];
        first.four(at, new_first);
        second.four(at, new_second);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            new_p[i] = ps[i];
            rule.step(new_p[i], gs[i], new_first[i], new_second[i], decay);
        }
        parameters.put_four(at, Vector<float>::of([&](int i) { return new_p[i]; }));
        first.put_four(at, new_first, nullptr);
        if constexpr (Rounding::THERE) {
            uint32_t words[4];
            roundings.of[segment].words(
                at - segments.begin(segment), 4, [&](int i, uint32_t word) { words[i] = word; });
            second.put_four(at, new_second, words);
        } else {
            second.put_four(at, new_second, nullptr);
        }
        return;
    }
    for (uint64_t i = at; i < at + 4 && i < n; i++) {
        while (i >= segments.ends[segment]) segment++;
        float new_p = parameters.one(i), new_first = first.one(i), new_second = second.one(i);
        rule.step(new_p, g[i], new_first, new_second, segments.decay[segment]);
        parameters.put_one(i, new_p);
        first.put_one(i, new_first, nullptr);
        if constexpr (Rounding::THERE) {
            roundings.of[segment].words(i - segments.begin(segment), 1,
                [&](int, uint32_t word) { second.put_one(i, new_second, &word); });
        } else {
            second.put_one(i, new_second, nullptr);
        }
    }
}

// `P *p, W *weight` are the launch's parameters; `parameters` may use only some of them. `M`, `V`
// are the types of moments.
#define LAUNCHED_WITH(P, W) P *p, [[maybe_unused]] W *weight
#define ADAMW_IN(P, W, suffix, parameters, M, V)                                                   \
    KERNEL(adamw_##suffix, const AdamW rule, const float *verdict,                                 \
        const __grid_constant__ Segments segments, LAUNCHED_WITH(P, W), const float *g, M *m,      \
        V *v, uint64_t n) {                                                                        \
        step(rule, verdict, segments, NoStochasticRounding{}, parameters, g, Kept<M>{m},           \
            Kept<V>{v}, n);                                                                        \
    }
#define ADAMW_STOCHASTIC(P, W, suffix, parameters, M)                                              \
    KERNEL(adamw_##suffix, const AdamW rule, const float *verdict,                                 \
        const __grid_constant__ Segments segments,                                                 \
        const __grid_constant__ StochasticRoundings roundings, LAUNCHED_WITH(P, W),                \
        const float *g, M *m, bf16 *v, uint64_t n) {                                               \
        step(rule, verdict, segments, roundings, parameters, g, Kept<M>{m}, Kept<bf16>{v}, n);     \
    }
#define KERNELS_OF(P, W, suffix, ...)                                                              \
    ADAMW_IN(P, W, suffix, (__VA_ARGS__), float, float)                                            \
    ADAMW_IN(P, W, suffix##_m16, (__VA_ARGS__), bf16, float)                                       \
    ADAMW_STOCHASTIC(P, W, suffix##_v16, (__VA_ARGS__), float)                                     \
    ADAMW_STOCHASTIC(P, W, suffix##_m16_v16, (__VA_ARGS__), bf16)                                  \
    KERNEL(sgd_##suffix, const Sgd rule, const float *verdict,                                     \
        const __grid_constant__ Segments segments, LAUNCHED_WITH(P, W), const float *g,            \
        float *buffer, uint64_t n) {                                                               \
        step(rule, verdict, segments, NoStochasticRounding{}, (__VA_ARGS__), g,                    \
            Kept<float>{buffer}, NoState{}, n);                                                    \
    }
KERNELS_OF(float, void, none, Alone{p})
KERNELS_OF(uint16_t, uint16_t, split, InSplitFloats{p, weight})
#define KERNELS(T, suffix) KERNELS_OF(float, T, suffix, Rounded<T>{p, weight})
FOR_DTYPES(KERNELS)
