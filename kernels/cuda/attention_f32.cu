// Attention forward and backward for f32, with f32 multiplications and additions: tensor cores
// would round operands to 11 bits.
//
// The passes are the same as for 16-bit tensors, over square tiles in shared memory. With 256
// threads, thread 16y + x has rows y, y + 16 … and columns x, x + 16 … of a tile of scores. Of a
// product with values it has the same rows and columns 4x …, 4x + 64 …
#include "attention.cuh"

namespace {

/// Queries and keys per tile.
template <int DIM>
constexpr int TILE = DIM <= 128 ? 32 : 16;

/// Row stride for DIM columns, in elements: eight rows begin in eight different 16-byte groups of
/// shared-memory banks.
template <int DIM>
constexpr int STEP = DIM + 4;

/// Rows of a head in global memory.
struct Rows {
    const float *at;
    size_t stride;
};

/// Copies the rows of a tile from `first` on. Rows beyond the sequence's end and columns beyond the
/// last are zero.
template <int DIM>
DEVICE void load(float *tile, const Rows &rows, uint32_t first, const Attention &call) {
    for (uint32_t i = threadIdx.x; i < TILE<DIM> * DIM; i += blockDim.x) {
        const uint32_t row = first + i / DIM, column = i % DIM;
        const bool valid = row < call.s && column < call.head_dim;
        tile[i / DIM * STEP<DIM> + column] = valid ? rows.at[row * rows.stride + column] : 0.0f;
    }
}

/// Inner products of this thread's rows of `a` and its rows of `b`.
template <int DIM, int R>
DEVICE void multiply(float (&c)[R][R], const float *a, const float *b) {
    const uint32_t y = threadIdx.x / 16, x = threadIdx.x % 16;
    for (int i = 0; i < R; i++)
        for (int j = 0; j < R; j++) c[i][j] = 0.0f;
#pragma unroll 4
    for (int k = 0; k < DIM; k += 4) {
        float4 left[R], right[R];
#pragma unroll
        for (int i = 0; i < R; i++) {
            left[i] = *reinterpret_cast<const float4 *>(a + (y + 16 * i) * STEP<DIM> + k);
            right[i] = *reinterpret_cast<const float4 *>(b + (x + 16 * i) * STEP<DIM> + k);
        }
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int j = 0; j < R; j++)
                c[i][j] += left[i].x * right[j].x + left[i].y * right[j].y +
                           left[i].z * right[j].z + left[i].w * right[j].w;
    }
}

/// This thread's columns of its rows.
template <int DIM, int R>
struct Columns {
    float4 of[R][DIM / 64];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int c = 0; c < DIM / 64; c++) of[i][c] = {0.0f, 0.0f, 0.0f, 0.0f};
    }

    __device__ __forceinline__ void scale(int i, float factor) {
#pragma unroll
        for (int c = 0; c < DIM / 64; c++)
            of[i][c] = {
                of[i][c].x * factor, of[i][c].y * factor, of[i][c].z * factor, of[i][c].w * factor};
    }

    /// Adds weights · rows of `b`. The weight of row r and row k of `b` is at `weights[r · across +
    /// k · along]`.
    __device__ __forceinline__ void add(
        const float *weights, int across, int along, const float *b) {
        const uint32_t y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll 4
        for (int k = 0; k < TILE<DIM>; k++) {
            float weight[R];
#pragma unroll
            for (int i = 0; i < R; i++) weight[i] = weights[(y + 16 * i) * across + k * along];
#pragma unroll
            for (int c = 0; c < DIM / 64; c++) {
                const float4 v =
                    *reinterpret_cast<const float4 *>(b + k * STEP<DIM> + 4 * x + 64 * c);
#pragma unroll
                for (int i = 0; i < R; i++)
                    of[i][c] = {of[i][c].x + weight[i] * v.x, of[i][c].y + weight[i] * v.y,
                        of[i][c].z + weight[i] * v.z, of[i][c].w + weight[i] * v.w};
            }
        }
    }

    /// Writes rows from `first` on, without rows beyond the sequence's end and columns beyond the
    /// head's.
    __device__ __forceinline__ void store(
        float *to, size_t stride, uint32_t first, const Attention &call) const {
        const uint32_t y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < R; i++) {
            const uint32_t row = first + y + 16 * i;
            if (row >= call.s) continue;
#pragma unroll
            for (int c = 0; c < DIM / 64; c++) {
                const float v[4] = {of[i][c].x, of[i][c].y, of[i][c].z, of[i][c].w};
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (4 * x + 64 * c + e < call.head_dim)
                        to[row * stride + 4 * x + 64 * c + e] = v[e];
            }
        }
    }
};

/// The keys that a head's queries see, and the parameters of their scores.
struct Head {
    const Attention &call;
    uint32_t sample;
    float slope;
    HeadMask mask;

    __device__ __forceinline__ Head(const Attention &call, uint32_t sample, uint32_t head)
        : call(call), sample(sample), slope(call.slopes ? call.slopes[head] : 0.0f),
          mask(call.samples ? HeadMask(call, sample, head) : HeadMask()) {}

    __device__ __forceinline__ bool sees(uint32_t query, uint32_t key) const {
        return query < call.s && key <= query && first_key(call, sample, query) <= key;
    }

    /// The score for a product, as an exponent of 2.
    __device__ __forceinline__ float score(float product, uint32_t query, uint32_t key) const {
        return product * call.scale_log2 +
               slope * static_cast<float>(static_cast<int>(key) - static_cast<int>(query));
    }

    /// The dropout factor of a weight.
    __device__ __forceinline__ float kept(uint32_t query, uint32_t key) const {
        if (!call.samples) return 1.0f;
        const uint4 words = mask.words(query, key);
        const uint32_t low = key & 1 ? words.y : words.x, high = key & 1 ? words.w : words.z;
        return (key & 2 ? high : low) < call.threshold ? 0.0f : call.kept;
    }
};

/// The maximum over the sixteen threads of a row.
DEVICE float row_max(float v) {
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, distance));
    return v;
}

DEVICE float row_sum(float v) {
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) v += __shfl_xor_sync(~0u, v, distance);
    return v;
}

template <int DIM>
DEVICE void forward(const Attention &call, const float *qkv, float *out, float *lse) {
    constexpr int T = TILE<DIM>, R = T / 16;
    DYNAMIC_SHARED(memory);
    float *const queries = reinterpret_cast<float *>(memory), *const keys = queries + T * STEP<DIM>,
                 *const values = keys + T * STEP<DIM>;
    float *const weights = values + T * STEP<DIM>;
    const uint32_t y = threadIdx.x / 16, x = threadIdx.x % 16;
    const uint32_t first = (gridDim.x - 1 - blockIdx.x) * T, head = blockIdx.y, sample = blockIdx.z,
                   of_group = call.heads_per_group;
    const uint32_t last = min(first + T, call.s) - 1;
    const auto part = [&](uint32_t part) {
        return Rows{qkv + qkv_at(call, sample, head / of_group, part), qkv_stride(call)};
    };
    const Head of_head(call, sample, head);
    Columns<DIM, R> gathered;
    float maxima[R], sums[R];
    gathered.clear();
    for (int i = 0; i < R; i++) {
        maxima[i] = -INFINITY;
        sums[i] = 0.0f;
    }
    load<DIM>(queries, part(head % of_group), first, call);
    for (uint32_t key = first_key(call, sample, first) / T * T; key <= last; key += T) {
        __syncthreads();
        load<DIM>(keys, part(of_group), key, call);
        load<DIM>(values, part(of_group + 1), key, call);
        __syncthreads();
        float scores[R][R];
        multiply<DIM, R>(scores, queries, keys);
#pragma unroll
        for (int i = 0; i < R; i++) {
            const uint32_t query = first + y + 16 * i;
            float top = -INFINITY;
#pragma unroll
            for (int j = 0; j < R; j++) {
                const uint32_t at = key + x + 16 * j;
                scores[i][j] =
                    of_head.sees(query, at) ? of_head.score(scores[i][j], query, at) : -INFINITY;
                top = fmaxf(top, scores[i][j]);
            }
            const float now = fmaxf(maxima[i], row_max(top)),
                        reference = now == -INFINITY ? 0.0f : now;
            const float correction = exp2f(maxima[i] - reference);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < R; j++) {
                const uint32_t at = key + x + 16 * j;
                const float weight = exp2f(scores[i][j] - reference);
                sum += weight;
                weights[(y + 16 * i) * (T + 1) + x + 16 * j] =
                    of_head.kept(query, at) == 0.0f ? 0.0f : weight;
            }
            maxima[i] = now;
            sums[i] = sums[i] * correction + row_sum(sum);
            gathered.scale(i, correction);
        }
        __syncwarp(); // the same half of a warp writes and reads a row's weights
        gathered.add(weights, T + 1, 1, values);
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        const uint32_t query = first + y + 16 * i;
        gathered.scale(i, (call.samples ? call.kept : 1.0f) / sums[i]);
        if (x == 0 && query < call.s)
            lse[statistics_at(call, sample, head) + query] = maxima[i] * LN_2 + logf(sums[i]);
    }
    gathered.store(out + out_at(call, sample, head), out_stride(call), first, call);
}

/// Computes weights and gradients of scores of a tile, `[queries][keys]`, in shared memory.
template <int DIM>
DEVICE void harden(const Head &head, const float *queries, const float *dout, const float *keys,
    const float *values, uint32_t query, uint32_t key, const float *lse, const float *delta,
    float *weights, float *slants) {
    constexpr int T = TILE<DIM>, R = T / 16;
    const uint32_t y = threadIdx.x / 16, x = threadIdx.x % 16;
    float scores[R][R], gradients[R][R];
    multiply<DIM, R>(scores, queries, keys);
    multiply<DIM, R>(gradients, dout, values);
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < R; j++) {
            const uint32_t q = query + y + 16 * i, k = key + x + 16 * j,
                           at = (y + 16 * i) * (T + 1) + x + 16 * j;
            const bool seen = head.sees(q, k);
            const float kept = seen ? head.kept(q, k) : 0.0f;
            const float weight =
                seen ? exp2f(head.score(scores[i][j], q, k) - lse[q] * LOG2_E) : 0.0f;
            weights[at] = kept == 0.0f ? 0.0f : weight * kept;
            slants[at] =
                seen ? weight * ((kept == 0.0f ? 0.0f : gradients[i][j] * kept) - delta[q]) : 0.0f;
        }
}

/// Shared memory of backward: four tiles of rows, two of weights.
template <int DIM>
struct Shared {
    float *queries, *dout, *keys, *values, *weights, *slants;

    __device__ __forceinline__ explicit Shared(unsigned char *memory) {
        queries = reinterpret_cast<float *>(memory);
        dout = queries + TILE<DIM> * STEP<DIM>;
        keys = dout + TILE<DIM> * STEP<DIM>;
        values = keys + TILE<DIM> * STEP<DIM>;
        weights = values + TILE<DIM> * STEP<DIM>;
        slants = weights + TILE<DIM> * (TILE<DIM> + 1);
    }
};

template <int DIM>
DEVICE void gradients_of_keys(const Attention &call, const float *dout, const float *qkv,
    const float *lse, const float *delta, float *dqkv) {
    constexpr int T = TILE<DIM>, R = T / 16;
    DYNAMIC_SHARED(memory);
    const Shared<DIM> shared(memory);
    const uint32_t first = blockIdx.x * T, group = blockIdx.y, sample = blockIdx.z,
                   of_group = call.heads_per_group;
    const auto part = [&](uint32_t part) {
        return Rows{qkv + qkv_at(call, sample, group, part), qkv_stride(call)};
    };
    load<DIM>(shared.keys, part(of_group), first, call);
    load<DIM>(shared.values, part(of_group + 1), first, call);
    Columns<DIM, R> dk, dv;
    dk.clear();
    dv.clear();
    for (uint32_t j = 0; j < of_group; j++) {
        const uint32_t head = group * of_group + j;
        const Head of_head(call, sample, head);
        const size_t statistics = statistics_at(call, sample, head);
        for (uint32_t query = first; query < call.s; query += T) {
            // Later queries do not see these keys either.
            if (first_key(call, sample, query) >= first + T) break;
            __syncthreads();
            load<DIM>(shared.queries, part(j), query, call);
            load<DIM>(shared.dout, Rows{dout + out_at(call, sample, head), out_stride(call)}, query,
                call);
            __syncthreads();
            harden<DIM>(of_head, shared.queries, shared.dout, shared.keys, shared.values, query,
                first, lse + statistics, delta + statistics, shared.weights, shared.slants);
            __syncthreads();
            dv.add(shared.weights, 1, T + 1, shared.dout);
            dk.add(shared.slants, 1, T + 1, shared.queries);
        }
    }
#pragma unroll
    for (int i = 0; i < R; i++) dk.scale(i, call.scale);
    dk.store(dqkv + qkv_at(call, sample, group, of_group), qkv_stride(call), first, call);
    dv.store(dqkv + qkv_at(call, sample, group, of_group + 1), qkv_stride(call), first, call);
}

template <int DIM>
DEVICE void gradients_of_queries(const Attention &call, const float *dout, const float *qkv,
    const float *lse, const float *delta, float *dqkv) {
    constexpr int T = TILE<DIM>, R = T / 16;
    DYNAMIC_SHARED(memory);
    const Shared<DIM> shared(memory);
    const uint32_t first = (gridDim.x - 1 - blockIdx.x) * T, head = blockIdx.y, sample = blockIdx.z,
                   of_group = call.heads_per_group;
    const uint32_t last = min(first + T, call.s) - 1;
    const auto part = [&](uint32_t part) {
        return Rows{qkv + qkv_at(call, sample, head / of_group, part), qkv_stride(call)};
    };
    const Head of_head(call, sample, head);
    const size_t statistics = statistics_at(call, sample, head);
    load<DIM>(shared.queries, part(head % of_group), first, call);
    load<DIM>(shared.dout, Rows{dout + out_at(call, sample, head), out_stride(call)}, first, call);
    Columns<DIM, R> dq;
    dq.clear();
    for (uint32_t key = first_key(call, sample, first) / T * T; key <= last; key += T) {
        __syncthreads();
        load<DIM>(shared.keys, part(of_group), key, call);
        load<DIM>(shared.values, part(of_group + 1), key, call);
        __syncthreads();
        harden<DIM>(of_head, shared.queries, shared.dout, shared.keys, shared.values, first, key,
            lse + statistics, delta + statistics, shared.weights, shared.slants);
        __syncwarp(); // the same half of a warp writes and reads a row's weights
        dq.add(shared.slants, T + 1, 1, shared.keys);
    }
#pragma unroll
    for (int i = 0; i < R; i++) dq.scale(i, call.scale);
    dq.store(dqkv + qkv_at(call, sample, head / of_group, head % of_group), qkv_stride(call), first,
        call);
}

} // namespace

#define KERNELS_OF(DIM)                                                                            \
    KERNEL(attention_forward_f32_##DIM, const Attention call, const float *qkv, float *out,        \
        float *lse) {                                                                              \
        forward<DIM>(call, qkv, out, lse);                                                         \
    }                                                                                              \
    KERNEL(attention_dkdv_f32_##DIM, const Attention call, const float *dout, const float *qkv,    \
        const float *lse, const float *delta, float *dqkv) {                                       \
        gradients_of_keys<DIM>(call, dout, qkv, lse, delta, dqkv);                                 \
    }                                                                                              \
    KERNEL(attention_dq_f32_##DIM, const Attention call, const float *dout, const float *qkv,      \
        const float *lse, const float *delta, float *dqkv) {                                       \
        gradients_of_queries<DIM>(call, dout, qkv, lse, delta, dqkv);                              \
    }
KERNELS_OF(64)
KERNELS_OF(128)
KERNELS_OF(256)
