// Attention backward for bf16 and f16, in three kernels. No kernel adds to results of another
// block:
//
// - products of outputs and their gradients, per query;
// - gradients of keys and values: one block per tile of keys, over the queries of its whole group;
// - gradients of queries: one block per tile of queries.
//
// The last two recompute scores (Dao 2023, FlashAttention-2, without its atomics). Weights and
// their gradients stay in registers: the result of one product is rounded to the left operand of
// the next.

#include "attention.cuh"
#include "tiles.cuh"

namespace {

/// Turns the score of one element into the weight 2^(score − log-sum-exp), and the gradient of the
/// weight into the gradient of the score.
template <bool DROP>
DEVICE void harden(float &score, float &gradient, float scale, float lse_log2, float delta,
    bool seen, bool kept, float factor) {
    float weight = seen ? exp2_fast(score * scale - lse_log2) : 0.0f;
    if (DROP) gradient = kept ? gradient * factor : 0.0f;
    gradient = seen ? weight * (gradient - delta) : 0.0f;
    score = DROP ? (kept ? weight * factor : 0.0f) : weight;
}

/// Whether any query of a tile does not see all keys of a tile, or lies beyond the sequence's end.
DEVICE bool is_edge(const Attention &call, uint32_t sample, uint32_t query, uint32_t queries,
    uint32_t key, uint32_t keys) {
    return key + keys > query + 1 || query + queries > call.s ||
           first_key(call, sample, query + queries - 1) > key;
}

/// The statistics of a query, log-sum-exp and Σ dout·out. They lie in the 16 bytes after the
/// query's row in the tile.
template <int DIM>
DEVICE float *statistics_of(uint16_t *tile, uint32_t row) {
    return reinterpret_cast<float *>(tile + row * ROW<DIM> + DIM);
}

/// Gradients of keys (DK) and of values (DV): a block's tile of keys is the left operand, and tiles
/// of queries are streamed.
template <class E, int DIM, int WARPS, int M, int QUERIES, bool DK, bool DV, bool DROP>
DEVICE void gradients_of_keys(const Attention &call, uint32_t sample, const uint16_t *dout,
    const uint16_t *qkv, const float *lse, const float *delta, uint16_t *dqkv) {
    constexpr int KEYS = WARPS * M * 16, N = QUERIES / 8, THREADS = WARPS * 32;
    DYNAMIC_SHARED(memory);
    uint16_t *const key_tile = reinterpret_cast<uint16_t *>(memory), *const value_tile =
                                                                         key_tile + KEYS * ROW<DIM>;
    uint16_t *const query_tiles = value_tile + KEYS * ROW<DIM>, *const dout_tiles =
                                                                    query_tiles +
                                                                    2 * QUERIES * ROW<DIM>;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t first = blockIdx.x * KEYS, group = blockIdx.y, of_group = call.heads_per_group;
    const Rows rows{qkv, qkv_stride(call), call.s, call.head_dim, call.aligned != 0};
    const Rows keys = rows.from(qkv_at(call, sample, group, of_group)),
               values = rows.from(qkv_at(call, sample, group, of_group + 1));
    const Rows douts{dout, out_stride(call), call.s, call.head_dim, call.aligned != 0};

    // From the first tile of queries that sees these keys to the end of the last one that still
    // sees them; the same for all heads.
    const uint32_t first_tile = first / QUERIES;
    uint32_t end_tile = first_tile + 1, none = (call.s + QUERIES - 1) / QUERIES;
    while (end_tile < none) {
        const uint32_t middle = (end_tile + none) / 2;
        if (first_key(call, sample, middle * QUERIES) < first + KEYS) end_tile = middle + 1;
        else none = middle;
    }
    const uint32_t tiles = end_tile - first_tile, steps = tiles * of_group;
    auto fetch = [&](uint32_t step) {
        const uint32_t in_group = step / tiles, query = (first_tile + step % tiles) * QUERIES,
                       head = group * of_group + in_group;
        uint16_t *const query_tile = query_tiles + step % 2 * QUERIES * ROW<DIM>, *const dout_tile =
                                                                                      dout_tiles +
                                                                                      step % 2 *
                                                                                          QUERIES *
                                                                                          ROW<DIM>;
        copy_rows<QUERIES, DIM, THREADS>(
            query_tile, rows.from(qkv_at(call, sample, group, in_group)), query);
        copy_rows<QUERIES, DIM, THREADS>(dout_tile, douts.from(out_at(call, sample, head)), query);
        if (threadIdx.x < QUERIES) {
            const bool valid = query + threadIdx.x < call.s;
            const size_t at = valid ? statistics_at(call, sample, head) + query + threadIdx.x : 0;
            copy_4(statistics_of<DIM>(query_tile, threadIdx.x), lse + at, valid);
            copy_4(statistics_of<DIM>(query_tile, threadIdx.x) + 1, delta + at, valid);
        }
    };
    copy_rows<KEYS, DIM, THREADS>(key_tile, keys, first);
    copy_rows<KEYS, DIM, THREADS>(value_tile, values, first);
    fetch(0);
    copies_commit();

    float dk[DK ? M : 1][DIM / 8][4], dv[DV ? M : 1][DIM / 8][4];
    if (DK) clear(dk);
    if (DV) clear(dv);
    for (uint32_t step = 0; step < steps; step++) {
        copies_wait<0>();
        // This step's queries have arrived; no thread reads those of the previous step any more.
        __syncthreads();
        if (step + 1 < steps) fetch(step + 1);
        copies_commit();
        uint16_t *const query_tile = query_tiles + step % 2 * QUERIES * ROW<DIM>, *const dout_tile =
                                                                                      dout_tiles +
                                                                                      step % 2 *
                                                                                          QUERIES *
                                                                                          ROW<DIM>;
        const uint32_t head = group * of_group + step / tiles,
                       query = (first_tile + step % tiles) * QUERIES;
        const uint32_t own = first + warp * M * 16;
        float scores[M][N][4], gradients[M][N][4];
        clear(scores);
        clear(gradients);
        product_of_rows<E, DIM, M, N>(scores, key_tile, warp * M * 16, query_tile);
        if (DK) product_of_rows<E, DIM, M, N>(gradients, value_tile, warp * M * 16, dout_tile);
        const float slope = call.slopes ? call.slopes[head] : 0.0f;
        const float scale = tilt<true>(call, slope, own, query, scores);
        const bool edge = is_edge(call, sample, query, QUERIES, first, KEYS);
        const HeadMask mask = DROP ? HeadMask(call, sample, head) : HeadMask();
        uint32_t weights[M][N][2], slants[M][N][2];
#pragma unroll
        for (int n = 0; n < N; n++) {
            float lse_log2[2], of_query[2];
            uint32_t from[2] = {0, 0}, to[2] = {~0u, ~0u};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float *const statistics = statistics_of<DIM>(query_tile, n * 8 + 2 * t + i);
                lse_log2[i] = statistics[0] * LOG2_E;
                of_query[i] = statistics[1];
                if (edge) {
                    const uint32_t at = query + n * 8 + 2 * t + i;
                    from[i] = at < call.s ? first_key(call, sample, at) : ~0u;
                    to[i] = at;
                }
            }
#pragma unroll
            for (int m = 0; m < M; m++) {
                uint32_t words[4] = {0, 0, 0, 0};
                if (DROP) words_of_keys_by_queries(mask, own + m * 16, query + n * 8, words);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint32_t key = own + m * 16 + g + i / 2 * 8;
                    const bool seen = from[i % 2] <= key && key <= to[i % 2],
                               kept = words[i] >= call.threshold;
                    harden<DROP>(scores[m][n][i], gradients[m][n][i], scale, lse_log2[i % 2],
                        of_query[i % 2], seen, kept, call.kept);
                }
                for (int half = 0; half < 2; half++) {
                    weights[m][n][half] =
                        E::pack(scores[m][n][2 * half], scores[m][n][2 * half + 1]);
                    slants[m][n][half] =
                        E::pack(gradients[m][n][2 * half], gradients[m][n][2 * half + 1]);
                }
            }
        }
        if constexpr (DV) product_of_weights<E, DIM, M, QUERIES>(dv, weights, dout_tile);
        if constexpr (DK) product_of_weights<E, DIM, M, QUERIES>(dk, slants, query_tile);
    }
    // The warp's own rows of keys and values are not needed any more, and no other warp reads them.
    const uint32_t own = warp * M * 16;
    const Rows to{nullptr, qkv_stride(call), call.s, call.head_dim, call.aligned != 0};
    if constexpr (DK)
        store_fragments<E, DIM, M>(dqkv + qkv_at(call, sample, group, of_group), to, first + own,
            key_tile + own * ROW<DIM>, dk, call.scale);
    if constexpr (DV)
        store_fragments<E, DIM, M>(dqkv + qkv_at(call, sample, group, of_group + 1), to,
            first + own, value_tile + own * ROW<DIM>, dv, 1.0f);
}

/// Gradients of queries: like forward, with a second product for the gradients of weights.
template <class E, int DIM, int WARPS, int M, int KEYS, bool DROP>
DEVICE void gradients_of_queries(const Attention &call, const uint16_t *dout, const uint16_t *qkv,
    const float *lse, const float *delta, uint16_t *dqkv) {
    constexpr int QUERIES = WARPS * M * 16, N = KEYS / 8, THREADS = WARPS * 32;
    DYNAMIC_SHARED(memory);
    uint16_t *const query_tile = reinterpret_cast<uint16_t *>(memory), *const dout_tile =
                                                                           query_tile +
                                                                           QUERIES * ROW<DIM>;
    uint16_t *const key_tiles = dout_tile + QUERIES * ROW<DIM>, *const value_tiles =
                                                                    key_tiles + 2 * KEYS * ROW<DIM>;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t first = (gridDim.x - 1 - blockIdx.x) * QUERIES, head = blockIdx.y,
                   sample = blockIdx.z;
    const uint32_t of_group = call.heads_per_group, group = head / of_group,
                   last = min(first + QUERIES, call.s) - 1;
    const Rows rows{qkv, qkv_stride(call), call.s, call.head_dim, call.aligned != 0};
    const Rows keys = rows.from(qkv_at(call, sample, group, of_group)),
               values = rows.from(qkv_at(call, sample, group, of_group + 1));
    const Rows douts{dout + out_at(call, sample, head), out_stride(call), call.s, call.head_dim,
        call.aligned != 0};

    const uint32_t first_tile = first_key(call, sample, first) / KEYS, end_tile = last / KEYS + 1;
    auto fetch = [&](uint32_t tile) {
        copy_rows<KEYS, DIM, THREADS>(key_tiles + tile % 2 * KEYS * ROW<DIM>, keys, tile * KEYS);
        copy_rows<KEYS, DIM, THREADS>(
            value_tiles + tile % 2 * KEYS * ROW<DIM>, values, tile * KEYS);
    };
    copy_rows<QUERIES, DIM, THREADS>(
        query_tile, rows.from(qkv_at(call, sample, group, head % of_group)), first);
    copy_rows<QUERIES, DIM, THREADS>(dout_tile, douts, first);
    fetch(first_tile);
    copies_commit();

    const uint32_t own = first + warp * M * 16;
    const float slope = call.slopes ? call.slopes[head] : 0.0f;
    const HeadMask mask = DROP ? HeadMask(call, sample, head) : HeadMask();
    float lse_log2[M][2], of_query[M][2], dq[M][DIM / 8][4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t query = own + m * 16 + g + half * 8;
            const size_t at = statistics_at(call, sample, head) + query;
            lse_log2[m][half] = query < call.s ? lse[at] * LOG2_E : 0.0f;
            of_query[m][half] = query < call.s ? delta[at] : 0.0f;
        }
    clear(dq);
    for (uint32_t tile = first_tile; tile < end_tile; tile++) {
        copies_wait<0>();
        // This tile's keys and values have arrived; no thread reads the previous ones any more.
        __syncthreads();
        if (tile + 1 < end_tile) fetch(tile + 1);
        copies_commit();
        uint16_t *const key_tile = key_tiles + tile % 2 * KEYS * ROW<DIM>, *const value_tile =
                                                                               value_tiles +
                                                                               tile % 2 * KEYS *
                                                                                   ROW<DIM>;
        const uint32_t key = tile * KEYS;
        float scores[M][N][4], gradients[M][N][4];
        clear(scores);
        clear(gradients);
        product_of_rows<E, DIM, M, N>(scores, query_tile, warp * M * 16, key_tile);
        product_of_rows<E, DIM, M, N>(gradients, dout_tile, warp * M * 16, value_tile);
        const float scale = tilt<false>(call, slope, own, key, scores);
        const bool edge = is_edge(call, sample, first, QUERIES, key, KEYS);
        uint32_t slants[M][N][2];
#pragma unroll
        for (int m = 0; m < M; m++) {
            uint32_t from[2] = {0, 0}, to[2] = {~0u, ~0u};
            if (edge)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    to[half] = own + m * 16 + g + half * 8;
                    from[half] = first_key(call, sample, to[half]);
                }
#pragma unroll
            for (int n = 0; n < N; n++) {
                uint32_t words[4] = {0, 0, 0, 0};
                if (DROP) words_of_queries_by_keys(mask, own + m * 16, key + n * 8, words);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint32_t at = key + n * 8 + 2 * t + i % 2;
                    const bool seen = from[i / 2] <= at && at <= to[i / 2],
                               kept = words[i] >= call.threshold;
                    harden<DROP>(scores[m][n][i], gradients[m][n][i], scale, lse_log2[m][i / 2],
                        of_query[m][i / 2], seen, kept, call.kept);
                }
#pragma unroll
                for (int half = 0; half < 2; half++)
                    slants[m][n][half] =
                        E::pack(gradients[m][n][2 * half], gradients[m][n][2 * half + 1]);
            }
        }
        product_of_weights<E, DIM, M, KEYS>(dq, slants, key_tile);
    }
    // The warp's own rows of queries are not needed any more.
    const Rows to{nullptr, qkv_stride(call), call.s, call.head_dim, call.aligned != 0};
    store_fragments<E, DIM, M>(dqkv + qkv_at(call, sample, group, head % of_group), to, own,
        query_tile + warp * M * 16 * ROW<DIM>, dq, call.scale);
}

} // namespace

/// One block computes the gradients of keys and values of DIM columns.
#define OF_KEYS(NAME, E, DIM, WARPS, M, QUERIES, DROP)                                             \
    KERNEL_BOUNDS(WARPS * 32, 1, NAME##_##DIM, const Attention call, const uint16_t *dout,         \
        const uint16_t *qkv, const float *lse, const float *delta, uint16_t *dqkv) {               \
        gradients_of_keys<E, DIM, WARPS, M, QUERIES, true, true, DROP>(                            \
            call, blockIdx.z, dout, qkv, lse, delta, dqkv);                                        \
    }

/// Two blocks: registers hold either the gradients of keys or those of values.
#define OF_WIDE_KEYS(NAME, E, DIM, WARPS, M, QUERIES, DROP)                                        \
    KERNEL_BOUNDS(WARPS * 32, 1, NAME##_##DIM, const Attention call, const uint16_t *dout,         \
        const uint16_t *qkv, const float *lse, const float *delta, uint16_t *dqkv) {               \
        if (blockIdx.z < call.b)                                                                   \
            gradients_of_keys<E, DIM, WARPS, M, QUERIES, true, false, DROP>(                       \
                call, blockIdx.z, dout, qkv, lse, delta, dqkv);                                    \
        else                                                                                       \
            gradients_of_keys<E, DIM, WARPS, M, QUERIES, false, true, DROP>(                       \
                call, blockIdx.z - call.b, dout, qkv, lse, delta, dqkv);                           \
    }

#define OF_QUERIES(NAME, E, DIM, WARPS, M, KEYS, DROP)                                             \
    KERNEL_BOUNDS(WARPS * 32, 1, NAME##_##DIM, const Attention call, const uint16_t *dout,         \
        const uint16_t *qkv, const float *lse, const float *delta, uint16_t *dqkv) {               \
        gradients_of_queries<E, DIM, WARPS, M, KEYS, DROP>(call, dout, qkv, lse, delta, dqkv);     \
    }

// Random words need registers, too.
#define BACKWARDS(NAME, E, DROP)                                                                   \
    OF_KEYS(attention_dkdv_##NAME, E, 64, 4, 2, (DROP ? 16 : 32), DROP)                            \
    OF_KEYS(attention_dkdv_##NAME, E, 96, 4, 1, 64, DROP)                                          \
    OF_KEYS(attention_dkdv_##NAME, E, 128, 4, 1, 32, DROP)                                         \
    OF_WIDE_KEYS(attention_dkdv_##NAME, E, 256, 4, 1, 16, DROP)                                    \
    OF_QUERIES(attention_dq_##NAME, E, 64, 4, 2, 32, DROP)                                         \
    OF_QUERIES(attention_dq_##NAME, E, 96, 4, 1, 32, DROP)                                         \
    OF_QUERIES(attention_dq_##NAME, E, 128, 4, 1, 32, DROP)                                        \
    OF_QUERIES(attention_dq_##NAME, E, 256, 4, 1, 16, DROP)

BACKWARDS(bf16, Bf16, false)
BACKWARDS(f16, F16, false)
BACKWARDS(dropout_bf16, Bf16, true)
BACKWARDS(dropout_f16, F16, true)
