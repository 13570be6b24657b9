// The online softmax of queries with scores in fragments C. A thread has rows g and g + 8 of each
// sixteen, and shares a row with three other threads (Milakov & Gimelshein 2018). As in Dao 2023,
// FlashAttention-2, a row is divided by its sum only at the end.
#pragma once

#include "attention.cuh"

/// The state of 16 · M queries of a warp after the keys seen so far.
template <int M>
struct Softmax {
    float maxima[M][2];
    /// A thread's part of Σ 2^(score − maximum).
    float sums[M][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                maxima[m][half] = -INFINITY;
                sums[m][half] = 0.0f;
            }
    }

    /// Takes in the products with 8 · N keys from `key` on. Sums over earlier keys must then be
    /// multiplied by `corrections`. Products with keys that a query does not see become −∞. `query`
    /// is the warp's first query; `edge` says whether any of these queries does not see all of
    /// these keys. Returns the factor that is still to apply.
    template <int N>
    __device__ __forceinline__ float raise(const Attention &call, float slope, uint32_t sample,
        uint32_t query, uint32_t key, bool edge, float (&scores)[M][N][4],
        float (&corrections)[M][2]) {
        const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const float scale = tilt<false>(call, slope, query, key, scores);
        if (edge) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    // Relative to the thread's first key, so that the offsets of its other keys are
                    // constants.
                    const uint32_t row = query + m * 16 + g + half * 8, own = key + 2 * t;
                    const int last = static_cast<int>(row - own),
                              first = static_cast<int>(first_key(call, sample, row) - own);
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            if (n * 8 + i > last || n * 8 + i < first)
                                scores[m][n][2 * half + i] = -INFINITY;
                        }
                }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = scores[m][0][2 * half];
#pragma unroll
                for (int n = 0; n < N; n++)
                    top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                const float old = maxima[m][half];
                maxima[m][half] = fmaxf(old, top * scale);
                corrections[m][half] = exp2_fast(old - reference(m, half));
            }
        return scale;
    }

    /// Turns the scores into weights 2^(score − maximum), 0 for keys that a query does not see.
    template <int N>
    __device__ __forceinline__ void weigh(
        float scale, float (&scores)[M][N][4], const float (&corrections)[M][2]) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float weight =
                            exp2_fast(scores[m][n][2 * half + i] * scale - reference(m, half));
                        scores[m][n][2 * half + i] = weight;
                        sum += weight;
                    }
                sums[m][half] = sums[m][half] * corrections[m][half] + sum;
            }
    }

    /// A row that has seen no key yet has the maximum −∞; its weights must be 0.
    __device__ __forceinline__ float reference(int m, int half) const {
        return maxima[m][half] == -INFINITY ? 0.0f : maxima[m][half];
    }

    /// `raise` and `weigh`.
    template <int N>
    __device__ __forceinline__ void step(const Attention &call, float slope, uint32_t sample,
        uint32_t query, uint32_t key, bool edge, float (&scores)[M][N][4],
        float (&corrections)[M][2]) {
        weigh(
            raise(call, slope, sample, query, key, edge, scores, corrections), scores, corrections);
    }

    /// Called when all keys were seen: writes log-sum-exps, and sets `factors` to the remaining
    /// factors of the output.
    __device__ __forceinline__ void end(const Attention &call, uint32_t sample, uint32_t head,
        uint32_t query, float kept, float *lse, float (&factors)[M][2]) {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum = sums[m][half];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                factors[m][half] = kept / sum;
                const uint32_t at = query + m * 16 + lane / 4 + 8 * half;
                if (lane % 4 == 0 && at < call.s)
                    lse[statistics_at(call, sample, head) + at] =
                        maxima[m][half] * LN_2 + logf(sum);
            }
    }
};

/// Rescales rows of a fragment to their queries' new maxima.
template <int M, int N>
DEVICE void correct(float (&c)[M][N][4], const float (&corrections)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] *= corrections[m][i / 2];
}
