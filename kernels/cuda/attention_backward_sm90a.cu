// Attention backward for Hopper, bf16 and f16, heads of 64 or 128 columns, without dropout: the two passes of attention_backward.cu by
// asynchronous products of warpgroups and tensor copies (Shah et al. 2024, FlashAttention-3).
//
// A block has three warpgroups. A warp of the first has tiles copied; the other two keep 64 rows each, of keys and values or of queries and
// gradients of outputs, and go over tiles of 64 rows of the others. Weights stay in registers as left operands. A tile's scores and
// gradients of weights are multiplied before what the tile before it adds to the results, which then runs while the weights are made.
// Blocks stay and take one piece of work after another, from the longest ones on, as long as there are any; where shared memory has room, what
// stays for the next one is copied meanwhile.
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

    /// By a warp: of a head's queries from `query` on.
    __device__ __forceinline__ void fill(const Attention &call, const float *lses, const float *deltas, uint32_t sample, uint32_t head, uint32_t query) {
#pragma unroll
        for (uint32_t i = threadIdx.x % 32; i < ROWS; i += 32) {
            const bool valid = query + i < call.s;
            const size_t at = statistics_at(call, sample, head) + query + i;
            lse_log2[i] = valid ? lses[at] * LOG2_E : 0.0f;
            delta[i] = valid ? deltas[at] : 0.0f;
            from[i] = first_key(call, sample, query + i);
        }
    }
};

/// Of a block, at multiples of 1024 bytes: what stays, of each warpgroup, and what comes and goes, each in two kinds (queries or keys;
/// gradients of outputs or values).
template <int DIM>
struct Shared {
    static constexpr uint32_t TILE = Tile<ROWS, DIM>::BYTES;
    /// Sets of what stays: the present one, and, for narrow heads, the next.
    static constexpr uint32_t STAYS = DIM == 64 ? 2 : 1;
    unsigned char *stay, *first, *second;
    /// Of tiles of queries: those that come and go, or those that stay.
    Statistics *statistics;
    uint64_t *stay_full, *stay_empty, *full, *empty;
    /// Of what stays: which piece of work it is for.
    uint32_t *numbers;

    __device__ __forceinline__ explicit Shared(unsigned char *memory) {
        stay = memory;
        first = stay + STAYS * 4 * TILE;
        second = first + STAGES * TILE;
        statistics = reinterpret_cast<Statistics *>(second + STAGES * TILE);
        stay_full = reinterpret_cast<uint64_t *>(statistics + STAGES);
        stay_empty = stay_full + STAYS;
        full = stay_empty + STAYS;
        empty = full + STAGES;
        numbers = reinterpret_cast<uint32_t *>(empty + STAGES);
    }

    /// What stays of a warpgroup: of the first kind, and of the second.
    __device__ __forceinline__ unsigned char *first_stay(uint32_t slot, uint32_t half) const { return stay + (slot * 4 + half) * TILE; }
    __device__ __forceinline__ unsigned char *second_stay(uint32_t slot, uint32_t half) const { return stay + (slot * 4 + 2 + half) * TILE; }

    /// `stay_arrivals` complete what stays and `arrivals` a stage, besides their bytes.
    __device__ __forceinline__ void make_barriers(uint32_t stay_arrivals, uint32_t arrivals) const {
        if (threadIdx.x == 0) {
            for (uint32_t slot = 0; slot < STAYS; slot++) {
                barrier_make(stay_full + slot, stay_arrivals);
                barrier_make(stay_empty + slot, CONSUMER_WARPS);
            }
            for (uint32_t slot = 0; slot < STAGES; slot++) {
                barrier_make(full + slot, arrivals);
                barrier_make(empty + slot, CONSUMER_WARPS);
            }
            barriers_made();
        }
        __syncthreads();
    }
};

/// By a warp: takes the next piece of work, when there is room for what stays, and tells of it; false if there is none.
template <int DIM>
DEVICE bool take(const Shared<DIM> &shared, const Turn<Shared<DIM>::STAYS> &stay, uint32_t *next, uint32_t all, uint32_t &number) {
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) number = atomicAdd(next, 1u);
    number = __shfl_sync(~0u, number, 0);
    barrier_wait(shared.stay_empty + stay.slot(), stay.parity() ^ 1);
    if (lane == 0) shared.numbers[stay.slot()] = number;
    return number < all;
}

/// A tile of keys of a group, and the tiles of queries that see some of them, which are the same for all heads.
struct KeyWork {
    uint32_t first, group, sample, first_tile, end_tile;

    __device__ __forceinline__ KeyWork(const Attention &call, uint32_t number, uint32_t tiles, uint32_t section) {
        const Place place(number, tiles, call.groups * call.b, section);
        first = place.tile * BOTH;
        group = place.which % call.groups;
        sample = place.which / call.groups;
        // From the first tile of queries that sees these keys to behind the last one that sees as far back.
        first_tile = first / ROWS;
        end_tile = first_tile + 1;
        uint32_t none = (call.s + ROWS - 1) / ROWS;
        while (end_tile < none) {
            const uint32_t middle = (end_tile + none) / 2;
            if (first_key(call, sample, middle * ROWS) < first + BOTH) end_tile = middle + 1;
            else none = middle;
        }
    }
};

/// A tile of queries of a head, and the tiles of keys that they see.
struct QueryWork {
    uint32_t first, head, sample, first_tile, end_tile;

    __device__ __forceinline__ QueryWork(const Attention &call, uint32_t number, uint32_t tiles, uint32_t section) {
        const uint32_t heads = call.groups * call.heads_per_group;
        const Place place(number, tiles, heads * call.b, section);
        first = (tiles - 1 - place.tile) * BOTH;
        head = place.which % heads;
        sample = place.which / heads;
        first_tile = first_key(call, sample, first) / ROWS;
        end_tile = (min(first + BOTH, call.s) - 1) / ROWS + 1;
    }
};

/// Has what stays for a tile copied: two kinds, of both warpgroups, from position `first` on.
template <int DIM>
DEVICE void fetch_stay(const Shared<DIM> &shared, uint32_t slot, const TensorMap *of_first, uint32_t first_part, const TensorMap *of_second,
                       uint32_t second_part, uint32_t first, uint32_t sample) {
    uint64_t *const full = shared.stay_full + slot;
    barrier_expect(full, 4 * Shared<DIM>::TILE);
    for (uint32_t half = 0; half < 2; half++) {
        copy_tile<ROWS, DIM>(shared.first_stay(slot, half), of_first, first + half * ROWS, first_part, sample, full);
        copy_tile<ROWS, DIM>(shared.second_stay(slot, half), of_second, first + half * ROWS, second_part, sample, full);
    }
}

/// The warp that has tiles for gradients of keys copied.
template <int DIM>
DEVICE void produce_queries(const Attention &call, const Shared<DIM> &shared, const TensorMap *qkv, const TensorMap *dout, const float *lse,
                            const float *delta, uint32_t *next, uint32_t tiles, uint32_t all, uint32_t section) {
    constexpr uint32_t TILE = Shared<DIM>::TILE;
    const uint32_t lane = threadIdx.x % 32, of_group = call.heads_per_group;
    Turn<STAGES> turn;
    Turn<Shared<DIM>::STAYS> stay;
    for (uint32_t number = 0; take(shared, stay, next, all, number); stay.count++) {
        const KeyWork work(call, number, tiles, section);
        const uint32_t parts = work.group * (of_group + 2);
        if (lane == 0) fetch_stay(shared, stay.slot(), qkv, parts + of_group, qkv, parts + of_group + 1, work.first, work.sample);
        for (uint32_t in_group = 0; in_group < of_group; in_group++)
            for (uint32_t tile = work.first_tile; tile < work.end_tile; tile++, turn.count++) {
                const uint32_t slot = turn.slot(), head = work.group * of_group + in_group, query = tile * ROWS;
                uint64_t *const full = shared.full + slot;
                barrier_wait(shared.empty + slot, turn.parity() ^ 1);
                if (lane == 0) {
                    barrier_expect(full, 2 * TILE);
                    copy_tile<ROWS, DIM>(shared.first + slot * TILE, qkv, query, parts + in_group, work.sample, full);
                    copy_tile<ROWS, DIM>(shared.second + slot * TILE, dout, query, head, work.sample, full);
                }
                shared.statistics[slot].fill(call, lse, delta, work.sample, head, query);
                barrier_arrive(full);
            }
    }
    if (lane == 0) barrier_arrive(shared.stay_full + stay.slot());
}

/// The warp that has tiles for gradients of queries copied.
template <int DIM>
DEVICE void produce_keys(const Attention &call, const Shared<DIM> &shared, const TensorMap *qkv, const TensorMap *dout, const float *lse,
                         const float *delta, uint32_t *next, uint32_t tiles, uint32_t all, uint32_t section) {
    constexpr uint32_t TILE = Shared<DIM>::TILE;
    const uint32_t lane = threadIdx.x % 32, of_group = call.heads_per_group;
    Turn<STAGES> turn;
    Turn<Shared<DIM>::STAYS> stay;
    for (uint32_t number = 0; take(shared, stay, next, all, number); stay.count++) {
        const QueryWork work(call, number, tiles, section);
        const uint32_t parts = work.head / of_group * (of_group + 2);
        if (lane == 0) fetch_stay(shared, stay.slot(), qkv, parts + work.head % of_group, dout, work.head, work.first, work.sample);
        for (uint32_t half = 0; half < 2; half++)
            shared.statistics[stay.slot() * 2 + half].fill(call, lse, delta, work.sample, work.head, work.first + half * ROWS);
        barrier_arrive(shared.stay_full + stay.slot());
        for (uint32_t tile = work.first_tile; tile < work.end_tile; tile++, turn.count++) {
            const uint32_t slot = turn.slot();
            barrier_wait(shared.empty + slot, turn.parity() ^ 1);
            if (lane != 0) continue;
            barrier_expect(shared.full + slot, 2 * TILE);
            copy_tile<ROWS, DIM>(shared.first + slot * TILE, qkv, tile * ROWS, parts + of_group, work.sample, shared.full + slot);
            copy_tile<ROWS, DIM>(shared.second + slot * TILE, qkv, tile * ROWS, parts + of_group + 1, work.sample, shared.full + slot);
        }
    }
    if (lane == 0) barrier_arrive(shared.stay_full + stay.slot());
    barrier_arrive(shared.stay_full + stay.slot());
}

/// Lets a tile go of which this warpgroup's rows see nothing, when it is there: earlier, the place's next tile could be taken for it.
template <int DIM>
DEVICE void pass(const Shared<DIM> &shared, Turn<STAGES> &turn) {
    barrier_wait(shared.full + turn.slot(), turn.parity());
    release(shared.empty + turn.slot());
    turn.count++;
}

/// Begins a tile's scores when it is there: the 64 rows `stay` times those that came. Rows that stay are multiplied from shared memory: in
/// registers they would be read half as often, for 3% of the time, but ptxas 13.0 gave such operands, of which only products in a loop read,
/// the registers of others in the same loop.
template <class E, int DIM>
DEVICE void begin_scores(const Shared<DIM> &shared, const Turn<STAGES> &turn, const unsigned char *stay, float (&scores)[N][4]) {
    barrier_wait(shared.full + turn.slot(), turn.parity());
    products_touch(scores);
    products_begin();
    multiply_rows<E, DIM, ROWS, ROWS>(scores, shared_address(stay), shared_address(shared.first + turn.slot() * Shared<DIM>::TILE));
    products_commit();
}

/// Begins the gradients of the same tile's weights.
template <class E, int DIM>
DEVICE void begin_gradients(const Shared<DIM> &shared, const Turn<STAGES> &turn, const unsigned char *stay, float (&gradients)[N][4]) {
    products_touch(gradients);
    products_begin();
    multiply_rows<E, DIM, ROWS, ROWS>(gradients, shared_address(stay), shared_address(shared.second + turn.slot() * Shared<DIM>::TILE));
    products_commit();
}

/// Gradients of keys and values. The two kinds are keys and values, which stay, and queries and gradients of outputs.
template <class E, int DIM>
DEVICE void gradients_of_keys(const Attention &call, const Shared<DIM> &shared, uint16_t *dqkv, uint32_t tiles, uint32_t all, uint32_t section) {
    // What a tile adds runs beside what becomes of the next one's scores, and of narrow heads of the gradients of its weights; the results of wide
    // ones take the registers that those would need.
    constexpr bool BOTH_AHEAD = DIM == 64;
    constexpr uint32_t TILE = Shared<DIM>::TILE;
    const uint32_t half = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t of_group = call.heads_per_group;
    Turn<STAGES> turn;
    Turn<Shared<DIM>::STAYS> stay;
    for (;; stay.count++) {
        barrier_wait(shared.stay_full + stay.slot(), stay.parity());
        const uint32_t number = shared.numbers[stay.slot()];
        if (number >= all) break;
        const KeyWork work(call, number, tiles, section);
        const uint32_t tile_key = work.first + half * ROWS, own = tile_key + warp * 16;
        unsigned char *const own_keys = shared.first_stay(stay.slot(), half), *const own_values = shared.second_stay(stay.slot(), half);
        float dk[DIM / 8][4], dv[DIM / 8][4], scores[N][4], gradients[N][4];
        uint32_t weights[N / 2][4], slants[N / 2][4];
        clear(dk);
        clear(dv);
        uint32_t tile = 0, in_group = 0, before = 0;
        // The scores of the tile whose turn it is become weights.
        const auto weigh = [&] {
            const Statistics &statistics = shared.statistics[turn.slot()];
            const uint32_t query = tile * ROWS;
            const float slope = call.slopes ? call.slopes[work.group * of_group + in_group] : 0.0f;
            // Some query of the tile does not see all of this warpgroup's keys.
            const bool edge = tile_key + ROWS > query + 1 || statistics.from[ROWS - 1] > tile_key;
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
        };
        const auto slant = [&] {
            const Statistics &statistics = shared.statistics[turn.slot()];
            products_touch(gradients);
#pragma unroll
            for (uint32_t n = 0; n < N; n++) {
                const float2 of_query = *reinterpret_cast<const float2 *>(statistics.delta + n * 8 + 2 * t);
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) gradients[n][i] = scores[n][i] * (gradients[n][i] - (i % 2 ? of_query.y : of_query.x));
            }
        };
        const auto add = [&](uint32_t slot) {
            multiply_weights<E, DIM, ROWS>(dv, weights, shared_address(shared.second + slot * TILE));
            multiply_weights<E, DIM, ROWS>(dk, slants, shared_address(shared.first + slot * TILE));
            products_commit();
        };
        // The first tile's queries see the first warpgroup's keys alone.
        const uint32_t own_tile = work.first_tile + half;
        const auto enter = [&] {
            tile = own_tile;
            if (half == 1) pass(shared, turn);
        };
        const auto next = [&] {
            turn.count++;
            if (++tile == work.end_tile && ++in_group < of_group) enter();
        };
        // When the tile before has added what it adds, weights and slants become left operands.
        const auto round = [&](bool first) {
            products_wait<0>();
            products_touch(dv);
            products_touch(dk);
            if (!first) release(shared.empty + before);
            if constexpr (!BOTH_AHEAD) {
                begin_gradients<E>(shared, turn, own_values, gradients);
                products_wait<0>();
                slant();
            }
            round_weights<E>(weights, scores);
            round_weights<E>(slants, gradients);
            products_touch(weights);
            products_touch(slants);
        };
        const uint32_t steps = (work.end_tile - own_tile) * of_group;
        if (steps == 0) { // behind the sequence's end
            for (; in_group < of_group; in_group++) pass(shared, turn);
            release(shared.stay_empty + stay.slot());
            continue;
        }
        enter();
        begin_scores<E>(shared, turn, own_keys, scores);
        products_wait<0>();
        weigh();
        if constexpr (BOTH_AHEAD) {
            begin_gradients<E>(shared, turn, own_values, gradients);
            products_wait<0>();
            slant();
        }
        // Nothing that registers hold but dk and dv is multiplied from one round of the loop to the next: the compiler then moves none of it.
        for (uint32_t step = 0; step + 1 < steps; step++) {
            round(step == 0);
            before = turn.slot();
            next();
            begin_scores<E>(shared, turn, own_keys, scores);
            if constexpr (BOTH_AHEAD) begin_gradients<E>(shared, turn, own_values, gradients);
            add(before);
            products_wait<BOTH_AHEAD ? 2 : 1>(); // the scores
            weigh();
            if constexpr (BOTH_AHEAD) {
                products_wait<1>();
                slant();
            }
        }
        round(steps == 1);
        products_begin();
        add(turn.slot());
        products_wait<0>();
        products_touch(dk);
        products_touch(dv);
        release(shared.empty + turn.slot());
        next();
        // This warp's rows of keys and values are not needed any more: nobody else multiplies them.
        const float scales[2] = {call.scale, call.scale}, ones[2] = {1.0f, 1.0f};
        const uint32_t count = own < call.s ? call.s - own : 0;
        some_wait(1 + half, 128); // but the whole warpgroup has
        uint16_t *const to = dqkv + own * qkv_stride(call) + qkv_at(call, work.sample, work.group, of_group);
        store_warp<E, ROWS, DIM>(to, qkv_stride(call), count, own_keys + warp * 16 * SWIZZLED_ROW, dk, scales);
        store_warp<E, ROWS, DIM>(to + call.head_dim, qkv_stride(call), count, own_values + warp * 16 * SWIZZLED_ROW, dv, ones);
        before_copies();
        release(shared.stay_empty + stay.slot());
    }
}

/// Gradients of queries. The two kinds are queries and gradients of outputs, which stay, and keys and values.
template <class E, int DIM>
DEVICE void gradients_of_queries(const Attention &call, const Shared<DIM> &shared, uint16_t *dqkv, uint32_t tiles, uint32_t all, uint32_t section) {
    constexpr uint32_t TILE = Shared<DIM>::TILE;
    const uint32_t half = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Turn<STAGES> turn;
    Turn<Shared<DIM>::STAYS> stay;
    for (;; stay.count++) {
        barrier_wait(shared.stay_full + stay.slot(), stay.parity());
        const uint32_t number = shared.numbers[stay.slot()];
        if (number >= all) break;
        const QueryWork work(call, number, tiles, section);
        const uint32_t tile_query = work.first + half * ROWS, own = tile_query + warp * 16;
        unsigned char *const own_queries = shared.first_stay(stay.slot(), half);
        const unsigned char *const own_douts = shared.second_stay(stay.slot(), half);
        const Statistics &statistics = shared.statistics[stay.slot() * 2 + half];
        const uint32_t seen_by_all = statistics.from[ROWS - 1];
        // The last tile's keys are seen by the second warpgroup's queries alone.
        const uint32_t end_tile = min(work.end_tile, tile_query / ROWS + 1);
        const float slope = call.slopes ? call.slopes[work.head] : 0.0f;
        float lse_log2[2], of_query[2];
        uint32_t first_seen[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t row = warp * 16 + g + 8 * i;
            lse_log2[i] = statistics.lse_log2[row];
            of_query[i] = statistics.delta[row];
            first_seen[i] = statistics.from[row];
        }
        float dq[DIM / 8][4], scores[N][4], gradients[N][4];
        uint32_t slants[N / 2][4];
        clear(dq);
        const auto weigh = [&](uint32_t tile) {
            const uint32_t key = tile * ROWS;
            const bool edge = key + ROWS > tile_query + 1 || seen_by_all > key;
            products_touch(scores);
            const float scale = tilt<false>(call, slope, own, key, scores);
#pragma unroll
            for (int n = 0; n < static_cast<int>(N); n++)
#pragma unroll
                for (int i = 0; i < 4; i++) scores[n][i] = exp2_fast(scores[n][i] * scale - lse_log2[i / 2]);
            if (edge)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t at = own + g + 8 * i, from = first_seen[i];
#pragma unroll
                    for (int n = 0; n < static_cast<int>(N); n++)
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            const uint32_t of = key + n * 8 + 2 * t + j;
                            if (of > at || of < from) scores[n][2 * i + j] = 0.0f;
                        }
                }
        };
        const auto round = [&](bool first) {
#pragma unroll
            for (int n = 0; n < static_cast<int>(N); n++)
#pragma unroll
                for (int i = 0; i < 4; i++) gradients[n][i] = scores[n][i] * (gradients[n][i] - of_query[i / 2]);
            products_wait<0>();
            products_touch(dq);
            if (!first) release(shared.empty + turn.before());
            round_weights<E>(slants, gradients);
            products_touch(slants);
        };
        const auto add = [&](uint32_t slot) {
            multiply_weights<E, DIM, ROWS>(dq, slants, shared_address(shared.first + slot * TILE));
            products_commit();
        };
        begin_scores<E>(shared, turn, own_queries, scores);
        begin_gradients<E>(shared, turn, own_douts, gradients);
        products_wait<1>();
        weigh(work.first_tile);
        products_wait<0>();
        products_touch(gradients);
        for (uint32_t tile = work.first_tile; tile + 1 < end_tile; tile++) {
            round(tile == work.first_tile);
            const uint32_t slot = turn.slot();
            turn.count++;
            begin_scores<E>(shared, turn, own_queries, scores);
            begin_gradients<E>(shared, turn, own_douts, gradients);
            add(slot);
            products_wait<2>(); // the scores
            weigh(tile + 1);
            products_wait<1>(); // the gradients of weights
            products_touch(gradients);
        }
        round(work.first_tile + 1 == end_tile);
        products_begin();
        add(turn.slot());
        products_wait<0>();
        products_touch(dq);
        release(shared.empty + turn.slot());
        turn.count++;
        for (uint32_t tile = end_tile; tile < work.end_tile; tile++) pass(shared, turn);
        const float scales[2] = {call.scale, call.scale};
        some_wait(1 + half, 128); // the whole warpgroup has multiplied its queries
        uint16_t *const to = dqkv + own * qkv_stride(call) + qkv_at(call, work.sample, work.head / call.heads_per_group, work.head % call.heads_per_group);
        store_warp<E, ROWS, DIM>(to, qkv_stride(call), own < call.s ? call.s - own : 0, own_queries + warp * 16 * SWIZZLED_ROW, dq, scales);
        before_copies();
        release(shared.stay_empty + stay.slot());
    }
}

template <class E, int DIM>
DEVICE void run_keys(const Attention &call, const TensorMap *qkv, const TensorMap *dout, const float *lse, const float *delta, uint16_t *dqkv,
                     uint32_t *next, uint32_t section) {
    DYNAMIC_SHARED(memory);
    const Shared<DIM> shared(memory);
    const uint32_t tiles = (call.s + BOTH - 1) / BOTH, all = tiles * call.groups * call.b;
    shared.make_barriers(1, 1 + 32);
    if (threadIdx.x < 128) {
        registers_give<24>();
        if (threadIdx.x < 32) produce_queries(call, shared, qkv, dout, lse, delta, next, tiles, all, section);
    } else {
        registers_take<240>();
        gradients_of_keys<E, DIM>(call, shared, dqkv, tiles, all, section);
    }
}

template <class E, int DIM>
DEVICE void run_queries(const Attention &call, const TensorMap *qkv, const TensorMap *dout, const float *lse, const float *delta, uint16_t *dqkv,
                     uint32_t *next, uint32_t section) {
    DYNAMIC_SHARED(memory);
    const Shared<DIM> shared(memory);
    const uint32_t tiles = (call.s + BOTH - 1) / BOTH, all = tiles * call.groups * call.heads_per_group * call.b;
    shared.make_barriers(1 + 32, 1);
    if (threadIdx.x < 128) {
        registers_give<24>();
        if (threadIdx.x < 32) produce_keys(call, shared, qkv, dout, lse, delta, next + 1, tiles, all, section);
    } else {
        registers_take<240>();
        gradients_of_queries<E, DIM>(call, shared, dqkv, tiles, all, section);
    }
}

} // namespace

#define BACKWARD(NAME, E, DIM)                                                                                                             \
    KERNEL_BOUNDS(THREADS, 1, attention_dkdv_sm90a_##NAME##_##DIM, const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap dout, \
                  const Attention call, const float *lse, const float *delta, uint16_t *dqkv, uint32_t *next, uint32_t section) {          \
        run_keys<E, DIM>(call, &qkv, &dout, lse, delta, dqkv, next, section);                                                                    \
    }                                                                                                                                      \
    KERNEL_BOUNDS(THREADS, 1, attention_dq_sm90a_##NAME##_##DIM, const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap dout, \
                  const Attention call, const float *lse, const float *delta, uint16_t *dqkv, uint32_t *next, uint32_t section) {          \
        run_queries<E, DIM>(call, &qkv, &dout, lse, delta, dqkv, next, section);                                                                 \
    }

BACKWARD(bf16, Bf16, 64)
BACKWARD(bf16, Bf16, 128)
BACKWARD(f16, F16, 64)
BACKWARD(f16, F16, 128)
