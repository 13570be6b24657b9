// Optimizer steps over flat ranges of f32, in place and in one pass, which also rounds the new parameters to the weights that a 16-bit model
// computes with. Parameters that are bf16 weights and what these lack of f32 (halves.cuh) are put together in registers.
//
// AdamW: Loshchilov & Hutter 2019; SGD with momentum: as PyTorch's. A thread has four elements of every operand in flight. One launch steps
// many parameters that lie one after the other: a table says where their weight decay changes. The factor on gradients, and whether to step at
// all, may be a verdict that lies on the device (cuda/squares.cu): then nobody waits for it.
#include "halves.cuh"
#include "inplace.cuh"

constexpr uint32_t SEGMENTS = 64;

/// Ranges of a step, in order, and what each does with its weights.
struct Segments {
    uint64_t ends[SEGMENTS];
    float decay[SEGMENTS];
    uint32_t count;
    uint32_t unused;

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

// What is fused is written so: an element has the same bits in a vector and by itself, however a range is cut.
struct AdamW {
    static constexpr bool TWO_STATES = true;
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
    static constexpr bool TWO_STATES = false;
    float grad_scale, lr, momentum;

    DEVICE void step(float &p, float g, float &buffer, float &, float decay) const {
        buffer = __fmaf_rn(momentum, buffer, __fmaf_rn(decay, p, __fmul_rn(grad_scale, g)));
        p = __fmaf_rn(-lr, buffer, p);
    }
};

/// Parameters by themselves.
struct Alone {
    float *p;

    DEVICE bool vectors() const { return aligned(p); }
    DEVICE Vector<float> four(uint64_t at) const { return load_own(p + at); }
    DEVICE void put_four(uint64_t at, const Vector<float> &values) const { store_vector(p + at, values); }
    DEVICE float one(uint64_t at) const { return p[at]; }
    DEVICE void put_one(uint64_t at, float value) const { p[at] = value; }
};

/// Parameters, and weights that are their rounding.
template <class W>
struct Rounded {
    float *p;
    W *weight;

    DEVICE bool vectors() const { return aligned(p) && reinterpret_cast<uintptr_t>(weight) % (4 * sizeof(W)) == 0; }
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
    DEVICE void put_one(uint64_t at, float value) const { p[at] = value, weight[at] = from_float<W>(value); }
};

/// Parameters in halves, of which the high ones are the weights.
struct InHalves {
    uint16_t *low, *high;

    DEVICE bool vectors() const { return fours(high, low); }
    DEVICE Vector<float> four(uint64_t at) const { return load_four(high + at, low + at); }
    DEVICE void put_four(uint64_t at, const Vector<float> &values) const { store_four(high + at, low + at, values); }
    DEVICE float one(uint64_t at) const { return Halves{high[at], low[at]}.value(); }
    DEVICE void put_one(uint64_t at, float value) const {
        const Halves halves = Halves::of(value);
        high[at] = halves.high, low[at] = halves.low;
    }
};

// `second` is null for rules with one state, `verdict` where the rule has the factor on gradients.
template <class Rule, class Parameters>
DEVICE void step(Rule rule, const float *verdict, const Segments &segments, Parameters parameters, const float *g, float *first,
                 float *second, uint64_t n) {
    constexpr bool TWO = Rule::TWO_STATES;
    const uint64_t at = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (at >= n) return;
    if (verdict != nullptr) {
        if (verdict[2] == 0.0f) return;
        rule.grad_scale = verdict[1];
    }
    uint32_t segment = segments.find(at);
    const bool in_one = at + 4 <= n && at + 4 <= segments.ends[segment];
    bool whole = in_one && parameters.vectors() && aligned(g, first);
    if (TWO) whole = whole && aligned(second);
    if (whole) {
        const Vector<float> ps = parameters.four(at), gs = load_vector(g + at), firsts = load_own(first + at);
        const Vector<float> seconds = TWO ? load_own(second + at) : ps;
        const float decay = segments.decay[segment];
        float new_p[4], new_first[4], new_second[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            new_p[i] = ps[i], new_first[i] = firsts[i], new_second[i] = seconds[i];
            rule.step(new_p[i], gs[i], new_first[i], new_second[i], decay);
        }
        parameters.put_four(at, Vector<float>::of([&](int i) { return new_p[i]; }));
        store_vector(first + at, Vector<float>::of([&](int i) { return new_first[i]; }));
        if (TWO) store_vector(second + at, Vector<float>::of([&](int i) { return new_second[i]; }));
        return;
    }
    for (uint64_t i = at; i < at + 4 && i < n; i++) {
        while (i >= segments.ends[segment]) segment++;
        float new_p = parameters.one(i), new_first = first[i], new_second = TWO ? second[i] : 0.0f;
        rule.step(new_p, g[i], new_first, new_second, segments.decay[segment]);
        parameters.put_one(i, new_p);
        first[i] = new_first;
        if (TWO) second[i] = new_second;
    }
}

// `P *p, W *weight` are what the launch has of parameters.
#define KERNELS_OF(P, W, suffix, ...)                                                                                                \
    KERNEL(adamw_##suffix, const AdamW rule, const float *verdict, const __grid_constant__ Segments segments, P *p, W *weight,       \
           const float *g, float *m, float *v, uint64_t n) {                                                                         \
        step(rule, verdict, segments, __VA_ARGS__, g, m, v, n);                                                                      \
    }                                                                                                                                \
    KERNEL(sgd_##suffix, const Sgd rule, const float *verdict, const __grid_constant__ Segments segments, P *p, W *weight,           \
           const float *g, float *buffer, uint64_t n) {                                                                              \
        step(rule, verdict, segments, __VA_ARGS__, g, buffer, static_cast<float *>(nullptr), n);                                     \
    }
KERNELS_OF(float, void, none, Alone{p})
KERNELS_OF(uint16_t, uint16_t, halves, InHalves{p, weight})
#define KERNELS(T, suffix) KERNELS_OF(float, T, suffix, Rounded<T>{p, weight})
FOR_DTYPES(KERNELS)
