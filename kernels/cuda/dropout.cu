// Dropout (Srivastava et al. 2014) fused with bias and residual: y = residual + dropout(x + bias).
//
// The mask is the one of `kernels::ops::dropout`, bit for bit: an element's word is Philox at
// counter (global token, hidden index / 4). A thread takes 16 bytes, which one or two Philox blocks
// cover.
#include "divider.cuh"
#include "inplace.cuh"
#include "philox.cuh"

constexpr int SAMPLES = 64;

/// Place of the rows of [s, b, h] in the global batch, and the parameters of dropout.
struct Mask {
    // Two words of Philox's key, then two of its counter; with step_and_samples, their inputs other
    // than the step.
    uint32_t key[4];
    uint32_t threshold; // words below are dropped; 0 if there is no mask
    float scale;        // 1 / (1 − p)
    uint64_t first;     // position of the first row in its sequence
    uint64_t seq_len;
    uint64_t samples[SAMPLES]; // global numbers of samples first_sample and following
    uint32_t first_sample, num_samples;
    // The training step and the samples' numbers, low words first, or null.
    const uint2 *step_and_samples;

    DEVICE uint64_t token(uint32_t s, uint32_t b) const {
        uint64_t sample;
        if (step_and_samples) {
            const uint2 words = step_and_samples[1 + b];
            sample = static_cast<uint64_t>(words.y) << 32 | words.x;
        } else {
            sample = samples[b - first_sample];
        }
        return sample * seq_len + first + s;
    }

    DEVICE uint4 derived_key() const {
        const uint4 given = make_uint4(key[0], key[1], key[2], key[3]);
        return step_and_samples ? derive_key(given, step_and_samples[0]) : given;
    }

    /// The words of four elements, starting at element 4·block of the row; `key` is the derived
    /// key.
    DEVICE static uint4 words(const uint4 &key, uint64_t token, uint32_t block) {
        const uint4 counter = make_uint4(
            static_cast<uint32_t>(token), static_cast<uint32_t>(token >> 32), block, key.z);
        return philox4x32(counter, make_uint2(key.x, key.y));
    }

    /// A dropped element is 0 even where it was not finite.
    DEVICE float keep(float x, uint32_t word) const { return word < threshold ? 0.0f : x * scale; }
};

DEVICE uint32_t word_of(const uint4 &words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Each item is 16 bytes of a row. All addresses are multiples of 16 bytes.
template <class T>
DEVICE void vectors(const T *x, const T *bias, const T *residual, T *y, uint32_t items,
    const Divider per_row, const Divider batch, const Mask &mask) {
    constexpr int V = VECTOR<T>;
    const uint32_t item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= items) return;
    const uint64_t at = static_cast<uint64_t>(item) * V;
    uint32_t in_row = item;
    const uint32_t row = per_row.split(in_row);
    uint32_t b = row;
    const uint32_t s = batch.split(b);
    if (mask.threshold > 0 && b - mask.first_sample >= mask.num_samples) return;
    const Vector<T> in = load_own(x + at), around = residual ? load_vector(residual + at) : in;
    const Vector<T> shift = bias ? load_vector(bias + in_row * V) : in;
    uint4 words[V / 4];
    if (mask.threshold > 0) {
        const uint64_t token = mask.token(s, b);
        const uint4 key = mask.derived_key();
#pragma unroll
        for (int w = 0; w < V / 4; w++) words[w] = Mask::words(key, token, in_row * (V / 4) + w);
    }
    store_vector(y + at, Vector<T>::of([&](int i) {
        float v = bias ? in[i] + shift[i] : in[i];
        if (mask.threshold > 0) v = mask.keep(v, word_of(words[i / 4], i % 4));
        return residual ? v + around[i] : v;
    }));
}

// As `vectors`, for any width and alignment: an item is four elements of a row, or the rest of it.
template <class T>
DEVICE void fours(const T *x, const T *bias, const T *residual, T *y, uint32_t items, uint32_t h,
    const Divider per_row, const Divider batch, const Mask &mask) {
    const uint32_t item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= items) return;
    uint32_t in_row = item;
    const uint32_t row = per_row.split(in_row);
    uint32_t b = row;
    const uint32_t s = batch.split(b);
    if (mask.threshold > 0 && b - mask.first_sample >= mask.num_samples) return;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (mask.threshold > 0) words = Mask::words(mask.derived_key(), mask.token(s, b), in_row);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t c = in_row * 4 + i;
        if (c >= h) break;
        const uint64_t at = static_cast<uint64_t>(row) * h + c;
        float v = to_float(x[at]);
        if (bias) v += to_float(bias[c]);
        if (mask.threshold > 0) v = mask.keep(v, word_of(words, i));
        if (residual) v += to_float(residual[at]);
        y[at] = from_float<T>(v);
    }
}

#define KERNELS(T, suffix)                                                                         \
    KERNEL(bias_dropout_add_##suffix, const T *x, const T *bias, const T *residual, T *y,          \
        uint32_t items, const Divider per_row, const Divider batch,                                \
        const __grid_constant__ Mask mask) {                                                       \
        vectors(x, bias, residual, y, items, per_row, batch, mask);                                \
    }                                                                                              \
    KERNEL(bias_dropout_add_any_##suffix, const T *x, const T *bias, const T *residual, T *y,      \
        uint32_t items, uint32_t h, const Divider per_row, const Divider batch,                    \
        const __grid_constant__ Mask mask) {                                                       \
        fours(x, bias, residual, y, items, h, per_row, batch, mask);                               \
    }
FOR_DTYPES(KERNELS)
