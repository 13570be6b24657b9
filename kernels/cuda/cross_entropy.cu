// Cross entropy over a vocabulary that is split over ranks (Shoeybi et al. 2019, §3): the local
// computations between the collectives.
//
// The statistics of a row need one pass over it. Every thread keeps the largest logit so far and
// the sum of exponentials relative to it (Milakov & Gimelshein 2018). The block joins these in an
// order that depends on the width alone.
#include "group.cuh"
#include "inplace.cuh"

// Where two kernels compute the same value, they give the same bits: no fusing of operations is
// left to the compiler.

/// eˣ in two operations. __expf has three more, for results below the smallest normal number, which
/// are 0 here.
DEVICE float exponential(float x) { return exp2_fast(__fmul_rn(x, LOG2_E)); }

/// The largest of some numbers, and Σ exp(number − largest); −∞ and 0 if there are none.
struct Online {
    float largest = -INFINITY, sum = 0.0f;

    // The value that exponentials are relative to; 0 while all numbers are −∞, which cannot be
    // subtracted.
    DEVICE static float base(float largest) { return largest == -INFINITY ? 0.0f : largest; }

    template <int N>
    DEVICE void add(const float (&values)[N]) {
        float next = largest;
#pragma unroll
        for (int i = 0; i < N; i++) next = fmaxf(next, values[i]);
        const float from = base(next);
        if (next != largest) {
            sum = __fmul_rn(sum, exponential(largest - from));
            largest = next;
        }
#pragma unroll
        for (int i = 0; i < N; i++) sum += exponential(values[i] - from);
    }
};

/// The result of one pass over a row, equal in all threads of the block.
struct Row {
    float largest, sum;
};

// Statistics of the first `valid` logits of the block's row. A thread has every blockDim.x-th
// vector. It adds 16 logits at a time while it has that many, so the sum's bits do not depend on
// FLIGHT, the number of vectors in flight.
template <class T, bool VECTORS, int FLIGHT>
DEVICE Row read_row(const T *l, uint32_t valid) {
    constexpr int V = VECTOR<T>, GROUP = 16 / V; // vectors added at a time
    static_assert(FLIGHT % GROUP == 0, "whole groups");
    SHARED(float, slots, [2][32]);
    Online own;
    uint32_t done = 0;
    if (VECTORS) {
        done = valid / V * V;
        const uint32_t step = blockDim.x * V;
        for (uint32_t at = threadIdx.x * V; at < done; at += FLIGHT * step) {
            Vector<T> in[FLIGHT];
#pragma unroll
            for (int f = 0; f < FLIGHT; f++)
                if (at + f * step < done) in[f] = load_own(l + at + f * step);
#pragma unroll
            for (int g = 0; g < FLIGHT; g += GROUP) {
                if (at + (g + GROUP - 1) * step < done) {
                    float values[16];
#pragma unroll
                    for (int i = 0; i < 16; i++) values[i] = in[g + i / V][i % V];
                    own.add(values);
                } else {
#pragma unroll
                    for (int f = g; f < g + GROUP - 1; f++) {
                        if (at + f * step >= done) break;
                        float values[V];
#pragma unroll
                        for (int i = 0; i < V; i++) values[i] = in[f][i];
                        own.add(values);
                    }
                }
            }
        }
    }
    for (uint32_t c = done + threadIdx.x; c < valid; c += blockDim.x) {
        const float values[1] = {to_float(l[c])};
        own.add(values);
    }
    const float largest = over_block<Max>(own.largest, slots[0]);
    // If every logit is −∞, or one is +∞, the sum is NaN.
    const float mine =
        own.largest == -INFINITY ? own.sum : __fmul_rn(own.sum, exponential(own.largest - largest));
    const float sum = over_block<Add>(mine, slots[1]);
    return {largest, valid > 0 && largest == -INFINITY ? NAN : sum};
}

/// A target's column if it is one of this rank's first `valid` columns, else `valid`.
DEVICE uint32_t target_column(uint32_t target, uint32_t first_column, uint32_t valid) {
    return target >= first_column ? min(target - first_column, valid) : valid;
}

// max[row] = the largest of the first `valid` logits; sums[row] = Σ exp(l − max); sums[rows + row]
// = l_target − max, or 0 if the target is not one of them. One block per row.
template <class T, bool VECTORS>
DEVICE void row_statistics(const T *logits, const uint32_t *targets, float *max, float *sums,
    uint32_t rows, uint32_t v, uint32_t first_column, uint32_t valid) {
    const uint32_t row = blockIdx.x;
    const T *l = logits + static_cast<uint64_t>(row) * v;
    const Row of = read_row<T, VECTORS, 16 / VECTOR<T>>(l, valid);
    if (threadIdx.x > 0) return;
    const uint32_t target = target_column(targets[row], first_column, valid);
    max[row] = of.largest;
    sums[row] = of.sum;
    sums[rows + row] = target < valid ? to_float(l[target]) - of.largest : 0.0f;
}

// Moves sums from this rank's maxima to those of all ranks.
DEVICE void move_sums(float *sums, const float *own, const float *all, const uint32_t *targets,
    uint32_t rows, uint32_t first_column, uint32_t valid) {
    const uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    // With no columns the sum is 0 and the maximum −∞.
    if (own[row] > -INFINITY) sums[row] *= exponential(own[row] - all[row]);
    if (targets[row] >= first_column && targets[row] - first_column < valid)
        sums[rows + row] += own[row] - all[row];
}

// total += Σ mask·(ln(Σ exp) − target) over the rows, in f64; the order depends only on their
// number. One block.
DEVICE void sum_losses(double *total, const float *sums, const float *mask, uint32_t rows) {
    SHARED(double, own, [256]);
    double sum = 0.0;
    for (uint32_t row = threadIdx.x; row < rows; row += blockDim.x)
        if (mask[row] != 0.0f)
            sum += static_cast<double>(logf(sums[row]) - sums[rows + row]) *
                   static_cast<double>(mask[row]);
    own[threadIdx.x] = sum;
    __syncthreads();
    for (uint32_t half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) own[threadIdx.x] += own[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *total += own[0];
}

/// (exp(l − max) / sum_exp − [target]) · scale, and 0 in padding columns.
struct Gradient {
    float largest, factor, scale;
    uint32_t target, valid;

    // exp(l − max) / sum_exp · scale
    DEVICE float share(float logit) const { return exponential(logit - largest) * factor; }

    // No branches: they would cost more than they save in padding columns.
    DEVICE float operator()(float logit, uint32_t column) const {
        const float p = share(logit), g = column == target ? __fsub_rn(p, scale) : p;
        return column < valid ? g : 0.0f;
    }

    // Whether `count` columns are neither the target nor padding, as most are. Then `share` is the
    // whole gradient.
    DEVICE bool plain(uint32_t column, uint32_t count) const {
        return column + count <= valid && target - column >= count;
    }
};

// The gradient of logits with known statistics. blockIdx.x is the row, blockIdx.y the part of a
// row. May be in place.
template <class In, class Out, bool VECTORS>
DEVICE void gradient(const In *logits, Out *dlogits, const float *max, const float *sum_exp,
    const uint32_t *targets, const float *row_scale, uint32_t v, uint32_t first_column,
    uint32_t valid) {
    constexpr int V = VECTOR<Out>, LOADS = V / VECTOR<In>;
    const uint32_t row = blockIdx.x, at = (blockIdx.y * blockDim.x + threadIdx.x) * V;
    if (at >= v) return;
    const In *l = logits + static_cast<uint64_t>(row) * v + at;
    Out *d = dlogits + static_cast<uint64_t>(row) * v + at;
    const float scale = row_scale[row];
    const Gradient of{max[row], scale / sum_exp[row], scale,
        target_column(targets[row], first_column, valid), valid};
    if (VECTORS) {
        Vector<In> in[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) in[i] = load_own(l + i * VECTOR<In>);
        const auto logit = [&](int i) { return in[i / VECTOR<In>][i % VECTOR<In>]; };
        store_vector(d, of.plain(at, V)
                            ? Vector<Out>::of([&](int i) { return of.share(logit(i)); })
                            : Vector<Out>::of([&](int i) { return of(logit(i), at + i); }));
    } else {
        for (int i = 0; i < V && at + i < v; i++)
            d[i] = from_float<Out>(of(to_float(l[i]), at + i));
    }
}

// Stores four adjacent elements, which are hardly needed again soon, with a streaming hint.
template <class T>
DEVICE void stream_four(T *at, const Vector<T> &v) {
    if constexpr (sizeof(T) == 4) __stcs(reinterpret_cast<uint4 *>(at), v.raw);
    else __stcs(reinterpret_cast<uint2 *>(at), make_uint2(v.raw.x, v.raw.y));
}

// Statistics and gradient of whole rows, one block per row: sums as by `row_statistics`, and the
// result of `gradient` on them, bit for bit. May be in place.
//
// The row is read twice, but comes from memory once: a multiprocessor's rows are still in its L1,
// or in L2, which has room for the rows of all. The second pass goes backwards. If a row is too
// long for a cache, its end is still there and is read before it is evicted. Vectors that the
// second pass has read or written may be evicted first.
template <class Out, int FLIGHT>
DEVICE void row_at_once(const float *logits, const uint32_t *targets, const float *row_scale,
    Out *dlogits, float *sums, uint32_t rows, uint32_t v, uint32_t first_column, uint32_t valid) {
    constexpr uint32_t AGAIN = 4; // vectors in flight in the second pass, which waits less
    const uint32_t row = blockIdx.x;
    const float *l = logits + static_cast<uint64_t>(row) * v;
    Out *d = dlogits + static_cast<uint64_t>(row) * v;
    const uint32_t target = target_column(targets[row], first_column, valid);
    const float target_logit = target < valid ? l[target] : 0.0f, scale = row_scale[row];
    const Row statistics = read_row<float, true, FLIGHT>(l, valid);
    if (threadIdx.x == 0) {
        sums[row] = statistics.sum;
        sums[rows + row] = target < valid ? target_logit - statistics.largest : 0.0f;
    }
    const Gradient of{statistics.largest, scale / statistics.sum, scale, target, valid};
    // This thread has the vectors first, first + blockDim.x, …: `own` of them.
    const uint32_t first = threadIdx.x, all = v / 4;
    const uint32_t own = first < all ? (all - first - 1) / blockDim.x + 1 : 0;
    const auto column = [&](uint32_t k) { return (first + k * blockDim.x) * 4; };
    for (uint32_t left = own; left > 0; left -= min(left, AGAIN)) {
        Vector<float> in[AGAIN];
#pragma unroll
        for (uint32_t f = 0; f < AGAIN; f++)
            if (f < left)
                in[f] = {__ldcs(reinterpret_cast<const uint4 *>(l + column(left - 1 - f)))};
#pragma unroll
        for (uint32_t f = 0; f < AGAIN; f++) {
            if (f >= left) break;
            const uint32_t at = column(left - 1 - f);
            stream_four(d + at,
                of.plain(at, 4)
                    ? Vector<Out>::of([&](int i) { return i < 4 ? of.share(in[f][i & 3]) : 0.0f; })
                    : Vector<Out>::of(
                          [&](int i) { return i < 4 ? of(in[f][i & 3], at + i) : 0.0f; }));
        }
    }
}

#define STATISTICS(name, T, VECTORS)                                                               \
    KERNEL_BOUNDS(512, 3, name, const T *logits, const uint32_t *targets, float *max, float *sums, \
        uint32_t rows, uint32_t v, uint32_t first_column, uint32_t valid) {                        \
        row_statistics<T, VECTORS>(logits, targets, max, sums, rows, v, first_column, valid);      \
    }
#define GRADIENT(name, In, Out, VECTORS)                                                           \
    KERNEL(name, const In *logits, Out *dlogits, const float *max, const float *sum_exp,           \
        const uint32_t *targets, const float *row_scale, uint32_t v, uint32_t first_column,        \
        uint32_t valid) {                                                                          \
        gradient<In, Out, VECTORS>(                                                                \
            logits, dlogits, max, sum_exp, targets, row_scale, v, first_column, valid);            \
    }
// BLOCKS blocks fit on a multiprocessor, limited by registers: one with 16 vectors in flight, two
// with 8, three with 4.
#define AT_ONCE(name, Out, BLOCKS, FLIGHT)                                                         \
    KERNEL_BOUNDS(512, BLOCKS, name, const float *logits, const uint32_t *targets,                 \
        const float *row_scale, Out *dlogits, float *sums, uint32_t rows, uint32_t v,              \
        uint32_t first_column, uint32_t valid) {                                                   \
        row_at_once<Out, FLIGHT>(                                                                  \
            logits, targets, row_scale, dlogits, sums, rows, v, first_column, valid);              \
    }
#define KERNELS(T, suffix)                                                                         \
    AT_ONCE(cross_entropy_at_once1_##suffix, T, 1, 16)                                             \
    AT_ONCE(cross_entropy_at_once2_##suffix, T, 2, 8)                                              \
    AT_ONCE(cross_entropy_at_once3_##suffix, T, 3, 4)                                              \
    STATISTICS(row_statistics_##suffix, T, true)                                                   \
    STATISTICS(row_statistics_any_##suffix, T, false)                                              \
    GRADIENT(cross_entropy_backward_##suffix, T, T, true)                                          \
    GRADIENT(cross_entropy_backward_any_##suffix, T, T, false)                                     \
    GRADIENT(cross_entropy_backward_into_##suffix, float, T, true)                                 \
    GRADIENT(cross_entropy_backward_into_any_##suffix, float, T, false)
FOR_DTYPES(KERNELS)

KERNEL(add_losses, double *total, const float *sums, const float *mask, uint32_t rows) {
    sum_losses(total, sums, mask, rows);
}

KERNEL(rebase, float *sums, const float *own, const float *all, const uint32_t *targets,
    uint32_t rows, uint32_t first_column, uint32_t valid) {
    move_sums(sums, own, all, targets, rows, first_column, valid);
}
