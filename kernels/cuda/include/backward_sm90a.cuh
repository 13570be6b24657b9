// Shared by both Hopper kernels of attention's backward (attention_dkdv_sm90a.cu,
// attention_dq_sm90a.cu), for bf16 and f16, heads of 64 or 128 columns, without dropout. These are
// the two passes of attention_backward.cu with asynchronous warpgroup products and tensor copies
// (Shah et al. 2024, FlashAttention-3).
//
// A producer warp in the block's first warpgroup copies tiles. The other warpgroups, two or three,
// keep 64 resident rows each: of keys and values, or of queries and gradients of outputs. They go
// over streamed tiles of 64 rows of the other operands. Weights stay in registers as left operands.
// The products for a tile's scores and gradients of weights come before the previous tile's
// contribution to the results, which then overlaps with computing the weights. Blocks are
// persistent and take one piece of work after another, longest first. If shared memory has room,
// the resident rows of the next piece are copied meanwhile.
#pragma once

#include "attention.cuh"
#include "warpgroups.cuh"

/// Rows of every tile, streamed or resident.
constexpr uint32_t ROWS = OWN;
constexpr uint32_t STAGES = 4;
/// Fragments of a tile of scores.
constexpr uint32_t N = ROWS / 8;

/// For each query of a tile: its log-sum-exp in base 2, Σ dout·out, and the first key it sees.
/// Beyond the sequence's end queries and gradients of outputs are zeros, and so is their
/// contribution.
struct Statistics {
    float lse_log2[ROWS], delta[ROWS];
    uint32_t from[ROWS];

    /// One warp: statistics of a head's queries from `query` on.
    __device__ __forceinline__ void fill(const Attention &call, const float *lses,
        const float *deltas, uint32_t sample, uint32_t head, uint32_t query) {
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

/// A block's shared memory, at multiples of 1024 bytes: resident tiles of each warpgroup, and
/// streamed tiles. Both are of two kinds (queries or keys; gradients of outputs or values).
template <int DIM, uint32_t CONSUMERS_>
struct Shared {
    /// Number of warpgroups that compute, and their rows together.
    static constexpr uint32_t CONSUMERS = CONSUMERS_, ALL = CONSUMERS * OWN;
    static constexpr uint32_t TILE = Tile<ROWS, DIM>::BYTES;
    /// Sets of resident tiles: the current one, and, for narrow heads, the next.
    static constexpr uint32_t STAYS = DIM == 64 ? 2 : 1;
    /// Sets of statistics, for the streamed or for the resident tiles.
    static constexpr uint32_t STATISTICS = STAYS * CONSUMERS > STAGES ? STAYS * CONSUMERS : STAGES;
    unsigned char *stay, *first, *second;
    /// Statistics of query tiles, whether these are streamed or resident.
    Statistics *statistics;
    uint64_t *stay_full, *stay_empty, *full, *empty;
    /// For each set of resident tiles, the index of its piece of work.
    uint32_t *numbers;

    __device__ __forceinline__ explicit Shared(unsigned char *memory) {
        stay = memory;
        first = stay + STAYS * 2 * CONSUMERS * TILE;
        second = first + STAGES * TILE;
        statistics = reinterpret_cast<Statistics *>(second + STAGES * TILE);
        stay_full = reinterpret_cast<uint64_t *>(statistics + STATISTICS);
        stay_empty = stay_full + STAYS;
        full = stay_empty + STAYS;
        empty = full + STAGES;
        numbers = reinterpret_cast<uint32_t *>(empty + STAGES);
    }

    /// Resident tiles of a warpgroup: of the first kind, and of the second.
    __device__ __forceinline__ unsigned char *first_stay(uint32_t slot, uint32_t which) const {
        return stay + (slot * 2 * CONSUMERS + which) * TILE;
    }
    __device__ __forceinline__ unsigned char *second_stay(uint32_t slot, uint32_t which) const {
        return first_stay(slot, CONSUMERS + which);
    }

    /// Besides their bytes, resident tiles need `stay_arrivals` arrivals and a stage `arrivals`.
    /// `readers` warps release resident tiles.
    __device__ __forceinline__ void make_barriers(
        uint32_t stay_arrivals, uint32_t arrivals, uint32_t readers = 4 * CONSUMERS) const {
        if (threadIdx.x == 0) {
            for (uint32_t slot = 0; slot < STAYS; slot++) {
                barrier_make(stay_full + slot, stay_arrivals);
                barrier_make(stay_empty + slot, readers);
            }
            for (uint32_t slot = 0; slot < STAGES; slot++) {
                barrier_make(full + slot, arrivals);
                barrier_make(empty + slot, 4 * CONSUMERS);
            }
            barriers_made();
        }
        __syncthreads();
    }
};

/// One warp: takes the next piece of work once there is room for its resident tiles, and announces
/// it. False if there is none.
template <class Shared>
DEVICE bool take(const Shared &shared, const Turn<Shared::STAYS> &stay, uint32_t *next,
    uint32_t all, uint32_t &number) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t taken = 0;
    if (lane == 0) taken = atomicAdd(next, 1u);
    number = __shfl_sync(~0u, taken, 0);
    barrier_wait(shared.stay_empty + stay.slot(), stay.parity() ^ 1);
    if (lane == 0) shared.numbers[stay.slot()] = number;
    return number < all;
}

/// Copies the resident rows for a tile: two kinds, for every warpgroup, from position `first` on.
template <int DIM, uint32_t CONSUMERS>
DEVICE void fetch_stay(const Shared<DIM, CONSUMERS> &shared, uint32_t slot,
    const TensorMap *of_first, uint32_t first_part, const TensorMap *of_second,
    uint32_t second_part, uint32_t first, uint32_t sample) {
    uint64_t *const full = shared.stay_full + slot;
    barrier_expect(full, 2 * CONSUMERS * Tile<ROWS, DIM>::BYTES);
    for (uint32_t which = 0; which < CONSUMERS; which++) {
        copy_tile<ROWS, DIM>(shared.first_stay(slot, which), of_first, first + which * ROWS,
            first_part, sample, full);
        copy_tile<ROWS, DIM>(shared.second_stay(slot, which), of_second, first + which * ROWS,
            second_part, sample, full);
    }
}

/// Releases a tile that this warpgroup's rows see nothing of, once it has arrived. Released
/// earlier, the slot's next tile could be mistaken for it.
template <class Shared>
DEVICE void pass(const Shared &shared, Turn<STAGES> &turn) {
    barrier_wait(shared.full + turn.slot(), turn.parity());
    release(shared.empty + turn.slot());
    turn.count++;
}

/// Starts a tile's scores once it has arrived: the 64 resident rows `stay` times the streamed rows.
/// Resident rows are multiplied from shared memory. In registers they would be read half as often,
/// for 3% of the time. But ptxas 13.0 assigned such operands, which only products in a loop read,
/// to registers of other operands in the same loop.
template <class E, int DIM, uint32_t CONSUMERS>
DEVICE void begin_scores(const Shared<DIM, CONSUMERS> &shared, const Turn<STAGES> &turn,
    const unsigned char *stay, float (&scores)[N][4]) {
    barrier_wait(shared.full + turn.slot(), turn.parity());
    products_touch(scores);
    products_begin();
    multiply_rows<E, DIM, ROWS, ROWS>(scores, shared_address(stay),
        shared_address(shared.first + turn.slot() * Tile<ROWS, DIM>::BYTES));
    products_commit();
}

/// Starts the gradients of the same tile's weights.
template <class E, int DIM, uint32_t CONSUMERS>
DEVICE void begin_gradients(const Shared<DIM, CONSUMERS> &shared, const Turn<STAGES> &turn,
    const unsigned char *stay, float (&gradients)[N][4]) {
    products_touch(gradients);
    products_begin();
    multiply_rows<E, DIM, ROWS, ROWS>(gradients, shared_address(stay),
        shared_address(shared.second + turn.slot() * Tile<ROWS, DIM>::BYTES));
    products_commit();
}

/// Rotates gradients of rotated queries and keys back (rope.cu). Has tables of [positions, DIM /
/// 2], and the position of every row [s, b], or nullptr if row s has position s. Without tables
/// nothing is rotated.
struct Rotation {
    const float *cosines, *sines;
    const uint32_t *positions;
    /// The tables' last position; positions beyond it count as this one.
    uint32_t last, unused;

    /// Rotates a warp's 16 rows from `row` on.
    template <int DIM>
    __device__ __forceinline__ void turn_back(
        const Attention &call, uint32_t sample, uint32_t row, float (&c)[DIM / 8][4]) const {
        if (!cosines) return;
        const uint32_t lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t own = row + lane / 4 + 8 * half;
            if (own >= call.s) continue;
            const size_t at =
                (size_t)min(positions ? positions[(size_t)own * call.b + sample] : own, last) *
                    (DIM / 2) +
                2 * t;
#pragma unroll
            for (uint32_t n = 0; n < DIM / 16; n++) {
                const float2 cosine = *reinterpret_cast<const float2 *>(cosines + at + n * 8),
                             sine = *reinterpret_cast<const float2 *>(sines + at + n * 8);
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) {
                    float &first = c[n][2 * half + i], &second = c[n + DIM / 16][2 * half + i];
                    const float a = first, b = second, turn_cos = i ? cosine.y : cosine.x,
                                turn_sin = i ? sine.y : sine.x;
                    first = a * turn_cos + b * turn_sin;
                    second = b * turn_cos - a * turn_sin;
                }
            }
        }
    }
};

/// A kernel. PASS gives the number of pieces of work, lets one warp copy their data, and lets the
/// other warpgroups compute them.
template <class PASS, class E, int DIM>
DEVICE void run(const Attention &call, const TensorMap *qkv, const TensorMap *dout,
    const float *lse, const float *delta, uint16_t *dqkv, uint32_t *next, uint32_t section,
    const Rotation &rotation) {
    DYNAMIC_SHARED(memory);
    using Block = Shared<DIM, PASS::template CONSUMERS<DIM>>;
    const Block shared(memory);
    const uint32_t tiles = (call.s + Block::ALL - 1) / Block::ALL,
                   all = tiles * PASS::heads(call) * call.b;
    shared.make_barriers(PASS::STAY_ARRIVALS, PASS::ARRIVALS);
    if (threadIdx.x < 128) {
        registers_give<24>();
        if (threadIdx.x < 32)
            PASS::produce(
                call, shared, qkv, dout, lse, delta, next + PASS::NUMBER, tiles, all, section);
    } else {
        registers_take<REGISTERS<Block::CONSUMERS>>();
        PASS::template consume<E>(call, shared, dqkv, tiles, all, section, rotation);
    }
}

/// Defines attention_NAME_sm90a_… for a pass, for every dtype and width.
#define BACKWARD_OF(NAME, PASS, DTYPE, E, DIM)                                                     \
    KERNEL_BOUNDS(128 * (1 + PASS::CONSUMERS<DIM>), 1, attention_##NAME##_sm90a_##DTYPE##_##DIM,   \
        const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap dout,             \
        const Attention call, const float *lse, const float *delta, uint16_t *dqkv,                \
        uint32_t *next, uint32_t section, const Rotation rotation) {                               \
        run<PASS, E, DIM>(call, &qkv, &dout, lse, delta, dqkv, next, section, rotation);           \
    }
#define BACKWARD(NAME, PASS)                                                                       \
    BACKWARD_OF(NAME, PASS, bf16, Bf16, 64)                                                        \
    BACKWARD_OF(NAME, PASS, bf16, Bf16, 128)                                                       \
    BACKWARD_OF(NAME, PASS, f16, F16, 64)                                                          \
    BACKWARD_OF(NAME, PASS, f16, F16, 128)
