// Attention backward for Hopper, bf16 and f16, heads of 64 or 128 columns, without dropout: the two passes of attention_backward.cu by
// asynchronous products of warpgroups and tensor copies (Shah et al. 2024, FlashAttention-3).
//
// A block has three warpgroups. A warp of the first has tiles copied; the other two keep 64 rows each, of keys and values or of queries and
// gradients of outputs, and go over tiles of 64 rows of the others. Weights stay in registers as left operands. While one warpgroup makes
// weights, the other one's products run.
#include "attention.cuh"
#include "warpgroups.cuh"

namespace {

/// Rows of every tile, and the two warpgroups' together.
constexpr uint32_t ROWS = 64, BOTH = 128;
constexpr uint32_t STAGES = 4, THREADS = 384, CONSUMER_WARPS = 8;
/// Fragments of a tile of scores.
constexpr uint32_t N = ROWS / 8;

/// Of each query of a tile: its log-sum-exp for powers of two, Σ dout·out, and the first key it sees. Behind the sequence's end queries and
/// their outputs' gradients are zeros, and so is what they add.
struct Statistics {
    float lse_log2[ROWS], delta[ROWS];
    uint32_t from[ROWS];
};

/// Of a block, at multiples of 1024 bytes: what stays, of each warpgroup, and what comes and goes, each in two kinds (queries or keys;
/// gradients of outputs or values).
template <int DIM>
struct Shared {
    static constexpr uint32_t TILE = Tile<ROWS, DIM>::BYTES;
    unsigned char *first_stay, *second_stay, *first, *second;
    /// Of tiles of queries that come and go.
    Statistics *statistics;
    uint64_t *stay_full, *full, *empty;

    __device__ __forceinline__ explicit Shared(unsigned char *memory) {
        first_stay = memory;
        second_stay = first_stay + 2 * TILE;
        first = second_stay + 2 * TILE;
        second = first + STAGES * TILE;
        statistics = reinterpret_cast<Statistics *>(second + STAGES * TILE);
        stay_full = reinterpret_cast<uint64_t *>(statistics + STAGES);
        full = stay_full + 1;
        empty = full + STAGES;
    }

    /// `arrivals` complete a stage, besides its bytes.
    __device__ __forceinline__ void make_barriers(uint32_t arrivals) const {
        if (threadIdx.x == 0) {
            barrier_make(stay_full, 1);
            for (uint32_t slot = 0; slot < STAGES; slot++) {
                barrier_make(full + slot, arrivals);
                barrier_make(empty + slot, CONSUMER_WARPS);
            }
            barriers_made();
        }
        __syncthreads();
    }
};

/// Gradients of keys and values. The two kinds are keys and values, which stay, and queries and gradients of outputs.
template <class E, int DIM>
DEVICE void gradients_of_keys(const Attention &call, const TensorMap *qkv, const TensorMap *dout, const float *lse, const float *delta, uint16_t *dqkv) {
    constexpr uint32_t TILE = Shared<DIM>::TILE;
    DYNAMIC_SHARED(memory);
    const Shared<DIM> shared(memory);
    const uint32_t first = blockIdx.x * BOTH, group = blockIdx.y, sample = blockIdx.z, of_group = call.heads_per_group;
    const uint32_t parts = group * (of_group + 2), lane = threadIdx.x % 32;

    // From the first tile of queries that sees these keys to behind the last one that sees as far back; the same for all heads.
    const uint32_t first_tile = first / ROWS;
    uint32_t end_tile = first_tile + 1, none = (call.s + ROWS - 1) / ROWS;
    while (end_tile < none) {
        const uint32_t middle = (end_tile + none) / 2;
        if (first_key(call, sample, middle * ROWS) < first + BOTH) end_tile = middle + 1;
        else none = middle;
    }
    shared.make_barriers(1 + 32);

    if (threadIdx.x < 128) {
        registers_give<24>();
        if (threadIdx.x >= 32) return;
        if (lane == 0) {
            fetch_map(qkv);
            fetch_map(dout);
            barrier_expect(shared.stay_full, 4 * TILE);
            for (uint32_t half = 0; half < 2; half++) {
                copy_tile<ROWS, DIM>(shared.first_stay + half * TILE, qkv, first + half * ROWS, parts + of_group, sample, shared.stay_full);
                copy_tile<ROWS, DIM>(shared.second_stay + half * TILE, qkv, first + half * ROWS, parts + of_group + 1, sample, shared.stay_full);
            }
        }
        Turn<STAGES> turn;
        for (uint32_t in_group = 0; in_group < of_group; in_group++)
            for (uint32_t tile = first_tile; tile < end_tile; tile++, turn.count++) {
                const uint32_t slot = turn.slot(), head = group * of_group + in_group, query = tile * ROWS;
                uint64_t *const full = shared.full + slot;
                barrier_wait(shared.empty + slot, turn.parity() ^ 1);
                if (lane == 0) {
                    barrier_expect(full, 2 * TILE);
                    copy_tile<ROWS, DIM>(shared.first + slot * TILE, qkv, query, parts + in_group, sample, full);
                    copy_tile<ROWS, DIM>(shared.second + slot * TILE, dout, query, head, sample, full);
                }
                Statistics &statistics = shared.statistics[slot];
#pragma unroll
                for (uint32_t i = lane; i < ROWS; i += 32) {
                    const bool valid = query + i < call.s;
                    const size_t at = statistics_at(call, sample, head) + query + i;
                    statistics.lse_log2[i] = valid ? lse[at] * LOG2_E : 0.0f;
                    statistics.delta[i] = valid ? delta[at] : 0.0f;
                    statistics.from[i] = first_key(call, sample, query + i);
                }
                barrier_arrive(full);
            }
        return;
    }
    registers_take<240>();
    const uint32_t half = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    const uint32_t tile_key = first + half * ROWS, own = tile_key + warp * 16;
    const uint32_t keys = shared_address(shared.first_stay + half * TILE), values = shared_address(shared.second_stay + half * TILE);
    float dk[DIM / 8][4], dv[DIM / 8][4], scores[N][4], gradients[N][4];
    uint32_t weights[N / 2][4], slants[N / 2][4];
    clear(dk);
    clear(dv);
    // A step: a tile of a head's queries.
    Turn<STAGES> turn;
    const auto step = [&](float slope, uint32_t query) {
        const uint32_t slot = turn.slot(), of_queries = shared_address(shared.first + slot * TILE), of_douts = shared_address(shared.second + slot * TILE);
        const Statistics &statistics = shared.statistics[slot];
        barrier_wait(shared.full + slot, turn.parity());
        products_begin();
        multiply_rows<E, DIM, ROWS, ROWS>(scores, keys, of_queries);
        products_commit();
        multiply_rows<E, DIM, ROWS, ROWS>(gradients, values, of_douts);
        products_commit();
        // Some query of the tile does not see all of this warpgroup's keys.
        const bool edge = tile_key + ROWS > query + 1 || statistics.from[ROWS - 1] > tile_key;
        products_wait<1>(); // the scores
        products_touch(scores);
        const float scale = tilt<true>(call, slope, own, query, scores);
#pragma unroll
        for (uint32_t n = 0; n < N; n++) {
            const float2 lse_log2 = *reinterpret_cast<const float2 *>(statistics.lse_log2 + n * 8 + 2 * t);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) scores[n][i] = exp2_fast(scores[n][i] * scale - (i % 2 ? lse_log2.y : lse_log2.x));
        }
        if (edge)
#pragma unroll
            for (uint32_t n = 0; n < N; n++) {
                const uint2 from = *reinterpret_cast<const uint2 *>(statistics.from + n * 8 + 2 * t);
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                    const uint32_t key = own + g + i / 2 * 8, at = query + n * 8 + 2 * t + i % 2;
                    if (key > at || key < (i % 2 ? from.y : from.x)) scores[n][i] = 0.0f;
                }
            }
        round_weights<E>(weights, scores);
        products_touch(weights);
        products_touch(dv);
        products_begin();
        multiply_weights<E, DIM, ROWS>(dv, weights, of_douts);
        products_commit();
        products_wait<1>(); // the gradients of weights
        products_touch(gradients);
#pragma unroll
        for (uint32_t n = 0; n < N; n++) {
            const float2 of_query = *reinterpret_cast<const float2 *>(statistics.delta + n * 8 + 2 * t);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) gradients[n][i] = scores[n][i] * (gradients[n][i] - (i % 2 ? of_query.y : of_query.x));
        }
        round_weights<E>(slants, gradients);
        products_touch(slants);
        products_touch(dk);
        products_begin();
        multiply_weights<E, DIM, ROWS>(dk, slants, of_queries);
        products_commit();
        products_wait<0>();
        products_touch(dk);
        products_touch(dv);
        release(shared.empty + slot);
        turn.count++;
    };
    barrier_wait(shared.stay_full, 0);
    for (uint32_t in_group = 0; in_group < of_group; in_group++) {
        const float slope = call.slopes ? call.slopes[group * of_group + in_group] : 0.0f;
        for (uint32_t tile = first_tile; tile < end_tile; tile++) step(slope, tile * ROWS);
    }
    // This warp's rows of keys and values are not needed any more: nobody else multiplies them.
    const float scales[2] = {call.scale, call.scale}, ones[2] = {1.0f, 1.0f};
    const uint32_t count = own < call.s ? call.s - own : 0;
    some_wait(1 + half, 128); // but the whole warpgroup has
    uint16_t *const to = dqkv + own * qkv_stride(call) + qkv_at(call, sample, group, of_group);
    store_warp<E, ROWS, DIM>(to, qkv_stride(call), count, shared.first_stay + half * TILE + warp * 16 * SWIZZLED_ROW, dk, scales);
    store_warp<E, ROWS, DIM>(to + call.head_dim, qkv_stride(call), count, shared.second_stay + half * TILE + warp * 16 * SWIZZLED_ROW, dv, ones);
}

/// Gradients of queries. The two kinds are queries and gradients of outputs, which stay, and keys and values.
template <class E, int DIM>
DEVICE void gradients_of_queries(const Attention &call, const TensorMap *qkv, const TensorMap *dout, const float *lse, const float *delta, uint16_t *dqkv) {
    constexpr uint32_t TILE = Shared<DIM>::TILE;
    DYNAMIC_SHARED(memory);
    const Shared<DIM> shared(memory);
    const uint32_t first = (gridDim.x - 1 - blockIdx.x) * BOTH, head = blockIdx.y, sample = blockIdx.z, of_group = call.heads_per_group;
    const uint32_t group = head / of_group, parts = group * (of_group + 2), lane = threadIdx.x % 32;
    const uint32_t first_tile = first_key(call, sample, first) / ROWS, end_tile = (min(first + BOTH, call.s) - 1) / ROWS + 1;
    shared.make_barriers(1);

    if (threadIdx.x < 128) {
        registers_give<24>();
        if (threadIdx.x != 0) return;
        fetch_map(qkv);
        fetch_map(dout);
        barrier_expect(shared.stay_full, 4 * TILE);
        for (uint32_t half = 0; half < 2; half++) {
            copy_tile<ROWS, DIM>(shared.first_stay + half * TILE, qkv, first + half * ROWS, parts + head % of_group, sample, shared.stay_full);
            copy_tile<ROWS, DIM>(shared.second_stay + half * TILE, dout, first + half * ROWS, head, sample, shared.stay_full);
        }
        Turn<STAGES> turn;
        for (; turn.count < end_tile - first_tile; turn.count++) {
            const uint32_t slot = turn.slot(), key = (first_tile + turn.count) * ROWS;
            barrier_wait(shared.empty + slot, turn.parity() ^ 1);
            barrier_expect(shared.full + slot, 2 * TILE);
            copy_tile<ROWS, DIM>(shared.first + slot * TILE, qkv, key, parts + of_group, sample, shared.full + slot);
            copy_tile<ROWS, DIM>(shared.second + slot * TILE, qkv, key, parts + of_group + 1, sample, shared.full + slot);
        }
        return;
    }
    registers_take<240>();
    const uint32_t half = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    const uint32_t tile_query = first + half * ROWS, own = tile_query + warp * 16;
    unsigned char *const own_queries = shared.first_stay + half * TILE + warp * 16 * SWIZZLED_ROW;
    const uint32_t seen_by_all = first_key(call, sample, tile_query + ROWS - 1);
    const float slope = call.slopes ? call.slopes[head] : 0.0f;
    float lse_log2[2], of_query[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t query = own + g + 8 * i;
        const size_t at = statistics_at(call, sample, head) + query;
        lse_log2[i] = query < call.s ? lse[at] * LOG2_E : 0.0f;
        of_query[i] = query < call.s ? delta[at] : 0.0f;
    }
    float dq[DIM / 8][4], scores[N][4], gradients[N][4];
    uint32_t queries[DIM / 16][4], douts[DIM / 16][4], slants[N / 2][4];
    clear(dq);
    const auto begin = [&](const Turn<STAGES> &turn) {
        barrier_wait(shared.full + turn.slot(), turn.parity());
        products_touch(queries);
        products_touch(douts);
        products_begin();
        multiply_rows<E, DIM, ROWS>(scores, queries, shared_address(shared.first + turn.slot() * TILE));
        products_commit();
        multiply_rows<E, DIM, ROWS>(gradients, douts, shared_address(shared.second + turn.slot() * TILE));
        products_commit();
    };
    Turn<STAGES> turn;
    barrier_wait(shared.stay_full, 0);
    load_rows<ROWS, DIM>(queries, own_queries);
    load_rows<ROWS, DIM>(douts, shared.second_stay + half * TILE + warp * 16 * SWIZZLED_ROW);
    while (turn.count < end_tile - first_tile) {
        begin(turn);
        const uint32_t slot = turn.slot(), key = (first_tile + turn.count) * ROWS;
        const bool edge = key + ROWS > tile_query + 1 || seen_by_all > key;
        products_wait<1>(); // the scores
        products_touch(scores);
        const float scale = tilt<false>(call, slope, own, key, scores);
#pragma unroll
        for (int n = 0; n < static_cast<int>(N); n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[n][i] = exp2_fast(scores[n][i] * scale - lse_log2[i / 2]);
        if (edge)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t at = own + g + 8 * i, from = first_key(call, sample, at);
#pragma unroll
                for (int n = 0; n < static_cast<int>(N); n++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const uint32_t of = key + n * 8 + 2 * t + j;
                        if (of > at || of < from) scores[n][2 * i + j] = 0.0f;
                    }
            }
        products_wait<0>(); // the gradients of weights
        products_touch(gradients);
#pragma unroll
        for (int n = 0; n < static_cast<int>(N); n++)
#pragma unroll
            for (int i = 0; i < 4; i++) gradients[n][i] = scores[n][i] * (gradients[n][i] - of_query[i / 2]);
        round_weights<E>(slants, gradients);
        products_touch(slants);
        products_touch(dq);
        products_begin();
        multiply_weights<E, DIM, ROWS>(dq, slants, shared_address(shared.first + slot * TILE));
        products_commit();
        products_wait<0>();
        products_touch(dq);
        release(shared.empty + slot);
        turn.count++;
    }
    const float scales[2] = {call.scale, call.scale};
    uint16_t *const to = dqkv + own * qkv_stride(call) + qkv_at(call, sample, group, head % of_group);
    store_warp<E, ROWS, DIM>(to, qkv_stride(call), own < call.s ? call.s - own : 0, own_queries, dq, scales);
}

} // namespace

#define BACKWARD(NAME, E, DIM)                                                                                                             \
    KERNEL_BOUNDS(THREADS, 1, attention_dkdv_sm90a_##NAME##_##DIM, const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap dout, \
                  const Attention call, const float *lse, const float *delta, uint16_t *dqkv) {                                            \
        gradients_of_keys<E, DIM>(call, &qkv, &dout, lse, delta, dqkv);                                                                    \
    }                                                                                                                                      \
    KERNEL_BOUNDS(THREADS, 1, attention_dq_sm90a_##NAME##_##DIM, const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap dout, \
                  const Attention call, const float *lse, const float *delta, uint16_t *dqkv) {                                            \
        gradients_of_queries<E, DIM>(call, &qkv, &dout, lse, delta, dqkv);                                                                 \
    }

BACKWARD(bf16, Bf16, 64)
BACKWARD(bf16, Bf16, 128)
BACKWARD(f16, F16, 64)
BACKWARD(f16, F16, 128)
