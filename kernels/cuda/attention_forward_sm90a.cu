// Attention forward for Hopper, bf16 and f16, heads of 64 or 128 columns, without dropout (Shah et
// al. 2024, FlashAttention-3).
//
// A producer warp in the block's first warpgroup copies boxes of queries, keys and values, some
// tiles ahead. The other warpgroups, three for heads of 64 columns and two for heads of 128, take
// 64 queries each and multiply asynchronously from shared memory. They take turns: while one's
// products run, the others compute weights, which for narrow heads takes longer than the products.
// Within a warpgroup, the product with a tile's values also overlaps with the product with the next
// tile's keys and its softmax. Blocks are persistent and take one tile of queries after another,
// longest first. Copies of the next tile begin while the current tile's result is still being
// written.
#include "softmax.cuh"
#include "warpgroups.cuh"

namespace {

constexpr uint32_t KEYS = 128;

/// Parameters of a block, by the columns of its heads; kernels/src/cuda/attention/hopper.rs has the
/// same numbers.
template <int DIM>
struct Block {
    /// Warpgroups that compute.
    static constexpr uint32_t CONSUMERS = DIM == 64 ? 3 : 2;
    static constexpr uint32_t THREADS = 128 * (1 + CONSUMERS);
    static constexpr uint32_t QUERIES = CONSUMERS * OWN, STAGES = DIM == 64 ? 4 : 2;
    /// Rows of the boxes that tensor copies fetch.
    static constexpr uint32_t BOX = DIM == 64 ? 64 : 128;
};

/// A block's shared memory, at multiples of 1024 bytes.
template <int DIM>
struct Shared {
    static constexpr uint32_t STAGES = Block<DIM>::STAGES, TILE = Tile<KEYS, DIM>::BYTES,
                              OF_QUERIES = Tile<Block<DIM>::QUERIES, DIM>::BYTES;
    unsigned char *queries, *out, *keys, *values;
    uint64_t *queries_full, *queries_empty, *keys_full, *keys_empty, *values_full, *values_empty;
    /// Index of the piece of work that the queries belong to.
    uint32_t *number;

    __device__ __forceinline__ explicit Shared(unsigned char *memory) {
        queries = memory;
        out = queries + OF_QUERIES;
        keys = out + OF_QUERIES;
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

template <int DIM>
using Work = QueryWork<Block<DIM>::QUERIES, KEYS>;

/// Copies a tile of ROWS of a part of a group: queries, keys or values from position `first` on.
template <int DIM, int ROWS>
DEVICE void fetch(unsigned char *to, const TensorMap *map, uint32_t first, uint32_t part,
    uint32_t sample, uint64_t *full) {
    barrier_expect(full, Tile<ROWS, DIM>::BYTES);
    copy_tile<ROWS, DIM, Block<DIM>::BOX>(to, map, first, part, sample, full);
}

/// The producer warp, which takes pieces of work and copies their tiles. The whole warp runs this,
/// although one thread copies: values common to a warp then lie in uniform registers. Without them,
/// the 24 registers per thread would not suffice.
template <int DIM>
DEVICE void produce(const Attention &call, const TensorMap *map, const Shared<DIM> &shared,
    uint32_t *next, uint32_t tiles, uint32_t all, uint32_t section) {
    const bool first = threadIdx.x == 0;
    Turn<Block<DIM>::STAGES> turn;
    for (uint32_t parity = 1;; parity ^= 1) {
        uint32_t number = 0;
        if (first) number = atomicAdd(next, 1u);
        number = __shfl_sync(~0u, number, 0);
        barrier_wait(shared.queries_empty, parity);
        if (first) *shared.number = number;
        if (number >= all) break;
        const Work<DIM> work(call, number, tiles, section);
        const uint32_t of_group = call.heads_per_group, group = work.head / of_group,
                       parts = group * (of_group + 2);
        if (first)
            fetch<DIM, Block<DIM>::QUERIES>(shared.queries, map, work.first,
                parts + work.head % of_group, work.sample, shared.queries_full);
        const uint32_t end = work.end();
#pragma unroll 1
        for (uint32_t tile = work.begin(call); tile < end; tile++, turn.count++) {
            const uint32_t slot = turn.slot(), empty = turn.parity() ^ 1;
            barrier_wait(shared.keys_empty + slot, empty);
            if (first)
                fetch<DIM, KEYS>(shared.keys + slot * Shared<DIM>::TILE, map, tile * KEYS,
                    parts + of_group, work.sample, shared.keys_full + slot);
            barrier_wait(shared.values_empty + slot, empty);
            if (first)
                fetch<DIM, KEYS>(shared.values + slot * Shared<DIM>::TILE, map, tile * KEYS,
                    parts + of_group + 1, work.sample, shared.values_full + slot);
            __syncwarp(); // no thread waits for a phase that the first thread has left
        }
    }
    if (first) barrier_arrive(shared.queries_full);
}

/// One of the consumer warpgroups, which compute.
template <class E, int DIM>
struct Consumer {
    static constexpr uint32_t TILE = Shared<DIM>::TILE, QUERIES = Block<DIM>::QUERIES;
    // With narrow heads, a tile's values are accumulated by the time the next tile's maxima are
    // known. Correcting and rounding are then interleaved with exponentials.
    static constexpr bool GATHERED_SOON = DIM == 64;
    const Attention &call;
    const Shared<DIM> &shared;
    /// Index of the warpgroup, and of the warp within it.
    uint32_t which, warp;
    Turn<Block<DIM>::STAGES> turn;
    float gathered[1][DIM / 8][4], scores[1][KEYS / 8][4];
    uint32_t weights[KEYS / 16][4];

    __device__ __forceinline__ Consumer(const Attention &call, const Shared<DIM> &shared)
        : call(call), shared(shared), which(uniform(threadIdx.x / 128) - 1),
          warp(uniform(threadIdx.x / 32 % 4)) {
        if (which == Block<DIM>::CONSUMERS - 1) some_come(1, 256); // the first one begins
    }

    /// Every warpgroup has one turn per tile, one after the other.
    __device__ __forceinline__ void await_turn() { some_wait(1 + which, 256); }
    __device__ __forceinline__ void end_turn() {
        some_come(which == Block<DIM>::CONSUMERS - 1 ? 1 : 2 + which, 256);
    }

    /// Starts the scores of the current tile.
    __device__ __forceinline__ void begin_scores() {
        barrier_wait(shared.keys_full + turn.slot(), turn.parity());
        await_turn();
        products_begin();
        multiply_rows<E, DIM, QUERIES, KEYS>(scores[0],
            shared_address(shared.queries) + which * OWN * SWIZZLED_ROW,
            shared_address(shared.keys + turn.slot() * TILE));
        products_commit();
    }

    /// Starts to accumulate the values of a tile.
    __device__ __forceinline__ void begin_gathering(uint32_t slot, uint32_t parity) {
        barrier_wait(shared.values_full + slot, parity);
        products_touch(weights);
        products_touch(gathered[0]);
        products_begin();
        multiply_weights<E, DIM, KEYS>(
            gathered[0], weights, shared_address(shared.values + slot * TILE));
        products_commit();
    }

    __device__ __forceinline__ void end_gathering(uint32_t slot) {
        products_wait<0>();
        products_touch(gathered[0]);
        release(shared.values_empty + slot);
    }

    /// Releases tiles that none of these queries sees, once they have arrived. Released earlier,
    /// the slots' next tiles could be mistaken for them.
    __device__ __forceinline__ void pass(uint32_t tiles) {
#pragma unroll 1
        for (; tiles > 0; tiles--, turn.count++) {
            barrier_wait(shared.keys_full + turn.slot(), turn.parity());
            await_turn();
            end_turn();
            release(shared.keys_empty + turn.slot());
            barrier_wait(shared.values_full + turn.slot(), turn.parity());
            release(shared.values_empty + turn.slot());
        }
    }

    /// Computes this warpgroup's part of a piece of work: the queries from `own` on, at least one.
    __device__ __forceinline__ void compute(
        const Work<DIM> &work, uint32_t own, uint16_t *out, float *lse) {
        const uint32_t end_query = min(own + OWN, work.end_query),
                       seen_by_all = uniform(first_key(call, work.sample, end_query - 1));
        const uint32_t begin = uniform(work.begin(call)), end = (end_query - 1) / KEYS + 1;
        // No tile before the copied ones, even if the table of first keys decreases.
        const uint32_t first = max(begin, uniform(first_key(call, work.sample, own) / KEYS));
        const float slope = call.slopes ? call.slopes[work.head] : 0.0f;
        Softmax<1> softmax;
        float corrections[1][2];
        softmax.clear();
        clear(gathered[0]);
        const auto raise = [&](uint32_t tile) {
            products_touch(scores[0]);
            release(shared.keys_empty + turn.slot());
            // Whether any query of this warpgroup does not see all keys of the tile.
            const bool edge = (tile + 1) * KEYS > own + 1 || seen_by_all > tile * KEYS;
            return softmax.raise(
                call, slope, work.sample, own + warp * 16, tile * KEYS, edge, scores, corrections);
        };

        pass(first - begin);
        begin_scores();
        end_turn();
        products_wait<0>();
        softmax.weigh(raise(first), scores, corrections);
        round_weights<E>(weights, scores[0]);
        for (uint32_t tile = first + 1; tile < end; tile++) {
            const uint32_t slot = turn.slot(), parity = turn.parity();
            turn.count++;
            begin_scores();
            begin_gathering(slot, parity);
            end_turn();
            products_wait<1>();
            const float scale = raise(tile);
            if constexpr (GATHERED_SOON) {
                computed_before_wait(
                    softmax.maxima[0][0] + softmax.maxima[0][1], shared_address(shared.queries));
                end_gathering(slot);
                softmax.weigh(scale, scores, corrections);
            } else {
                softmax.weigh(scale, scores, corrections);
                computed_before_wait(
                    softmax.sums[0][0] + softmax.sums[0][1], shared_address(shared.queries));
                end_gathering(slot);
            }
            correct(gathered, corrections);
            round_weights<E>(weights, scores[0]);
        }
        release(shared.queries_empty);
        const uint32_t slot = turn.slot();
        begin_gathering(slot, turn.parity());
        turn.count++;
        // Few enough that the last one does not wait for the slot of the values being accumulated.
        static_assert(QUERIES - OWN <= KEYS * (Block<DIM>::STAGES - 1),
            "tiles to pass while values are gathered");
        pass(work.end() - end);
        end_gathering(slot);

        float factors[1][2];
        const uint32_t rows = own + warp * 16;
        softmax.end(call, work.sample, work.head, rows, 1.0f, lse, factors);
        uint16_t *const to = out + out_at(call, work.sample, work.head) + rows * out_stride(call);
        store_warp<E, QUERIES, DIM>(to, out_stride(call), rows < call.s ? call.s - rows : 0,
            shared.out + (which * OWN + warp * 16) * SWIZZLED_ROW, gathered[0], factors[0]);
    }

    __device__ __forceinline__ void consume(
        uint16_t *out, float *lse, uint32_t tiles, uint32_t all, uint32_t section) {
        for (uint32_t taken = 0;; taken++) {
            barrier_wait(shared.queries_full, taken % 2);
            const uint32_t number = uniform(*shared.number);
            if (number >= all) return;
            const Work<DIM> work(call, number, tiles, section);
            const uint32_t own = work.first + which * OWN;
            if (own < work.end_query) {
                compute(work, own, out, lse);
            } else {
                release(shared.queries_empty);
                pass(work.end() - work.begin(call));
            }
        }
    }
};

template <class E, int DIM>
DEVICE void forward(const Attention &call, const TensorMap *map, uint16_t *out, float *lse,
    uint32_t *next, uint32_t section) {
    DYNAMIC_SHARED(memory);
    const Shared<DIM> shared(memory);
    const uint32_t tiles = (call.s + Block<DIM>::QUERIES - 1) / Block<DIM>::QUERIES,
                   all = tiles * call.groups * call.heads_per_group * call.b;
    if (threadIdx.x == 0) {
        constexpr uint32_t WARPS = 4 * Block<DIM>::CONSUMERS;
        fetch_map(map);
        barrier_make(shared.queries_full, 1);
        barrier_make(shared.queries_empty, WARPS);
        for (uint32_t slot = 0; slot < Block<DIM>::STAGES; slot++) {
            barrier_make(shared.keys_full + slot, 1);
            barrier_make(shared.keys_empty + slot, WARPS);
            barrier_make(shared.values_full + slot, 1);
            barrier_make(shared.values_empty + slot, WARPS);
        }
        barriers_made();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_give<24>();
        if (threadIdx.x < 32) produce<DIM>(call, map, shared, next, tiles, all, section);
    } else {
        registers_take<REGISTERS<Block<DIM>::CONSUMERS>>();
        Consumer<E, DIM>(call, shared).consume(out, lse, tiles, all, section);
    }
}

} // namespace

#define FORWARD(NAME, E, DIM)                                                                      \
    KERNEL_BOUNDS(Block<DIM>::THREADS, 1, attention_forward_sm90a_##NAME##_##DIM,                  \
        const __grid_constant__ TensorMap map, const Attention call, uint16_t *out, float *lse,    \
        uint32_t *next, uint32_t section) {                                                        \
        forward<E, DIM>(call, &map, out, lse, next, section);                                      \
    }

FORWARD(bf16, Bf16, 64)
FORWARD(bf16, Bf16, 128)
FORWARD(f16, F16, 64)
FORWARD(f16, F16, 128)
