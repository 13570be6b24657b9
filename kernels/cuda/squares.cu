// Sums of squares in f64, of many tensors at once: fixed blocks of 4096 elements, added up with
// compensation (Neumaier 1974); and the verdict on a step from the resulting norm.
//
// The order of all sums depends on the tensors' sizes alone, so a sum has the same bits wherever
// its tensor lies.
#include "device.cuh"

constexpr uint32_t TENSORS = 128;
// Elements per block of 256 threads: four vectors of four per thread.
constexpr uint32_t BLOCK = 4096;
constexpr uint32_t THREADS = 256;

/// Tensors of one launch: their addresses, elements, and first blocks.
struct Tensors {
    uint64_t address[TENSORS];
    uint64_t size[TENSORS];
    uint32_t first_block[TENSORS];
    uint32_t count, unused;

    DEVICE uint32_t find(uint32_t block) const {
        uint32_t low = 0, high = count - 1;
        while (low < high) {
            const uint32_t middle = (low + high + 1) / 2;
            if (block < first_block[middle]) high = middle - 1;
            else low = middle;
        }
        return low;
    }
};

// The sum over a block's 256 threads, in thread 0.
DEVICE double over_threads(double v, double *slots) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, distance);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = v;
    __syncthreads();
    double sum = 0.0;
    if (threadIdx.x == 0)
        for (uint32_t w = 0; w < THREADS / 32; w++) sum += slots[w];
    return sum;
}

// partials[block] = the sum of its elements' squares. Element i of a block belongs to thread i / 4
// % 256, however it is loaded.
template <class T>
DEVICE void partial_sums(const Tensors &tensors, double *partials) {
    SHARED(double, slots, [THREADS / 32]);
    const uint32_t tensor = tensors.find(blockIdx.x);
    const T *x = reinterpret_cast<const T *>(tensors.address[tensor]);
    const uint64_t n = tensors.size[tensor];
    const uint64_t first =
        static_cast<uint64_t>(blockIdx.x - tensors.first_block[tensor]) * BLOCK + threadIdx.x * 4;
    float v[16];
    if (sizeof(T) == 4 && aligned(x) && first + 3 * 4 * THREADS + 4 <= n) {
        Vector<float> in[4];
#pragma unroll
        for (int u = 0; u < 4; u++)
            in[u] = load_vector(reinterpret_cast<const float *>(x) + first + u * 4 * THREADS);
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = in[i / 4][i % 4];
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const uint64_t at = first + i / 4 * 4 * THREADS + i % 4;
            v[i] = at < n ? to_float(x[at]) : 0.0f;
        }
    }
    double sums[4] = {0.0, 0.0, 0.0, 0.0};
#pragma unroll
    for (int i = 0; i < 16; i++)
        sums[i % 4] += static_cast<double>(v[i]) * static_cast<double>(v[i]);
    const double sum = over_threads((sums[0] + sums[1]) + (sums[2] + sums[3]), slots);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

/// A sum, and the accumulated rounding error of the additions.
struct Compensated {
    double total = 0.0, error = 0.0;

    DEVICE void add(double v) {
        const double next = __dadd_rn(total, v);
        // Knuth's two-sum.
        const double shadow = __dsub_rn(next, total);
        error = __dadd_rn(
            error, __dadd_rn(__dsub_rn(total, __dsub_rn(next, shadow)), __dsub_rn(v, shadow)));
        total = next;
    }

    // If the total is infinite, the error is NaN.
    DEVICE double value() const { return fabs(total) < INFINITY ? total + error : total; }
};

// sums[tensor] = the sum of its blocks' partial sums; blockIdx.x is the tensor.
DEVICE void whole_sums(
    const Tensors &tensors, const double *partials, double *sums, uint32_t num_blocks) {
    SHARED(double, own, [THREADS]);
    const uint32_t first = tensors.first_block[blockIdx.x];
    const uint32_t last =
        blockIdx.x + 1 < tensors.count ? tensors.first_block[blockIdx.x + 1] : num_blocks;
    Compensated sum;
    for (uint32_t b = first + threadIdx.x; b < last; b += THREADS) sum.add(partials[b]);
    own[threadIdx.x] = sum.value();
    __syncthreads();
    if (threadIdx.x > 0) return;
    Compensated total;
    for (uint32_t t = 0; t < THREADS; t++) total.add(own[t]);
    sums[blockIdx.x] = total.value();
}

#define KERNELS(T, suffix)                                                                         \
    KERNEL(sum_of_squares_##suffix, const __grid_constant__ Tensors tensors, double *partials) {   \
        partial_sums<T>(tensors, partials);                                                        \
    }
FOR_DTYPES(KERNELS)

KERNEL(add_squares, const __grid_constant__ Tensors tensors, const double *partials, double *sums,
    uint32_t num_blocks) {
    whole_sums(tensors, partials, sums, num_blocks);
}

// The sum of `values` in order, in thread 0.
DEVICE double in_order(const double *values, uint32_t n, double *slots) {
    double sum = 0.0;
    for (uint32_t first = 0; first < n; first += THREADS) {
        const uint32_t count = min(n - first, THREADS);
        if (threadIdx.x < count) slots[threadIdx.x] = values[first + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0)
            for (uint32_t i = 0; i < count; i++) sum = __dadd_rn(sum, slots[i]);
        __syncthreads();
    }
    return sum;
}

KERNEL(add_in_order, const double *values, uint32_t n, double *sum) {
    SHARED(double, slots, [THREADS]);
    const double total = in_order(values, n, slots);
    if (threadIdx.x == 0) *sum = total;
}

// From parts of the squared norm of gradients that are `loss_scale` times those of the loss: the
// norm, the factor for the gradients, and whether to step (1 or 0). The factor clips to `max_norm`
// (0: never) and divides by the loss scale. Operations are in the CPU's order.
KERNEL(judge, const double *shares, uint32_t n, float max_norm, double loss_scale, float *verdict) {
    SHARED(double, slots, [THREADS]);
    const double total = in_order(shares, n, slots);
    if (threadIdx.x > 0) return;
    const float norm = __double2float_rn(__ddiv_rn(__dsqrt_rn(total), loss_scale));
    const float ratio = __fdiv_rn(max_norm, __fadd_rn(norm, 1e-6f));
    const float clip = max_norm > 0.0f && ratio < 1.0f ? ratio : 1.0f;
    verdict[0] = norm;
    verdict[1] = __double2float_rn(__ddiv_rn(static_cast<double>(clip), loss_scale));
    verdict[2] = norm < INFINITY ? 1.0f : 0.0f;
}
