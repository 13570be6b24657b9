// Cross entropy over a vocabulary that is cut over ranks (Shoeybi et al. 2019, §3): the pieces between the collectives.
//
// Statistics of a row come from one reading of it: every thread keeps the largest logit that it has seen and the sum of exponentials
// relative to it (Milakov & Gimelshein 2018), and the block joins them in an order that depends on the width alone.
#include "group.cuh"
#include "inplace.cuh"

/// The largest of some numbers, and Σ exp(number − largest); of none, −∞ and 0.
struct Online {
    float largest = -INFINITY, sum = 0.0f;

    // What exponentials are relative to: while all is −∞ that is no number to subtract.
    DEVICE static float base(float largest) { return largest == -INFINITY ? 0.0f : largest; }

    template <int N>
    DEVICE void add(const float (&values)[N]) {
        float next = largest;
#pragma unroll
        for (int i = 0; i < N; i++) next = fmaxf(next, values[i]);
        const float from = base(next);
        if (next != largest) {
            sum *= __expf(largest - from);
            largest = next;
        }
#pragma unroll
        for (int i = 0; i < N; i++) sum += __expf(values[i] - from);
    }
};

// max[row] = the largest of the first `valid` logits; sums[row] = Σ exp(l − max), sums[rows + row] = l_target − max, or 0 where the
// target is not one of them. A row to a block.
template <class T, bool VECTORS>
DEVICE void row_statistics(const T *logits, const uint32_t *targets, float *max, float *sums, uint32_t rows, uint32_t v, uint32_t first_column,
                           uint32_t valid) {
    constexpr int V = VECTOR<T>, FLIGHT = 16 / V;  // vectors in flight
    SHARED(float, slots, [2][32]);
    const uint32_t row = blockIdx.x;
    const T *l = logits + static_cast<uint64_t>(row) * v;
    Online own;
    uint32_t done = 0;
    if (VECTORS) {
        done = valid / V * V;
        uint32_t at = threadIdx.x * V;
        const uint32_t step = blockDim.x * V;
        for (; at + (FLIGHT - 1) * step < done; at += FLIGHT * step) {
            Vector<T> in[FLIGHT];
#pragma unroll
            for (int f = 0; f < FLIGHT; f++) in[f] = load_vector(l + at + f * step);
            float values[FLIGHT * V];
#pragma unroll
            for (int i = 0; i < FLIGHT * V; i++) values[i] = in[i / V][i % V];
            own.add(values);
        }
        for (; at < done; at += step) {
            const Vector<T> in = load_vector(l + at);
            float values[V];
#pragma unroll
            for (int i = 0; i < V; i++) values[i] = in[i];
            own.add(values);
        }
    }
    for (uint32_t c = done + threadIdx.x; c < valid; c += blockDim.x) {
        const float values[1] = {to_float(l[c])};
        own.add(values);
    }
    const float largest = over_block<Max>(own.largest, slots[0]);
    // Where every logit is −∞, or one is +∞, the sum is no number.
    const float mine = own.largest == -INFINITY ? own.sum : own.sum * __expf(own.largest - largest);
    float sum = over_block<Add>(mine, slots[1]);
    if (valid > 0 && largest == -INFINITY) sum = NAN;
    if (threadIdx.x == 0) {
        const uint32_t column = targets[row] - first_column;  // large where the target lies before
        max[row] = largest;
        sums[row] = sum;
        sums[rows + row] = targets[row] >= first_column && column < valid ? to_float(l[column]) - largest : 0.0f;
    }
}

// Moves sums from own maxima to those of all ranks.
DEVICE void move_sums(float *sums, const float *own, const float *all, const uint32_t *targets, uint32_t rows, uint32_t first_column,
                      uint32_t valid) {
    const uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    // Of no column the sum is 0, and its maximum −∞.
    if (own[row] > -INFINITY) sums[row] *= __expf(own[row] - all[row]);
    if (targets[row] >= first_column && targets[row] - first_column < valid) sums[rows + row] += own[row] - all[row];
}

// total += Σ mask·(ln(Σ exp) − target) over the rows, in f64, in an order that their number alone decides; one block.
DEVICE void sum_losses(double *total, const float *sums, const float *mask, uint32_t rows) {
    SHARED(double, own, [256]);
    double sum = 0.0;
    for (uint32_t row = threadIdx.x; row < rows; row += blockDim.x)
        if (mask[row] != 0.0f) sum += static_cast<double>(logf(sums[row]) - sums[rows + row]) * static_cast<double>(mask[row]);
    own[threadIdx.x] = sum;
    __syncthreads();
    for (uint32_t half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) own[threadIdx.x] += own[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *total += own[0];
}

// gradient = (exp(l − max) / sum_exp − [target]) · scale, and 0 in padding columns. Rows are blockIdx.x, parts of a row blockIdx.y. May be in
// place.
template <class In, class Out, bool VECTORS>
DEVICE void gradient(const In *logits, Out *dlogits, const float *max, const float *sum_exp, const uint32_t *targets, const float *row_scale,
                     uint32_t v, uint32_t first_column, uint32_t valid) {
    constexpr int V = VECTOR<Out>, LOADS = V / VECTOR<In>;
    const uint32_t row = blockIdx.x, at = (blockIdx.y * blockDim.x + threadIdx.x) * V;
    if (at >= v) return;
    const In *l = logits + static_cast<uint64_t>(row) * v + at;
    Out *d = dlogits + static_cast<uint64_t>(row) * v + at;
    const float largest = max[row], scale = row_scale[row], factor = scale / sum_exp[row];
    const uint32_t target = targets[row] >= first_column ? targets[row] - first_column : valid;
    const auto of = [&](float logit, uint32_t column) {
        if (column >= valid) return 0.0f;
        const float p = __expf(logit - largest) * factor;
        return column == target ? p - scale : p;
    };
    if (VECTORS) {
        Vector<In> in[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) in[i] = load_own(l + i * VECTOR<In>);
        store_vector(d, Vector<Out>::of([&](int i) { return of(in[i / VECTOR<In>][i % VECTOR<In>], at + i); }));
    } else {
        for (int i = 0; i < V && at + i < v; i++) d[i] = from_float<Out>(of(to_float(l[i]), at + i));
    }
}

#define STATISTICS(name, T, VECTORS)                                                                                                  \
    KERNEL_BOUNDS(512, 3, name, const T *logits, const uint32_t *targets, float *max, float *sums, uint32_t rows, uint32_t v,         \
                  uint32_t first_column, uint32_t valid) {                                                                            \
        row_statistics<T, VECTORS>(logits, targets, max, sums, rows, v, first_column, valid);                                         \
    }
#define GRADIENT(name, In, Out, VECTORS)                                                                                              \
    KERNEL(name, const In *logits, Out *dlogits, const float *max, const float *sum_exp, const uint32_t *targets,                     \
           const float *row_scale, uint32_t v, uint32_t first_column, uint32_t valid) {                                               \
        gradient<In, Out, VECTORS>(logits, dlogits, max, sum_exp, targets, row_scale, v, first_column, valid);                        \
    }
#define KERNELS(T, suffix)                                                         \
    STATISTICS(row_statistics_##suffix, T, true)                                   \
    STATISTICS(row_statistics_any_##suffix, T, false)                              \
    GRADIENT(cross_entropy_backward_##suffix, T, T, true)                          \
    GRADIENT(cross_entropy_backward_any_##suffix, T, T, false)                     \
    GRADIENT(cross_entropy_backward_into_##suffix, float, T, true)                 \
    GRADIENT(cross_entropy_backward_into_any_##suffix, float, T, false)
FOR_DTYPES(KERNELS)

KERNEL(add_losses, double *total, const float *sums, const float *mask, uint32_t rows) { sum_losses(total, sums, mask, rows); }

KERNEL(rebase, float *sums, const float *own, const float *all, const uint32_t *targets, uint32_t rows, uint32_t first_column, uint32_t valid) {
    move_sums(sums, own, all, targets, rows, first_column, valid);
}
