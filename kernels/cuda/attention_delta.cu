// Σ dout·out of every query and head, which backward subtracts from the gradients of its weights: a warp per row of a head.
#include "attention.cuh"

namespace {

template <class T>
DEVICE void delta(const Attention &call, const T *dout, const T *out, float *to) {
    const uint32_t lane = threadIdx.x % 32, heads = call.groups * call.heads_per_group;
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; // (position, sample, head)
    if (row >= static_cast<uint64_t>(call.s) * call.b * heads) return;
    dout += row * call.head_dim;
    out += row * call.head_dim;
    float sum = 0.0f;
    if (call.aligned && aligned(dout, out)) {
        for (uint32_t i = lane * VECTOR<T>; i < call.head_dim; i += 32 * VECTOR<T>) {
            const Vector<T> a = load_vector(dout + i), b = load_vector(out + i);
#pragma unroll
            for (int e = 0; e < VECTOR<T>; e++) sum += a[e] * b[e];
        }
    } else {
        for (uint32_t i = lane; i < call.head_dim; i += 32) sum += to_float(dout[i]) * to_float(out[i]);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    const uint64_t position = row / heads / call.b, sample = row / heads % call.b, head = row % heads;
    if (lane == 0) to[statistics_at(call, sample, head) + position] = sum;
}

} // namespace

#define KERNELS(T, suffix) \
    KERNEL(attention_delta_##suffix, const Attention call, const T *dout, const T *out, float *to) { delta(call, dout, out, to); }
FOR_DTYPES(KERNELS)
