// Σ dout·out of every query and head, which backward subtracts from the gradients of its weights.
// Some lanes of a warp share each row of a head.
#include "attention.cuh"

namespace {

/// `lanes`, a power of two up to 32, share a row. `next` holds counters for the kernels that
/// follow; `cleared` of them are set to zero, at most as many as there are rows plus two.
template <class T>
DEVICE void delta(const Attention &call, const T *dout, const T *out, float *to, uint32_t *next,
    uint32_t cleared, uint32_t lanes) {
    const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < cleared;
        i += threads)
        next[i] = 0;
    const uint32_t lane = threadIdx.x % lanes, heads = call.groups * call.heads_per_group;
    const uint64_t rows = static_cast<uint64_t>(call.s) * call.b * heads;
    // (position, sample, head)
    const uint64_t row = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
    float sum = 0.0f;
    if (row < rows) {
        dout += row * call.head_dim;
        out += row * call.head_dim;
        if (call.aligned && aligned(dout, out)) {
            for (uint32_t i = lane * VECTOR<T>; i < call.head_dim; i += lanes * VECTOR<T>) {
                const Vector<T> a = load_vector(dout + i), b = load_vector(out + i);
#pragma unroll
                for (int e = 0; e < VECTOR<T>; e++) sum += a[e] * b[e];
            }
        } else {
            for (uint32_t i = lane; i < call.head_dim; i += lanes)
                sum += to_float(dout[i]) * to_float(out[i]);
        }
    }
    // Whole warps reach this point, even if only some lanes have rows.
    for (uint32_t distance = lanes / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
    const uint64_t position = row / heads / call.b, sample = row / heads % call.b,
                   head = row % heads;
    if (lane == 0 && row < rows) to[statistics_at(call, sample, head) + position] = sum;
}

} // namespace

#define KERNELS(T, suffix)                                                                         \
    KERNEL(attention_delta_##suffix, const Attention call, const T *dout, const T *out, float *to, \
        uint32_t *next, uint32_t cleared, uint32_t lanes) {                                        \
        delta(call, dout, out, to, next, cleared, lanes);                                          \
    }
FOR_DTYPES(KERNELS)
