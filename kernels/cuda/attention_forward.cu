// Attention forward for bf16 and f16. A block takes a tile of queries of one head and goes once
// over the keys that they see, with an online softmax in registers (Dao 2023, FlashAttention-2).
// Copies of keys and values by cp.async overlap with the products.
#include "mma.cuh"
#include "softmax.cuh"
#include "tiles.cuh"

namespace {

/// Drops and rounds the weights of a tile. `query` and `key` are the first of this warp and of the
/// tile.
template <class E, int M, int N, bool DROP>
DEVICE void round_weights(const Attention &call, const HeadMask &mask, uint32_t query, uint32_t key,
    float (&scores)[M][N][4], uint32_t (&weights)[M][N][2]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (DROP) {
                uint32_t words[4];
                words_of_queries_by_keys(mask, query + m * 16, key + n * 8, words);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    scores[m][n][i] = words[i] < call.threshold ? 0.0f : scores[m][n][i];
            }
            weights[m][n][0] = E::pack(scores[m][n][0], scores[m][n][1]);
            weights[m][n][1] = E::pack(scores[m][n][2], scores[m][n][3]);
        }
}

/// A block's tile of queries. The last tiles come first, because they take longest.
template <class E, int DIM, int WARPS, int M, int KEYS, bool DROP>
DEVICE void forward(const Attention &call, const uint16_t *qkv, uint16_t *out, float *lse) {
    constexpr int QUERIES = WARPS * M * 16, N = KEYS / 8, THREADS = WARPS * 32;
    DYNAMIC_SHARED(memory);
    uint16_t *const query_tile = reinterpret_cast<uint16_t *>(memory);
    uint16_t *const key_tile = query_tile + QUERIES * ROW<DIM>, *const value_tile =
                                                                    key_tile + KEYS * ROW<DIM>;
    const uint32_t first = (gridDim.x - 1 - blockIdx.x) * QUERIES, head = blockIdx.y,
                   sample = blockIdx.z;
    const uint32_t of_group = call.heads_per_group, group = head / of_group,
                   last = min(first + QUERIES, call.s) - 1;
    const Rows rows{qkv, qkv_stride(call), call.s, call.head_dim, call.aligned != 0};
    const Rows keys = rows.from(qkv_at(call, sample, group, of_group)),
               values = rows.from(qkv_at(call, sample, group, of_group + 1));

    // Skip tiles that no query sees: the first query sees furthest back.
    uint32_t key = first_key(call, sample, first) / KEYS * KEYS;
    const uint32_t seen_by_all = first_key(call, sample, last);
    copy_rows<QUERIES, DIM, THREADS>(
        query_tile, rows.from(qkv_at(call, sample, group, head % of_group)), first);
    copy_rows<KEYS, DIM, THREADS>(key_tile, keys, key);
    copies_commit();

    const uint32_t in_tile = threadIdx.x / 32 * M * 16, own = first + in_tile;
    const float slope = call.slopes ? call.slopes[head] : 0.0f;
    const HeadMask mask = DROP ? HeadMask(call, sample, head) : HeadMask();
    Softmax<M> softmax;
    float gathered[M][DIM / 8][4];
    softmax.clear();
    clear(gathered);
    for (; key <= last; key += KEYS) {
        copies_wait<0>();
        __syncthreads(); // the keys have arrived; no thread reads the previous values any more
        copy_rows<KEYS, DIM, THREADS>(value_tile, values, key);
        copies_commit();
        float scores[M][N][4], corrections[M][2];
        uint32_t weights[M][N][2];
        clear(scores);
        product_of_rows<E, DIM, M, N>(scores, query_tile, in_tile, key_tile);
        const bool edge = key + KEYS > first + 1 || seen_by_all > key;
        softmax.step(call, slope, sample, own, key, edge, scores, corrections);
        correct(gathered, corrections);
        round_weights<E, M, N, DROP>(call, mask, own, key, scores, weights);
        copies_wait<0>();
        __syncthreads(); // the values have arrived; no thread reads these keys any more
        if (key + KEYS <= last) copy_rows<KEYS, DIM, THREADS>(key_tile, keys, key + KEYS);
        copies_commit();
        product_of_weights<E, DIM, M, KEYS>(gathered, weights, value_tile);
    }
    float factors[M][2];
    softmax.end(call, sample, head, own, DROP ? call.kept : 1.0f, lse, factors);
    // The warp's own rows of queries are not needed any more.
    const Rows to{nullptr, out_stride(call), call.s, call.head_dim, call.aligned != 0};
    store_fragments<E, DIM, M>(out + out_at(call, sample, head), to, own,
        query_tile + in_tile * ROW<DIM>, gathered, factors);
}

} // namespace

#define FORWARD(NAME, E, DIM, WARPS, M, KEYS, DROP)                                                \
    KERNEL_BOUNDS(WARPS * 32, 1, NAME##_##DIM, const Attention call, const uint16_t *qkv,          \
        uint16_t *out, float *lse) {                                                               \
        forward<E, DIM, WARPS, M, KEYS, DROP>(call, qkv, out, lse);                                \
    }

// Random words need registers, too: with dropout, tiles have fewer keys.
#define FORWARDS(NAME, E)                                                                          \
    FORWARD(attention_forward_##NAME, E, 64, 4, 2, 64, false)                                      \
    FORWARD(attention_forward_##NAME, E, 96, 4, 2, 64, false)                                      \
    FORWARD(attention_forward_##NAME, E, 128, 4, 2, 64, false)                                     \
    FORWARD(attention_forward_##NAME, E, 256, 8, 1, 32, false)                                     \
    FORWARD(attention_forward_dropout_##NAME, E, 64, 4, 2, 32, true)                               \
    FORWARD(attention_forward_dropout_##NAME, E, 96, 4, 2, 32, true)                               \
    FORWARD(attention_forward_dropout_##NAME, E, 128, 4, 2, 32, true)                              \
    FORWARD(attention_forward_dropout_##NAME, E, 256, 8, 1, 32, true)

FORWARDS(bf16, Bf16)
FORWARDS(f16, F16)
