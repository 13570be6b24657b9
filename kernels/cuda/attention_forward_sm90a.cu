// Attention forward for Hopper, bf16 and f16, heads of 64 or 128 columns, without dropout (Shah et al. 2024, FlashAttention-3).
//
// A block has three warpgroups. A warp of the first has boxes of queries, keys and values copied, two tiles ahead; the other two
// take 64 queries each, multiply asynchronously from shared memory, and take turns: while one's products run the other makes weights.
// Within a warpgroup, too, the product with a tile's values runs beside that with the next tile's keys and its softmax. Blocks stay and take
// one tile of queries after another, from the longest ones on, as long as there are any; the next tile's copies begin while the last one's
// result is still written.
#include "softmax.cuh"
#include "warpgroups.cuh"

namespace {

constexpr uint32_t QUERIES = 128, KEYS = 128, STAGES = 2;
/// Queries of a warpgroup.
constexpr uint32_t OWN = 64;
constexpr uint32_t THREADS = 384, CONSUMER_WARPS = 8;

/// Of a block, at multiples of 1024 bytes.
template <int DIM>
struct Shared {
    static constexpr uint32_t TILE = Tile<KEYS, DIM>::BYTES;
    unsigned char *queries, *out, *keys, *values;
    uint64_t *queries_full, *queries_empty, *keys_full, *keys_empty, *values_full, *values_empty;
    /// Which piece of work the queries are of.
    uint32_t *number;

    __device__ __forceinline__ explicit Shared(unsigned char *memory) {
        queries = memory;
        out = queries + TILE;
        keys = out + TILE;
        values = keys + STAGES * TILE;
        queries_full = reinterpret_cast<uint64_t *>(values + STAGES * TILE);
        queries_empty = queries_full + 1;
        keys_full = queries_empty + 1;
        keys_empty = keys_full + STAGES;
        values_full = keys_empty + STAGES;
        values_empty = values_full + STAGES;
        number = reinterpret_cast<uint32_t *>(values_empty + STAGES);
    }
};

using Work = QueryWork<QUERIES, KEYS>;

/// Has a tile of a part of a group copied: queries, keys or values from position `first` on.
template <int DIM>
DEVICE void fetch(unsigned char *to, const TensorMap *map, uint32_t first, uint32_t part, uint32_t sample, uint64_t *full) {
    barrier_expect(full, Shared<DIM>::TILE);
    copy_tile<KEYS, DIM>(to, map, first, part, sample, full);
}

/// The warp that takes pieces of work and has everything copied. All of it, though one thread copies: what a warp has in common lies in uniform
/// registers, without which the 24 of each thread do not do.
template <int DIM>
DEVICE void produce(const Attention &call, const TensorMap *map, const Shared<DIM> &shared, uint32_t *next, uint32_t tiles, uint32_t all,
                    uint32_t section) {
    const bool first = threadIdx.x == 0;
    Turn<STAGES> turn;
    for (uint32_t parity = 1;; parity ^= 1) {
        uint32_t number = 0;
        if (first) number = atomicAdd(next, 1u);
        number = __shfl_sync(~0u, number, 0);
        barrier_wait(shared.queries_empty, parity);
        if (first) *shared.number = number;
        if (number >= all) break;
        const Work work(call, number, tiles, section);
        const uint32_t of_group = call.heads_per_group, group = work.head / of_group, parts = group * (of_group + 2);
        if (first) fetch<DIM>(shared.queries, map, work.first, parts + work.head % of_group, work.sample, shared.queries_full);
        const uint32_t end = work.end(call);
        for (uint32_t tile = work.begin(call); tile < end; tile++, turn.count++) {
            const uint32_t slot = turn.slot(), empty = turn.parity() ^ 1;
            barrier_wait(shared.keys_empty + slot, empty);
            if (first) fetch<DIM>(shared.keys + slot * Shared<DIM>::TILE, map, tile * KEYS, parts + of_group, work.sample, shared.keys_full + slot);
            barrier_wait(shared.values_empty + slot, empty);
            if (first) fetch<DIM>(shared.values + slot * Shared<DIM>::TILE, map, tile * KEYS, parts + of_group + 1, work.sample, shared.values_full + slot);
        }
    }
    if (first) barrier_arrive(shared.queries_full);
}

/// One of the two warpgroups that compute.
template <class E, int DIM>
DEVICE void consume(const Attention &call, const Shared<DIM> &shared, uint16_t *out, float *lse, uint32_t tiles, uint32_t all, uint32_t section) {
    constexpr uint32_t TILE = Shared<DIM>::TILE;
    const uint32_t warp = threadIdx.x / 32 % 4, half = threadIdx.x / 128 - 1;
    const uint32_t own_queries = shared_address(shared.queries) + half * OWN * SWIZZLED_ROW;
    const uint32_t mine = 1 + half, other = 2 - half;
    Turn<STAGES> turn;
    if (half == 1) some_come(other, 256); // the first one begins
    for (uint32_t taken = 0;; taken++) {
        barrier_wait(shared.queries_full, taken % 2);
        const uint32_t number = *shared.number;
        if (number >= all) return;
        const Work work(call, number, tiles, section);
        const uint32_t own = work.first + half * OWN + warp * 16, last = min(work.first + QUERIES, call.s) - 1;
        const uint32_t seen_by_all = first_key(call, work.sample, last);
        const float slope = call.slopes ? call.slopes[work.head] : 0.0f;
        Softmax<1> softmax;
        float gathered[1][DIM / 8][4], scores[1][KEYS / 8][4], corrections[1][2];
        uint32_t weights[KEYS / 16][4];
        softmax.clear();
        clear(gathered[0]);
        // Some query of this warpgroup does not see all keys of a tile.
        const auto is_edge = [&](uint32_t tile) { return (tile + 1) * KEYS > work.first + half * OWN + 1 || seen_by_all > tile * KEYS; };

        uint32_t tile = work.begin(call);
        const uint32_t end = work.end(call);
        barrier_wait(shared.keys_full + turn.slot(), turn.parity());
        some_wait(mine, 256);
        products_begin();
        multiply_rows<E, DIM, QUERIES, KEYS>(scores[0], own_queries, shared_address(shared.keys + turn.slot() * TILE));
        products_commit();
        some_come(other, 256);
        products_wait<0>();
        products_touch(scores[0]);
        release(shared.keys_empty + turn.slot());
        softmax.step(call, slope, work.sample, own, tile * KEYS, is_edge(tile), scores, corrections);
        round_weights<E>(weights, scores[0]);
        for (tile++; tile < end; tile++) {
            const uint32_t slot = turn.slot(), parity = turn.parity();
            turn.count++;
            const uint32_t next = turn.slot();
            barrier_wait(shared.keys_full + next, turn.parity());
            some_wait(mine, 256);
            products_begin();
            multiply_rows<E, DIM, QUERIES, KEYS>(scores[0], own_queries, shared_address(shared.keys + next * TILE));
            products_commit();
            barrier_wait(shared.values_full + slot, parity);
            products_touch(weights);
            products_touch(gathered[0]);
            products_begin();
            multiply_weights<E, DIM, KEYS>(gathered[0], weights, shared_address(shared.values + slot * TILE));
            products_commit();
            some_come(other, 256);
            products_wait<1>();
            products_touch(scores[0]);
            release(shared.keys_empty + next);
            softmax.step(call, slope, work.sample, own, tile * KEYS, is_edge(tile), scores, corrections);
            computed_before_wait(softmax.sums[0][0] + softmax.sums[0][1], own_queries);
            products_wait<0>();
            products_touch(gathered[0]);
            release(shared.values_empty + slot);
            correct(gathered, corrections);
            round_weights<E>(weights, scores[0]);
        }
        release(shared.queries_empty);
        barrier_wait(shared.values_full + turn.slot(), turn.parity());
        products_touch(weights);
        products_touch(gathered[0]);
        products_begin();
        multiply_weights<E, DIM, KEYS>(gathered[0], weights, shared_address(shared.values + turn.slot() * TILE));
        products_commit();
        products_wait<0>();
        products_touch(gathered[0]);
        release(shared.values_empty + turn.slot());
        turn.count++;

        float factors[1][2];
        softmax.end(call, work.sample, work.head, own, 1.0f, lse, factors);
        unsigned char *const rows = shared.out + (half * OWN + warp * 16) * SWIZZLED_ROW;
        uint16_t *const to = out + out_at(call, work.sample, work.head) + own * out_stride(call);
        store_warp<E, QUERIES, DIM>(to, out_stride(call), own < call.s ? call.s - own : 0, rows, gathered[0], factors[0]);
    }
}

template <class E, int DIM>
DEVICE void forward(const Attention &call, const TensorMap *map, uint16_t *out, float *lse, uint32_t *next, uint32_t section) {
    DYNAMIC_SHARED(memory);
    const Shared<DIM> shared(memory);
    const uint32_t tiles = (call.s + QUERIES - 1) / QUERIES, all = tiles * call.groups * call.heads_per_group * call.b;
    if (threadIdx.x == 0) {
        fetch_map(map);
        barrier_make(shared.queries_full, 1);
        barrier_make(shared.queries_empty, CONSUMER_WARPS);
        for (uint32_t slot = 0; slot < STAGES; slot++) {
            barrier_make(shared.keys_full + slot, 1);
            barrier_make(shared.keys_empty + slot, CONSUMER_WARPS);
            barrier_make(shared.values_full + slot, 1);
            barrier_make(shared.values_empty + slot, CONSUMER_WARPS);
        }
        barriers_made();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_give<24>();
        if (threadIdx.x < 32) produce<DIM>(call, map, shared, next, tiles, all, section);
    } else {
        registers_take<240>();
        consume<E, DIM>(call, shared, out, lse, tiles, all, section);
    }
}

} // namespace

#define FORWARD(NAME, E, DIM)                                                                                                          \
    KERNEL_BOUNDS(THREADS, 1, attention_forward_sm90a_##NAME##_##DIM, const __grid_constant__ TensorMap map, const Attention call,     \
                  uint16_t *out, float *lse, uint32_t *next, uint32_t section) {                                                       \
        forward<E, DIM>(call, &map, out, lse, next, section);                                                                          \
    }

FORWARD(bf16, Bf16, 64)
FORWARD(bf16, Bf16, 128)
FORWARD(f16, F16, 64)
FORWARD(f16, F16, 128)
