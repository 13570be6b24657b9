// GELU (Hendrycks & Gimpel 2016, tanh approximation), ReLU, squared ReLU (So et al. 2021) and
// SwiGLU (Shazeer 2020), forward and backward.
//
// Memory-bound: a thread loads 16 bytes of each operand, computes in f32, and rounds once.
#include "device.cuh"
#include "inplace.cuh"

DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// 2·√(2/π)·(x + 0.044715·x³). Its sigmoid is (1 + tanh(√(2/π)·…))/2.
constexpr float C = 1.5957691216057308f;
constexpr float C3 = 0.07135481627159646f;

struct Gelu {
    DEVICE static float value(float x) { return x * sigmoid(x * (C + C3 * x * x)); }
    DEVICE static float gradient(float dy, float x) {
        // From |x| = 22 on the sigmoid is 0 or 1, so the factor that could overflow is multiplied
        // by 0.
        const float square = x * x > 500.0f ? 500.0f : x * x;
        const float s = sigmoid(x * (C + C3 * square));
        return dy * (s + x * s * (1.0f - s) * (C + 3.0f * C3 * square));
    }
};

// NaN stays NaN.
struct Relu {
    DEVICE static float value(float x) { return x < 0.0f ? 0.0f : x; }
    DEVICE static float gradient(float dy, float x) { return x <= 0.0f ? 0.0f : dy; }
};

struct SquaredRelu {
    DEVICE static float value(float x) {
        x = Relu::value(x);
        return x * x;
    }
    DEVICE static float gradient(float dy, float x) {
        x = Relu::value(x);
        return dy * (x + x);
    }
};

// Number of vectors of each operand that a thread has in flight.
constexpr int UNROLL = 2;

// y may be x.
template <class Activation, class T>
DEVICE void forward(const T *x, T *y, uint64_t n) {
    constexpr int V = VECTOR<T>;
    const uint64_t first =
        (static_cast<uint64_t>(blockIdx.x) * blockDim.x * UNROLL + threadIdx.x) * V;
    const uint64_t step = static_cast<uint64_t>(blockDim.x) * V;
    if (aligned(x, y) && first + (UNROLL - 1) * step + V <= n) {
        Vector<T> in[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) in[u] = load_own(x + first + u * step);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            store_vector(y + first + u * step,
                Vector<T>::of([&](int i) { return Activation::value(in[u][i]); }));
        return;
    }
    for (int u = 0; u < UNROLL; u++)
        for (uint64_t i = first + u * step; i < first + u * step + V && i < n; i++)
            y[i] = from_float<T>(Activation::value(to_float(x[i])));
}

// dx may be dy.
template <class Activation, class T>
DEVICE void backward(const T *dy, const T *x, T *dx, uint64_t n) {
    constexpr int V = VECTOR<T>;
    const uint64_t first =
        (static_cast<uint64_t>(blockIdx.x) * blockDim.x * UNROLL + threadIdx.x) * V;
    const uint64_t step = static_cast<uint64_t>(blockDim.x) * V;
    if (aligned(dy, x, dx) && first + (UNROLL - 1) * step + V <= n) {
        Vector<T> in[UNROLL], up[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            in[u] = load_vector(x + first + u * step);
            up[u] = load_own(dy + first + u * step);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            store_vector(dx + first + u * step,
                Vector<T>::of([&](int i) { return Activation::gradient(up[u][i], in[u][i]); }));
        return;
    }
    for (int u = 0; u < UNROLL; u++)
        for (uint64_t i = first + u * step; i < first + u * step + V && i < n; i++)
            dx[i] = from_float<T>(Activation::gradient(to_float(dy[i]), to_float(x[i])));
}

struct Swiglu {
    DEVICE static float value(float gate, float up) { return gate * sigmoid(gate) * up; }
    DEVICE static float of_gate(float gate, float up, float dy) {
        const float s = sigmoid(gate);
        return dy * up * (s * (1.0f + gate * (1.0f - s)));
    }
    DEVICE static float of_up(float gate, float dy) { return dy * (gate * sigmoid(gate)); }
};

// blockIdx.x is the row, blockIdx.y the part of the row: no division. x is [rows, 2f] = gate | up,
// y [rows, f].
template <class T>
DEVICE void swiglu(const T *x, T *y, uint64_t f) {
    constexpr int V = VECTOR<T>;
    const T *gate = x + blockIdx.x * 2 * f, *up = gate + f;
    T *out = y + blockIdx.x * f;
    const uint64_t at = (static_cast<uint64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * V;
    if (aligned(gate, up, out) && at + V <= f) {
        const Vector<T> g = load_vector(gate + at), u = load_vector(up + at);
        store_vector(out + at, Vector<T>::of([&](int i) { return Swiglu::value(g[i], u[i]); }));
        return;
    }
    for (uint64_t i = at; i < at + V && i < f; i++)
        out[i] = from_float<T>(Swiglu::value(to_float(gate[i]), to_float(up[i])));
}

template <class T>
DEVICE void swiglu_backward(const T *dy, const T *x, T *dx, uint64_t f) {
    constexpr int V = VECTOR<T>;
    const T *gate = x + blockIdx.x * 2 * f, *up = gate + f, *grad = dy + blockIdx.x * f;
    T *dgate = dx + blockIdx.x * 2 * f, *dup = dgate + f;
    const uint64_t at = (static_cast<uint64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * V;
    if (aligned(gate, up, grad, dgate, dup) && at + V <= f) {
        const Vector<T> g = load_vector(gate + at), u = load_vector(up + at),
                        d = load_vector(grad + at);
        store_vector(
            dgate + at, Vector<T>::of([&](int i) { return Swiglu::of_gate(g[i], u[i], d[i]); }));
        store_vector(dup + at, Vector<T>::of([&](int i) { return Swiglu::of_up(g[i], d[i]); }));
        return;
    }
    for (uint64_t i = at; i < at + V && i < f; i++) {
        const float g = to_float(gate[i]), u = to_float(up[i]), d = to_float(grad[i]);
        dgate[i] = from_float<T>(Swiglu::of_gate(g, u, d));
        dup[i] = from_float<T>(Swiglu::of_up(g, d));
    }
}

#define OF(Activation, name, T, suffix)                                                            \
    KERNEL(name##_##suffix, const T *x, T *y, uint64_t n) { forward<Activation>(x, y, n); }        \
    KERNEL(name##_backward_##suffix, const T *dy, const T *x, T *dx, uint64_t n) {                 \
        backward<Activation>(dy, x, dx, n);                                                        \
    }

#define KERNELS(T, suffix)                                                                         \
    OF(Gelu, gelu, T, suffix)                                                                      \
    OF(Relu, relu, T, suffix)                                                                      \
    OF(SquaredRelu, squared_relu, T, suffix)                                                       \
    KERNEL(swiglu_##suffix, const T *x, T *y, uint64_t f) { swiglu(x, y, f); }                     \
    KERNEL(swiglu_backward_##suffix, const T *dy, const T *x, T *dx, uint64_t f) {                 \
        swiglu_backward(dy, x, dx, f);                                                             \
    }
FOR_DTYPES(KERNELS)
