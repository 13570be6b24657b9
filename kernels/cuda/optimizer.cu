// Optimizer steps over flat ranges of f32, in place and in one pass, which also rounds the new parameters to the weights that a 16-bit model
// computes with.
//
// AdamW: Loshchilov & Hutter 2019; SGD with momentum: as PyTorch's. A thread has four elements of every operand in flight. One launch steps
// many parameters that lie one after the other: a table says where their weight decay changes. The factor on gradients, and whether to step at
// all, may be a verdict that lies on the device (cuda/squares.cu): then nobody waits for it.
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

/// No weights besides the parameters.
struct None {};

// Four neighbouring weights, at a multiple of their size.
template <class W>
DEVICE void store_four(W *at, const Vector<float> &p) {
    if constexpr (sizeof(W) == 4) {
        store_vector(at, p);
    } else {
        W four[4];
#pragma unroll
        for (int i = 0; i < 4; i++) four[i] = from_float<W>(p[i]);
        uint2 raw;
        memcpy(&raw, four, 8);
        *reinterpret_cast<uint2 *>(at) = raw;
    }
}

// `second` is null for rules with one state, `verdict` where the rule has the factor on gradients.
template <class Rule, class W>
DEVICE void step(Rule rule, const float *verdict, const Segments &segments, float *p, W *weight, const float *g, float *first,
                 float *second, uint64_t n) {
    constexpr bool WEIGHT = sizeof(W) > 1, TWO = Rule::TWO_STATES;
    const uint64_t at = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (at >= n) return;
    if (verdict != nullptr) {
        if (verdict[2] == 0.0f) return;
        rule.grad_scale = verdict[1];
    }
    uint32_t segment = segments.find(at);
    const bool in_one = at + 4 <= n && at + 4 <= segments.ends[segment];
    bool whole = in_one && aligned(p, g, first);
    if (TWO) whole = whole && aligned(second);
    if (WEIGHT) whole = whole && reinterpret_cast<uintptr_t>(weight) % (4 * sizeof(W)) == 0;
    if (whole) {
        const Vector<float> ps = load_own(p + at), gs = load_vector(g + at), firsts = load_own(first + at);
        const Vector<float> seconds = TWO ? load_own(second + at) : ps;
        const float decay = segments.decay[segment];
        float new_p[4], new_first[4], new_second[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            new_p[i] = ps[i], new_first[i] = firsts[i], new_second[i] = seconds[i];
            rule.step(new_p[i], gs[i], new_first[i], new_second[i], decay);
        }
        const Vector<float> result = Vector<float>::of([&](int i) { return new_p[i]; });
        store_vector(p + at, result);
        store_vector(first + at, Vector<float>::of([&](int i) { return new_first[i]; }));
        if (TWO) store_vector(second + at, Vector<float>::of([&](int i) { return new_second[i]; }));
        if constexpr (WEIGHT) store_four(weight + at, result);
        return;
    }
    for (uint64_t i = at; i < at + 4 && i < n; i++) {
        while (i >= segments.ends[segment]) segment++;
        float new_p = p[i], new_first = first[i], new_second = TWO ? second[i] : 0.0f;
        rule.step(new_p, g[i], new_first, new_second, segments.decay[segment]);
        p[i] = new_p;
        first[i] = new_first;
        if (TWO) second[i] = new_second;
        if constexpr (WEIGHT) weight[i] = from_float<W>(new_p);
    }
}

#define KERNELS_OF(W, suffix)                                                                                                        \
    KERNEL(adamw_##suffix, const AdamW rule, const float *verdict, const __grid_constant__ Segments segments, float *p, W *weight,   \
           const float *g, float *m, float *v, uint64_t n) {                                                                         \
        step(rule, verdict, segments, p, weight, g, m, v, n);                                                                        \
    }                                                                                                                                \
    KERNEL(sgd_##suffix, const Sgd rule, const float *verdict, const __grid_constant__ Segments segments, float *p, W *weight,       \
           const float *g, float *buffer, uint64_t n) {                                                                              \
        step<Sgd, W>(rule, verdict, segments, p, weight, g, buffer, nullptr, n);                                                     \
    }
KERNELS_OF(None, none)
#define KERNELS(T, suffix) KERNELS_OF(T, suffix)
FOR_DTYPES(KERNELS)
