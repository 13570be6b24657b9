// Gradients of queries of attention, for Hopper.
#include "backward_sm90a.cuh"

namespace {

/// A tile of queries of a head, and the range of key tiles that they see.
template <uint32_t QUERIES>
struct Work : QueryWork<QUERIES, ROWS> {
    uint32_t first_tile, end_tile;

    __device__ __forceinline__ Work(
        const Attention &call, uint32_t number, uint32_t tiles, uint32_t section)
        : QueryWork<QUERIES, ROWS>(call, number, tiles, section),
          first_tile(uniform(this->begin(call))), end_tile(this->end()) {}
};

/// The producer warp, which copies tiles for gradients of queries.
template <int DIM, uint32_t CONSUMERS>
DEVICE void copy_work(const Attention &call, const Shared<DIM, CONSUMERS> &shared,
    const TensorMap *qkv, const TensorMap *dout, const float *lse, const float *delta,
    uint32_t *next, uint32_t tiles, uint32_t all, uint32_t section) {
    using Block = Shared<DIM, CONSUMERS>;
    constexpr uint32_t TILE = Block::TILE;
    const uint32_t lane = threadIdx.x % 32, of_group = call.heads_per_group;
    Turn<STAGES> turn;
    Turn<Block::STAYS> stay;
    for (uint32_t number = 0; take(shared, stay, next, all, number); stay.count++) {
        const Work<Block::ALL> work(call, number, tiles, section);
        const uint32_t parts = work.head / of_group * (of_group + 2);
        if (lane == 0)
            fetch_stay(shared, stay.slot(), qkv, parts + work.head % of_group, dout, work.head,
                work.first, work.sample);
        for (uint32_t which = 0; which < CONSUMERS; which++)
            shared.statistics[stay.slot() * CONSUMERS + which].fill(
                call, lse, delta, work.sample, work.head, work.first + which * ROWS);
        barrier_arrive(shared.stay_full + stay.slot());
        for (uint32_t tile = work.first_tile; tile < work.end_tile; tile++, turn.count++) {
            const uint32_t slot = turn.slot();
            barrier_wait(shared.empty + slot, turn.parity() ^ 1);
            if (lane == 0) {
                barrier_expect(shared.full + slot, 2 * TILE);
                copy_tile<ROWS, DIM>(shared.first + slot * TILE, qkv, tile * ROWS, parts + of_group,
                    work.sample, shared.full + slot);
                copy_tile<ROWS, DIM>(shared.second + slot * TILE, qkv, tile * ROWS,
                    parts + of_group + 1, work.sample, shared.full + slot);
            }
            __syncwarp(); // no lane waits for a phase that the first lane has left
        }
    }
    if (lane == 0) barrier_arrive(shared.stay_full + stay.slot());
    barrier_arrive(shared.stay_full + stay.slot());
}

/// Gradients of queries. Queries and gradients of outputs are resident; keys and values are
/// streamed.
template <class E, int DIM, uint32_t CONSUMERS>
DEVICE void gradients_of_queries(const Attention &call, const Shared<DIM, CONSUMERS> &shared,
    uint16_t *dqkv, uint32_t tiles, uint32_t all, uint32_t section, const Rotation &rotation) {
    using Block = Shared<DIM, CONSUMERS>;
    constexpr uint32_t TILE = Block::TILE;
    const uint32_t which = uniform(threadIdx.x / 128) - 1, warp = uniform(threadIdx.x / 32 % 4),
                   lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Turn<STAGES> turn;
    Turn<Block::STAYS> stay;
    for (;; stay.count++) {
        barrier_wait(shared.stay_full + stay.slot(), stay.parity());
        const uint32_t number = uniform(shared.numbers[stay.slot()]);
        if (number >= all) break;
        const Work<Block::ALL> work(call, number, tiles, section);
        const uint32_t tile_query = work.first + which * ROWS, own = tile_query + warp * 16;
        if (tile_query >= work.end_query) { // beyond the end of a partial tile
            for (uint32_t tile = work.first_tile; tile < work.end_tile; tile++) pass(shared, turn);
            release(shared.stay_empty + stay.slot());
            continue;
        }
        unsigned char *const own_queries = shared.first_stay(stay.slot(), which);
        const unsigned char *const own_douts = shared.second_stay(stay.slot(), which);
        const Statistics &statistics = shared.statistics[stay.slot() * CONSUMERS + which];
        const uint32_t seen_by_all = uniform(statistics.from[ROWS - 1]);
        // Some of the first and last key tiles may be seen only by the other warpgroups' queries.
        // `max`: no tile before the copied ones, even if the table of first keys decreases.
        const uint32_t first_tile = max(work.first_tile, uniform(statistics.from[0]) / ROWS);
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
        for (uint32_t tile = work.first_tile; tile < first_tile; tile++) pass(shared, turn);
        float dq[DIM / 8][4], scores[N][4], gradients[N][4];
        uint32_t slants[N / 2][4];
        clear(dq);
        // Turns a tile's scores into exponents of 2.
        const auto lower = [&](uint32_t tile) {
            const uint32_t key = tile * ROWS;
            const bool edge = key + ROWS > tile_query + 1 || seen_by_all > key;
            products_touch(scores);
            const float scale = tilt<false>(call, slope, own, key, scores);
#pragma unroll
            for (int n = 0; n < static_cast<int>(N); n++)
#pragma unroll
                for (int i = 0; i < 4; i++) scores[n][i] = scores[n][i] * scale - lse_log2[i / 2];
            if (edge)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t at = own + g + 8 * i, from = first_seen[i];
#pragma unroll
                    for (int n = 0; n < static_cast<int>(N); n++)
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            const uint32_t of = key + n * 8 + 2 * t + j;
                            if (of > at || of < from) scores[n][2 * i + j] = -INFINITY;
                        }
                }
        };
        // Exponentials and gradients of scores, interleaved.
        const auto slant = [&] {
            products_touch(gradients);
#pragma unroll
            for (int n = 0; n < static_cast<int>(N); n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    gradients[n][i] = exp2_fast(scores[n][i]) * (gradients[n][i] - of_query[i / 2]);
        };
        // Once the previous tile's contribution is added, gradients of scores become left operands.
        const auto round = [&](bool first) {
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
        lower(first_tile);
        products_wait<0>();
        slant();
        for (uint32_t tile = first_tile; tile + 1 < end_tile; tile++) {
            round(tile == first_tile);
            const uint32_t slot = turn.slot();
            turn.count++;
            begin_scores<E>(shared, turn, own_queries, scores);
            begin_gradients<E>(shared, turn, own_douts, gradients);
            add(slot);
            products_wait<2>(); // the scores
            lower(tile + 1);
            products_wait<1>(); // the gradients of weights
            slant();
        }
        round(first_tile + 1 == end_tile);
        products_begin();
        add(turn.slot());
        products_wait<0>();
        products_touch(dq);
        release(shared.empty + turn.slot());
        turn.count++;
        for (uint32_t tile = end_tile; tile < work.end_tile; tile++) pass(shared, turn);
        const float scales[2] = {call.scale, call.scale};
        some_wait(1 + which, 128); // the whole warpgroup has finished with its queries
        uint16_t *const to = dqkv + own * qkv_stride(call) +
                             qkv_at(call, work.sample, work.head / call.heads_per_group,
                                 work.head % call.heads_per_group);
        rotation.turn_back<DIM>(call, work.sample, own, dq);
        store_warp<E, ROWS, DIM>(to, qkv_stride(call), own < call.s ? call.s - own : 0,
            own_queries + warp * 16 * SWIZZLED_ROW, dq, scales);
        before_copies();
        release(shared.stay_empty + stay.slot());
    }
}

/// Gradients of queries: a tile of queries of a head each.
struct OfQueries {
    /// Narrow heads leave room for three warpgroups. Their products then wait less for each other's
    /// weights.
    template <int DIM>
    static constexpr uint32_t CONSUMERS = DIM == 64 ? 3 : 2;
    /// Which of the two counters of pieces of work.
    static constexpr uint32_t NUMBER = 1;
    /// Arrivals that complete the barriers of resident tiles, and of a stage, besides the bytes:
    /// the thread that expects the bytes, and a warp that writes statistics.
    static constexpr uint32_t STAY_ARRIVALS = 1 + 32, ARRIVALS = 1;
    __device__ __forceinline__ static uint32_t heads(const Attention &call) {
        return call.groups * call.heads_per_group;
    }

    template <class... Args>
    __device__ __forceinline__ static void produce(const Args &...args) {
        copy_work(args...);
    }

    template <class E, int DIM, uint32_t CONSUMERS>
    __device__ __forceinline__ static void consume(const Attention &call,
        const Shared<DIM, CONSUMERS> &shared, uint16_t *dqkv, uint32_t tiles, uint32_t all,
        uint32_t section, const Rotation &rotation) {
        gradients_of_queries<E>(call, shared, dqkv, tiles, all, section, rotation);
    }
};

} // namespace

BACKWARD(dq, OfQueries)
