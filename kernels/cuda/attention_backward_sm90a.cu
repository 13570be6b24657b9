// Gradients of queries, keys and values of attention in one pass, for Hopper and heads of 64
// columns. Scores and their weights are computed once. The two kernels of attention_dkdv_sm90a.cu
// and attention_dq_sm90a.cu compute them twice and need seven products where this one needs five.
//
// Two warpgroups compute as in attention_dkdv_sm90a.cu, and leave their gradients of scores
// ("slants") for each tile of queries in shared memory. A third warpgroup multiplies these by the
// keys and adds the result to sums in global memory. The sums of a tile of queries are added in the
// order of the tiles of keys, so that their bits are always the same. The block with the last tile
// of keys that the queries see finishes their gradients. Waiting for a turn, and signalling the
// next block, take as long as computing a tile, so three warps do nothing else.
#include "between_blocks.cuh"
#include "gradients_of_keys.cuh"

namespace {

constexpr int DIM = 64;
/// Tiles of gradients of scores in shared memory at once, for each warpgroup that computes them.
constexpr uint32_t SLANTS = 4;
/// Tiles of queries with a turn that is known in advance, or not signalled yet.
constexpr uint32_t TURNS = 4;
/// Registers per thread: of the producer warpgroup, of the two warpgroups for keys, and of the
/// third; 512 in all.
constexpr int OF_COPIES = 32, OF_KEYS = 200, OF_QUERIES = 80;

/// A block's shared memory, at multiples of 1024 bytes.
struct Block : Shared<DIM, 2> {
    static constexpr uint32_t SLANTS_BYTES = SLANTS * 2 * TILE, ROWS_BYTES = TILE;
    unsigned char *slants, *rows;
    /// Barriers of the gradients of scores; then, for each tile of queries: it is this block's
    /// turn, this block has added its part, and the next block was told.
    uint64_t *slants_full, *slants_empty, *turn, *added, *told;

    __device__ __forceinline__ explicit Block(unsigned char *memory)
        : Shared<DIM, 2>(memory + SLANTS_BYTES + ROWS_BYTES) {
        slants = memory;
        rows = slants + SLANTS_BYTES;
        slants_full = reinterpret_cast<uint64_t *>(numbers + STAYS);
        slants_empty = slants_full + SLANTS;
        turn = slants_empty + SLANTS;
        added = turn + TURNS;
        told = added + TURNS;
    }

    /// A warpgroup's gradients of scores for tile number `count`.
    __device__ __forceinline__ unsigned char *slants_of(uint32_t count, uint32_t half) const {
        return slants + (count % SLANTS * 2 + half) * TILE;
    }

    __device__ __forceinline__ void make_barriers() const {
        if (threadIdx.x == 0) {
            for (uint32_t slot = 0; slot < SLANTS; slot++) {
                barrier_make(slants_full + slot, 4 * CONSUMERS);
                barrier_make(slants_empty + slot, 4);
            }
            for (uint32_t slot = 0; slot < TURNS; slot++) {
                barrier_make(turn + slot, 1);
                barrier_make(added + slot, 4);
                barrier_make(told + slot, 1);
            }
        }
        // All warps except the producer release the resident tiles.
        Shared<DIM, 2>::make_barriers(1, 1 + 32, 4 * CONSUMERS + 4 + 3);
    }
};
static_assert(Block::SLANTS_BYTES % 1024 == 0 && Block::ROWS_BYTES % 1024 == 0,
    "tiles begin at multiples of 1024 bytes");

/// Gradients of scores for the third warpgroup to multiply.
struct SharedSlants {
    const Block &shared;

    __device__ __forceinline__ void wait_for_room(uint32_t count) const {
        barrier_wait(shared.slants_empty + count % SLANTS, count / SLANTS % 2 ^ 1);
    }

    __device__ __forceinline__ void hand_over(
        uint32_t count, uint32_t half, const uint32_t (&slants)[N / 2][4]) const {
        wait_for_room(count);
        // A row holds the gradients of scores of one key and 64 queries; fragment k has the columns
        // from 16 · k on.
        const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
        unsigned char *const tile = shared.slants_of(count, half);
#pragma unroll
        for (uint32_t k = 0; k < N / 2; k++)
            stmatrix(tile + swizzled(row, 2 * k + lane / 16), slants[k]);
        before_copies();
        release(shared.slants_full + count % SLANTS);
        products_begin(); // again, because of the branches
    }

    __device__ __forceinline__ void none(uint32_t count) const {
        wait_for_room(count);
        release(shared.slants_full + count % SLANTS);
    }
};

/// A block's place in the order in which tiles of keys add to the sums of a tile of queries.
struct Order {
    uint32_t own, first, last, number;

    __device__ __forceinline__ Order(
        const Attention &call, const KeyWork &work, uint32_t head, uint32_t tile, uint32_t from)
        : own(work.first / (2 * ROWS)), first(from / (2 * ROWS)), last(tile / 2),
          number((work.sample * call.groups * call.heads_per_group + head) *
                     ((call.s + ROWS - 1) / ROWS) +
                 tile) {}

    /// Whether the queries see these keys. If the table of first keys decreases, they may not.
    __device__ __forceinline__ bool counts() const { return own >= first; }
    __device__ __forceinline__ bool begins() const { return own == first; }
    __device__ __forceinline__ bool ends() const { return own == last; }
};

/// Calls `each` for every tile, in order, with its piece of work, its head within the group, its
/// number among all tiles of the block, and its place in the order of adding. Then releases the
/// resident tiles.
template <class F>
DEVICE void tiles_of_all_work(const Attention &call, const Block &shared, uint32_t tiles,
    uint32_t all, uint32_t section, const F &each) {
    Turn<Block::STAYS> stay;
    for (uint32_t count = 0;; stay.count++) {
        barrier_wait(shared.stay_full + stay.slot(), stay.parity());
        const uint32_t number = uniform(shared.numbers[stay.slot()]);
        if (number >= all) break;
        const KeyWork work(call, number, tiles, section);
        // The first key that a tile's queries see comes from memory if there are documents, so it
        // is loaded one tile ahead.
        uint32_t next_from = first_key(call, work.sample, (work.end_tile - 1) * ROWS);
        for (uint32_t tile = work.end_tile; tile-- > work.first_tile;) {
            const uint32_t from = uniform(next_from);
            next_from = first_key(call, work.sample, max(tile, 1u) * ROWS - ROWS);
            for (uint32_t in_group = 0; in_group < call.heads_per_group; in_group++, count++)
                each(stay.slot(), work, in_group, tile, count, from,
                    Order(call, work, work.group * call.heads_per_group + in_group, tile, from));
        }
        release(shared.stay_empty + stay.slot());
    }
}

/// One warp: waits for the block's turn at each tile of queries.
DEVICE void wait_for_turns(const Attention &call, const Block &shared, const uint32_t *numbers,
    uint32_t tiles, uint32_t all, uint32_t section) {
    tiles_of_all_work(call, shared, tiles, all, section,
        [&](uint32_t, const KeyWork &, uint32_t, uint32_t, uint32_t count, uint32_t,
            const Order &order) {
            const uint32_t slot = count % TURNS;
            barrier_wait(shared.told + slot, count / TURNS % 2 ^ 1);
            if (threadIdx.x % 32 == 0 && order.counts() && !order.begins())
                wait_for_number(numbers + order.number, order.own);
            release(shared.turn + slot);
        });
}

/// One warp: signals the next block that a turn is over, for every other turn. A fence takes about
/// as long as a tile, so two warps alternate.
DEVICE void tell_of_turns(const Attention &call, const Block &shared, uint32_t *numbers,
    uint32_t tiles, uint32_t all, uint32_t section, uint32_t which) {
    static_assert(TURNS % 2 == 0, "a slot is always the same warp's");
    tiles_of_all_work(call, shared, tiles, all, section,
        [&](uint32_t, const KeyWork &, uint32_t, uint32_t, uint32_t count, uint32_t,
            const Order &order) {
            if (count % 2 != which) return;
            const uint32_t slot = count % TURNS;
            barrier_wait(shared.added + slot, count / TURNS % 2);
            if (threadIdx.x % 32 == 0 && order.counts() && !order.ends())
                set_number(numbers + order.number, order.own + 1);
            release(shared.told + slot);
        });
}

/// Computes C = slantsᵀ · keys, for K keys of consecutive tiles.
template <class E, uint32_t K>
DEVICE void multiply_slants(float (&c)[DIM / 8][4], uint64_t slants, uint64_t keys) {
    constexpr uint32_t STEP = 16 * SWIZZLED_ROW / 16; // of a descriptor, for 16 rows
    products_touch(c);
    products_begin();
    Wgmma<E, DIM>::assign_turned(c, slants, keys);
#pragma unroll
    for (uint32_t k = 1; k < K / 16; k++)
        Wgmma<E, DIM>::add_turned(c, slants + k * STEP, keys + k * STEP);
    products_commit();
    products_wait<0>();
    products_touch(c);
}

/// Gradients of queries. Adds the contribution of the block's keys to `sums`, which hold every tile
/// of queries in the layout of a warpgroup's registers. Finished gradients go to `dqkv`.
template <class E>
DEVICE void gradients_of_queries(const Attention &call, const Block &shared, uint16_t *dqkv,
    float4 *sums, uint32_t tiles, uint32_t all, uint32_t section, const Rotation &rotation) {
    const auto each = [&](uint32_t stay, const KeyWork &work, uint32_t in_group, uint32_t tile,
                          uint32_t count, uint32_t from, const Order &order) {
        float dq[DIM / 8][4];
        barrier_wait(shared.slants_full + count % SLANTS, count / SLANTS % 2);
        // Keys that no query of the tile sees are not multiplied: their values are arbitrary.
        const bool first_sees = from<work.first + ROWS, second_sees = tile> work.first_tile;
        const uint32_t half = first_sees ? 0 : 1;
        const uint64_t slants = operand(shared_address(shared.slants_of(count, half)), Block::TILE);
        const uint64_t keys = operand(shared_address(shared.first_stay(stay, half)), Block::TILE);
        if (first_sees && second_sees) multiply_slants<E, 2 * ROWS>(dq, slants, keys);
        else multiply_slants<E, ROWS>(dq, slants, keys);
        release(shared.slants_empty + count % SLANTS);

        const uint32_t slot = count % TURNS;
        barrier_wait(shared.turn + slot, count / TURNS % 2);
        float4 *const to =
            sums + static_cast<size_t>(order.number) * (ROWS * DIM / 4) + threadIdx.x % 128;
        if (order.counts()) {
            if (order.ends()) {
                if (!order.begins())
#pragma unroll
                    for (uint32_t n = 0; n < DIM / 8; n++) {
                        const float4 before = __ldcg(to + n * 128);
                        dq[n][0] += before.x, dq[n][1] += before.y, dq[n][2] += before.z,
                            dq[n][3] += before.w;
                    }
            } else if (order.begins()) {
#pragma unroll
                for (uint32_t n = 0; n < DIM / 8; n++)
                    __stcg(to + n * 128, make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]));
            } else {
#pragma unroll
                for (uint32_t n = 0; n < DIM / 8; n++) add_to(to + n * 128, dq[n]);
            }
        }
        release(shared.added + slot);
        if (!order.counts() || !order.ends()) return;
        const uint32_t warp = uniform(threadIdx.x / 32 % 4), own = tile * ROWS + warp * 16;
        const float scales[2] = {call.scale, call.scale};
        rotation.turn_back<DIM>(call, work.sample, own, dq);
        store_warp<E, ROWS, DIM>(
            dqkv + own * qkv_stride(call) + qkv_at(call, work.sample, work.group, in_group),
            qkv_stride(call), own < call.s ? call.s - own : 0,
            shared.rows + warp * 16 * SWIZZLED_ROW, dq, scales);
    };
    tiles_of_all_work(call, shared, tiles, all, section, each);
}

template <class E>
DEVICE void run_one_pass(const Attention &call, const TensorMap *qkv, const TensorMap *dout,
    const float *lse, const float *delta, uint16_t *dqkv, uint32_t *next, uint32_t section,
    const Rotation &rotation, float4 *sums) {
    DYNAMIC_SHARED(memory);
    const Block shared(memory);
    const uint32_t tiles = (call.s + Block::ALL - 1) / Block::ALL,
                   all = tiles * call.groups * call.b;
    // The index of the piece of work, one more that is not used here, and the turn of every tile of
    // queries of every head.
    uint32_t *const numbers = next + 2;
    shared.make_barriers();
    const uint32_t warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        registers_give<OF_COPIES>();
        const uint32_t warp = uniform(threadIdx.x / 32);
        if (warp == 0)
            copy_work<DIM>(call, shared, qkv, dout, lse, delta, next, tiles, all, section);
        else if (warp == 1) wait_for_turns(call, shared, numbers, tiles, all, section);
        else tell_of_turns(call, shared, numbers, tiles, all, section, warp % 2);
    } else if (warpgroup == 3) {
        registers_give<OF_QUERIES>();
        gradients_of_queries<E>(call, shared, dqkv, sums, tiles, all, section, rotation);
    } else {
        registers_take<OF_KEYS>();
        gradients_of_keys<E, DIM>(
            call, shared, dqkv, tiles, all, section, rotation, SharedSlants{shared});
    }
}

} // namespace

#define KERNEL_OF(DTYPE, E)                                                                        \
    KERNEL_BOUNDS(512, 1, attention_backward_sm90a_##DTYPE##_64,                                   \
        const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap dout,             \
        const Attention call, const float *lse, const float *delta, uint16_t *dqkv,                \
        uint32_t *next, uint32_t section, const Rotation rotation, float4 *sums) {                 \
        run_one_pass<E>(call, &qkv, &dout, lse, delta, dqkv, next, section, rotation, sums);       \
    }
KERNEL_OF(bf16, Bf16)
KERNEL_OF(f16, F16)
