// Attention of new tokens over the keys and values of all tokens so far (Dao et al. 2023,
// Flash-Decoding). Blocks take pieces of the positions, so that few sequences still keep all
// multiprocessors reading. A second kernel joins the pieces in order.
//
// Memory-bound: each key or value is read once for all query heads of its group, eight heads at a
// time.
#include "attention.cuh"

namespace {

/// Positions per piece; kernels/src/cuda/attention/mod.rs has the same number.
constexpr uint32_t PIECE = 256;
constexpr uint32_t THREADS = 128;
/// Query heads that are processed side by side.
constexpr uint32_t HEADS = 8;
/// Threads that share a key.
constexpr uint32_t SHARE = 8;
constexpr uint32_t WIDEST = 256;

/// Offset in the cache `[positions, b, groups · 2 · head_dim]` of a group's key at a position; its
/// value follows.
DEVICE size_t key_at(const Attention &call, uint32_t position, uint32_t sample, uint32_t group) {
    return ((static_cast<size_t>(position) * call.b + sample) * call.groups + group) * 2 *
           call.head_dim;
}

/// Copies the keys and values of new tokens to their positions: a block per token and sample.
template <class T>
DEVICE void append(const Attention &call, const T *qkv, T *cache, const uint32_t *starts) {
    const uint32_t token = blockIdx.x, sample = blockIdx.y, pair = 2 * call.head_dim;
    for (uint32_t i = threadIdx.x; i < call.groups * pair; i += blockDim.x) {
        const uint32_t group = i / pair;
        cache[key_at(call, starts[sample] + token, sample, group) + i % pair] =
            qkv[token * qkv_stride(call) + qkv_at(call, sample, group, call.heads_per_group) +
                i % pair];
    }
}

/// Offset of a piece's maximum in `[b][heads][tokens][pieces]`.
DEVICE size_t piece_at(const Attention &call, uint32_t sample, uint32_t head, uint32_t token,
    uint32_t piece, uint32_t pieces) {
    return (statistics_at(call, sample, head) + token) * pieces + piece;
}

/// Σ weight · value of `keys` values of a piece for `heads` heads, to `to[h · of_head + column]`.
/// Adjacent threads read a value by vectors, and the block reads as many values at a time as it has
/// threads for. The sums of these slots are added in order, through `joined`. `values` is the first
/// value; the next is `stride` elements later.
template <class T>
DEVICE void weigh(const T *values, size_t stride, uint32_t keys, uint32_t d,
    const float (&weights)[HEADS][PIECE], uint32_t heads, float (&joined)[HEADS][WIDEST], float *to,
    size_t of_head) {
    // Heads that have their sums joined together; there is room for no more.
    constexpr uint32_t TOGETHER = 2, PART = THREADS * VECTOR<T>;
    static_assert(
        TOGETHER * PART <= HEADS * WIDEST && HEADS % TOGETHER == 0, "sums of all slots have room");
    const uint32_t lanes = d / VECTOR<T>, slots = THREADS / lanes, slot = threadIdx.x / lanes,
                   column = threadIdx.x % lanes * VECTOR<T>;
    float *const parts = &joined[0][0];
    float gathered[HEADS][VECTOR<T>];
#pragma unroll
    for (uint32_t h = 0; h < HEADS; h++)
#pragma unroll
        for (int e = 0; e < VECTOR<T>; e++) gathered[h][e] = 0.0f;
    if (slot < slots) {
#pragma unroll 4
        for (uint32_t i = slot; i < keys; i += slots) {
            const Vector<T> value = load_vector(values + i * stride + column);
#pragma unroll
            for (uint32_t h = 0; h < HEADS; h++)
                if (h < heads)
#pragma unroll
                    for (int e = 0; e < VECTOR<T>; e++) gathered[h][e] += weights[h][i] * value[e];
        }
    }
#pragma unroll
    for (uint32_t h = 0; h < HEADS; h += TOGETHER) {
        if (h >= heads) break;
        __syncthreads();
        if (slot < slots) {
#pragma unroll
            for (uint32_t j = 0; j < TOGETHER; j++)
#pragma unroll
                for (int e = 0; e < VECTOR<T>; e++)
                    parts[j * PART + slot * d + column + e] = gathered[h + j][e];
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < TOGETHER * d; i += THREADS) {
            const uint32_t j = i / d, c = i % d;
            if (h + j >= heads) break;
            float sum = 0.0f;
#pragma unroll 4
            for (uint32_t s = 0; s < slots; s++) sum += parts[j * PART + s * d + c];
            to[(h + j) * of_head + c] = sum;
        }
    }
}

/// One piece of the positions, for some heads of a group. With weights 2^(score − maximum), the
/// maximum and the sum of the weights go to `[…][pieces][2]`, and the weighted sum of values, not
/// divided by the sum of weights, to `[…][pieces][head_dim]`.
template <class T>
DEVICE void attend(const Attention &call, const T *qkv, const T *cache, const uint32_t *starts,
    float *statistics, float *sums) {
    SHARED(float, queries, [HEADS][WIDEST]);
    SHARED(float, weights, [HEADS][PIECE]);
    const uint32_t piece = blockIdx.x, pieces = gridDim.x, token = blockIdx.y;
    const uint32_t batches = (call.heads_per_group + HEADS - 1) / HEADS;
    const uint32_t first_head = blockIdx.z % batches * HEADS,
                   group = blockIdx.z / batches % call.groups,
                   sample = blockIdx.z / batches / call.groups;
    const uint32_t heads = min(HEADS, call.heads_per_group - first_head), d = call.head_dim;
    const uint32_t position = starts[sample] + token;
    const uint32_t seen = call.window && position >= call.window ? position + 1 - call.window : 0;
    const uint32_t first = max(seen, piece * PIECE), end = min(position + 1, (piece + 1) * PIECE);
    const uint32_t keys = first < end ? end - first : 0;
    const uint32_t global_head = group * call.heads_per_group + first_head;

    for (uint32_t i = threadIdx.x; i < heads * d; i += THREADS)
        queries[i / d][i % d] =
            to_float(qkv[token * qkv_stride(call) + qkv_at(call, sample, group, first_head) + i]);
    __syncthreads();
    // Whole warps stay in the loop, because the threads that share a key reduce with shuffles.
    const uint32_t part = threadIdx.x % SHARE;
    for (uint32_t begin = 0; begin < keys; begin += THREADS / SHARE) {
        const uint32_t i = begin + threadIdx.x / SHARE, key = first + (i < keys ? i : 0);
        const T *const row = cache + key_at(call, key, sample, group);
        float products[HEADS];
#pragma unroll
        for (uint32_t h = 0; h < HEADS; h++) products[h] = 0.0f;
        if (call.aligned) {
            for (uint32_t column = part * VECTOR<T>; column < d; column += SHARE * VECTOR<T>) {
                const Vector<T> of_key = load_vector(row + column);
#pragma unroll
                for (uint32_t h = 0; h < HEADS; h++)
                    if (h < heads)
#pragma unroll
                        for (int e = 0; e < VECTOR<T>; e++)
                            products[h] += queries[h][column + e] * of_key[e];
            }
        } else {
            for (uint32_t column = part; column < d; column += SHARE) {
                const float of_key = to_float(row[column]);
#pragma unroll
                for (uint32_t h = 0; h < HEADS; h++)
                    if (h < heads) products[h] += queries[h][column] * of_key;
            }
        }
#pragma unroll
        for (uint32_t h = 0; h < HEADS; h++) {
            float product = products[h];
#pragma unroll
            for (uint32_t distance = SHARE / 2; distance > 0; distance /= 2)
                product += __shfl_xor_sync(~0u, product, distance);
            if (h < heads && part == 0 && i < keys) {
                const float slope = call.slopes ? call.slopes[global_head + h] : 0.0f;
                weights[h][i] =
                    product * call.scale_log2 +
                    slope * static_cast<float>(static_cast<int>(key) - static_cast<int>(position));
            }
        }
    }
    __syncthreads();
    // One warp per head turns scores into weights.
    for (uint32_t h = threadIdx.x / 32; h < heads; h += THREADS / 32) {
        const uint32_t lane = threadIdx.x % 32;
        float top = -INFINITY, sum = 0.0f;
        for (uint32_t i = lane; i < keys; i += 32) top = fmaxf(top, weights[h][i]);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        for (uint32_t i = lane; i < keys; i += 32) {
            const float weight = exp2f(weights[h][i] - top);
            sum += weight;
            weights[h][i] = to_float(from_float<T>(weight));
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) {
            float *const to =
                statistics + 2 * piece_at(call, sample, global_head + h, token, piece, pieces);
            to[0] = top;
            to[1] = sum;
        }
    }
    __syncthreads();
    const T *const values = cache + key_at(call, first, sample, group) + d;
    const size_t stride = key_at(call, 1, 0, 0);
    float *const to = sums + piece_at(call, sample, global_head, token, piece, pieces) * d;
    const size_t of_head = piece_at(call, 0, 1, 0, 0, pieces) * d;
    if (call.aligned) return weigh(values, stride, keys, d, weights, heads, queries, to, of_head);
    for (uint32_t column = threadIdx.x; column < d; column += THREADS) {
        float gathered[HEADS];
#pragma unroll
        for (uint32_t h = 0; h < HEADS; h++) gathered[h] = 0.0f;
#pragma unroll 4
        for (uint32_t i = 0; i < keys; i++) {
            const float value = to_float(values[i * stride + column]);
#pragma unroll
            for (uint32_t h = 0; h < HEADS; h++)
                if (h < heads) gathered[h] += weights[h][i] * value;
        }
#pragma unroll
        for (uint32_t h = 0; h < HEADS; h++)
            if (h < heads) to[h * of_head + column] = gathered[h];
    }
}

/// Joins the pieces of a token's head; one block per head.
template <class T>
DEVICE void join(
    const Attention &call, const float *statistics, const float *sums, T *out, uint32_t pieces) {
    const uint32_t token = blockIdx.x, head = blockIdx.y, sample = blockIdx.z, d = call.head_dim;
    statistics += 2 * piece_at(call, sample, head, token, 0, pieces);
    sums += piece_at(call, sample, head, token, 0, pieces) * d;
    float top = -INFINITY, sum = 0.0f;
#pragma unroll 8
    for (uint32_t piece = 0; piece < pieces; piece++) top = fmaxf(top, statistics[2 * piece]);
#pragma unroll 8
    for (uint32_t piece = 0; piece < pieces; piece++)
        sum += statistics[2 * piece + 1] * exp2f(statistics[2 * piece] - top);
    for (uint32_t column = threadIdx.x; column < d; column += blockDim.x) {
        float gathered = 0.0f;
#pragma unroll 8
        for (uint32_t piece = 0; piece < pieces; piece++)
            gathered +=
                sums[static_cast<size_t>(piece) * d + column] * exp2f(statistics[2 * piece] - top);
        out[token * out_stride(call) + out_at(call, sample, head) + column] =
            from_float<T>(gathered / sum);
    }
}

} // namespace

#define KERNELS(T, suffix)                                                                         \
    KERNEL(attention_append_##suffix, const Attention call, const T *qkv, T *cache,                \
        const uint32_t *starts) {                                                                  \
        append(call, qkv, cache, starts);                                                          \
    }                                                                                              \
    KERNEL(attention_attend_##suffix, const Attention call, const T *qkv, const T *cache,          \
        const uint32_t *starts, float *statistics, float *sums) {                                  \
        attend(call, qkv, cache, starts, statistics, sums);                                        \
    }                                                                                              \
    KERNEL(attention_join_##suffix, const Attention call, const float *statistics,                 \
        const float *sums, T *out, uint32_t pieces) {                                              \
        join(call, statistics, sums, out, pieces);                                                 \
    }
FOR_DTYPES(KERNELS)
