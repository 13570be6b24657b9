// Gradients of keys and values for Hopper. Shared by the kernel for these alone
// (attention_dkdv_sm90a.cu) and the kernel for all gradients in one pass
// (attention_backward_sm90a.cu): pieces of work, the producer warp, and the warpgroups that
// compute.
#pragma once

#include "backward_sm90a.cuh"

/// A tile of keys of a group, and the tiles of queries that see some of them, which are the same
/// for all heads. Query tiles are taken from the last to the first, for all heads before the next
/// tile: key tiles that start at the same time then reach each query tile at the same time.
struct KeyWork {
    uint32_t first, group, sample, first_tile, end_tile;

    __device__ __forceinline__ KeyWork(
        const Attention &call, uint32_t number, uint32_t tiles, uint32_t section) {
        const Place place(number, tiles, call.groups * call.b, section);
        first = place.tile * 2 * ROWS;
        group = place.which % call.groups;
        sample = place.which / call.groups;
        // From the first tile of queries that sees these keys to the end of the last one that still
        // sees them, whatever lies between. If the table of first keys decreases, other tiles of
        // keys then still wait for this one at exactly the query tiles that it takes.
        first_tile = first / ROWS;
        end_tile = first_tile + 1;
        for (uint32_t end = (call.s + ROWS - 1) / ROWS; end > end_tile;
            end -= min(32u, end - end_tile)) {
            const uint32_t tile = end - 1 - threadIdx.x % 32;
            const bool is_later = tile >= end_tile && tile < end;
            const uint32_t seeing = __ballot_sync(
                ~0u, is_later && first_key(call, sample, tile * ROWS) < first + 2 * ROWS);
            if (seeing) {
                end_tile = uniform(end + 1 - __ffs(static_cast<int>(seeing)));
                break;
            }
        }
    }
};

/// The producer warp, which copies tiles for gradients of keys.
template <int DIM>
DEVICE void copy_work(const Attention &call, const Shared<DIM, 2> &shared, const TensorMap *qkv,
    const TensorMap *dout, const float *lse, const float *delta, uint32_t *next, uint32_t tiles,
    uint32_t all, uint32_t section) {
    constexpr uint32_t TILE = Shared<DIM, 2>::TILE;
    const uint32_t lane = threadIdx.x % 32, of_group = call.heads_per_group;
    Turn<STAGES> turn;
    Turn<Shared<DIM, 2>::STAYS> stay;
    for (uint32_t number = 0; take(shared, stay, next, all, number); stay.count++) {
        const KeyWork work(call, number, tiles, section);
        // The key and the value follow the heads of each group.
        const uint32_t end_head = (work.group + 1) * of_group, others = 2 * work.group;
        if (lane == 0)
            fetch_stay(shared, stay.slot(), qkv, end_head + others, qkv, end_head + others + 1,
                work.first, work.sample);
        for (uint32_t tile = work.end_tile; tile-- > work.first_tile;)
            for (uint32_t head = end_head - of_group; head < end_head; head++, turn.count++) {
                const uint32_t slot = turn.slot(), query = tile * ROWS;
                uint64_t *const full = shared.full + slot;
                barrier_wait(shared.empty + slot, turn.parity() ^ 1);
                if (lane == 0) {
                    barrier_expect(full, 2 * TILE);
                    copy_tile<ROWS, DIM>(
                        shared.first + slot * TILE, qkv, query, head + others, work.sample, full);
                    copy_tile<ROWS, DIM>(
                        shared.second + slot * TILE, dout, query, head, work.sample, full);
                }
                shared.statistics[slot].fill(call, lse, delta, work.sample, head, query);
                barrier_arrive(full);
            }
    }
    if (lane == 0) barrier_arrive(shared.stay_full + stay.slot());
}

/// For kernels in which no other warpgroup needs the gradients of scores ("slants"). `count` is the
/// number of a tile of queries among all that the block takes.
struct KeptSlants {
    /// Passes on a warp's 16 rows of a tile's slants, rounded.
    __device__ __forceinline__ void hand_over(
        uint32_t, uint32_t, const uint32_t (&)[N / 2][4]) const {}
    /// Announces that the warpgroup has no slants for a tile.
    __device__ __forceinline__ void none(uint32_t) const {}
};

/// Gradients of keys and values. Keys and values are resident; queries and gradients of outputs are
/// streamed. Slants, the gradients of scores, are passed on to `others`.
template <class E, int DIM, class Others>
DEVICE void gradients_of_keys(const Attention &call, const Shared<DIM, 2> &shared, uint16_t *dqkv,
    uint32_t tiles, uint32_t all, uint32_t section, const Rotation &rotation,
    const Others &others) {
    // A tile's contribution overlaps with processing the next tile's scores and, for narrow heads,
    // the gradients of its weights. For wide heads, the accumulators take the registers that this
    // would need.
    constexpr bool BOTH_AHEAD = DIM == 64;
    constexpr uint32_t TILE = Shared<DIM, 2>::TILE;
    const uint32_t half = uniform(threadIdx.x / 128) - 1, warp = uniform(threadIdx.x / 32 % 4),
                   lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t of_group = call.heads_per_group;
    Turn<STAGES> turn;
    Turn<Shared<DIM, 2>::STAYS> stay;
    for (;; stay.count++) {
        barrier_wait(shared.stay_full + stay.slot(), stay.parity());
        const uint32_t number = uniform(shared.numbers[stay.slot()]);
        if (number >= all) break;
        const KeyWork work(call, number, tiles, section);
        const uint32_t tile_key = work.first + half * ROWS, own = tile_key + warp * 16;
        unsigned char *const own_keys = shared.first_stay(stay.slot(), half),
                             *const own_values = shared.second_stay(stay.slot(), half);
        float dk[DIM / 8][4], dv[DIM / 8][4], scores[N][4], gradients[N][4];
        uint32_t weights[N / 2][4], slants[N / 2][4];
        clear(dk);
        clear(dv);
        uint32_t tile = 0, in_group = 0, before = 0;
        // A thread's part of its queries' statistics is loaded before the waits that precede its
        // use.
        const auto read = [&](float2(&of)[N], const float *from) {
#pragma unroll
            for (uint32_t n = 0; n < N; n++)
                of[n] = *reinterpret_cast<const float2 *>(from + n * 8 + 2 * t);
        };
        float2 lse_log2[N], delta[N];
        // Turns the current tile's scores into exponents of 2.
        uint32_t last_from = 0;
        const auto read_scores = [&] {
            const Statistics &statistics = shared.statistics[turn.slot()];
            read(lse_log2, statistics.lse_log2);
            last_from = statistics.from[ROWS - 1];
        };
        const auto lower = [&] {
            const Statistics &statistics = shared.statistics[turn.slot()];
            const uint32_t query = tile * ROWS;
            const float slope = call.slopes ? call.slopes[work.group * of_group + in_group] : 0.0f;
            // Whether any query of the tile does not see all of this warpgroup's keys.
            const bool edge = tile_key + ROWS > query + 1 || uniform(last_from) > tile_key;
            products_touch(scores);
            const float scale = tilt<true>(call, slope, own, query, scores);
#pragma unroll
            for (uint32_t n = 0; n < N; n++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                    scores[n][i] = scores[n][i] * scale - (i % 2 ? lse_log2[n].y : lse_log2[n].x);
            if (edge)
#pragma unroll
                for (uint32_t n = 0; n < N; n++) {
                    const uint2 from =
                        *reinterpret_cast<const uint2 *>(statistics.from + n * 8 + 2 * t);
#pragma unroll
                    for (uint32_t i = 0; i < 4; i++) {
                        const uint32_t key = own + g + i / 2 * 8,
                                       at = query + n * 8 + 2 * t + i % 2;
                        if (key > at || key < (i % 2 ? from.y : from.x)) scores[n][i] = -INFINITY;
                    }
                }
        };
        // Turns them into weights.
        const auto weigh = [&] {
#pragma unroll
            for (uint32_t n = 0; n < N; n++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) scores[n][i] = exp2_fast(scores[n][i]);
        };
        const auto slant = [&] {
#pragma unroll
            for (uint32_t n = 0; n < N; n++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                    gradients[n][i] =
                        scores[n][i] * (gradients[n][i] - (i % 2 ? delta[n].y : delta[n].x));
        };
        const auto add = [&](uint32_t slot) {
            multiply_weights<E, DIM, ROWS>(dv, weights, shared_address(shared.second + slot * TILE),
                dk, slants, shared_address(shared.first + slot * TILE));
            products_commit();
        };
        const auto next = [&] {
            turn.count++;
            if (++in_group < of_group) return;
            in_group = 0;
            tile--;
        };
        // The first query tile, which comes last, sees only the first warpgroup's keys.
        const uint32_t own_tile = work.first_tile + half;
        const auto pass_over = [&] {
            for (uint32_t head = 0; half == 1 && head < of_group; head++) {
                others.none(turn.count);
                pass(shared, turn);
            }
        };
        // Once the previous tile's contribution is added, weights and slants become left operands.
        const auto round = [&](bool first) {
            products_wait<0>();
            products_touch(dv);
            products_touch(dk);
            if (!first) release(shared.empty + before);
            if constexpr (!BOTH_AHEAD) {
                begin_gradients<E>(shared, turn, own_values, gradients);
                products_wait<0>();
                products_touch(gradients);
                read(delta, shared.statistics[turn.slot()].delta);
                slant();
            }
            round_weights<E>(weights, scores);
            round_weights<E>(slants, gradients);
            products_touch(weights);
            products_touch(slants);
        };
        const uint32_t steps = (work.end_tile - own_tile) * of_group;
        if (steps == 0) { // beyond the sequence's end
            pass_over();
            release(shared.stay_empty + stay.slot());
            continue;
        }
        tile = work.end_tile - 1;
        begin_scores<E>(shared, turn, own_keys, scores);
        read_scores();
        products_wait<0>();
        lower();
        if constexpr (BOTH_AHEAD) {
            read(delta, shared.statistics[turn.slot()].delta);
            begin_gradients<E>(shared, turn, own_values, gradients);
            products_wait<0>();
            products_touch(gradients);
        }
        weigh();
        if constexpr (BOTH_AHEAD) slant();
        // Of all registers, only dk and dv are operands of products across iterations of the loop,
        // so the compiler moves none of them.
        for (uint32_t step = 0; step + 1 < steps; step++) {
            round(step == 0);
            before = turn.slot();
            const uint32_t count = turn.count;
            next();
            begin_scores<E>(shared, turn, own_keys, scores);
            read_scores();
            if constexpr (BOTH_AHEAD) begin_gradients<E>(shared, turn, own_values, gradients);
            // Overlaps with the products in flight, and precedes those that read the same
            // registers.
            others.hand_over(count, half, slants);
            add(before);
            products_wait<BOTH_AHEAD ? 2 : 1>(); // the scores
            lower();
            if constexpr (BOTH_AHEAD) {
                read(delta, shared.statistics[turn.slot()].delta);
                // The gradients of weights; their arithmetic is then interleaved with the
                // exponentials.
                products_wait<1>();
                products_touch(gradients);
            }
            weigh();
            if constexpr (BOTH_AHEAD) slant();
        }
        round(steps == 1);
        others.hand_over(turn.count, half, slants);
        before = turn.slot();
        products_begin();
        add(before);
        products_wait<0>();
        products_touch(dk);
        products_touch(dv);
        release(shared.empty + before);
        next();
        pass_over();
        // This warp's rows of values are not needed any more, and no other warp multiplies them.
        // Keys may still be needed.
        const float scales[2] = {call.scale, call.scale}, ones[2] = {1.0f, 1.0f};
        const uint32_t count = own < call.s ? call.s - own : 0;
        some_wait(1 + half, 128); // the whole warpgroup has finished with them
        uint16_t *const to =
            dqkv + own * qkv_stride(call) + qkv_at(call, work.sample, work.group, of_group);
        store_warp<E, ROWS, DIM>(to + call.head_dim, qkv_stride(call), count,
            own_values + warp * 16 * SWIZZLED_ROW, dv, ones);
        rotation.turn_back<DIM>(call, work.sample, own, dk);
        store_warp<E, ROWS, DIM>(
            to, qkv_stride(call), count, own_values + warp * 16 * SWIZZLED_ROW, dk, scales);
        before_copies();
        release(shared.stay_empty + stay.slot());
    }
}
