// Tiles of rows in shared memory, in the layout of tensor copies, and their products by warpgroups
// (Hopper).
//
// A tile's columns are split into groups of 64: a box of rows of 128 bytes, with swizzled 16-byte
// pieces, then the next box.
#pragma once

#include "attention.cuh"
#include "hopper.cuh"

/// Rows per warpgroup.
constexpr uint32_t OWN = 64;

/// Registers per thread of CONSUMERS warpgroups that compute. The producer warpgroup has 24 per
/// thread; a multiprocessor has 65536.
template <uint32_t CONSUMERS>
constexpr int REGISTERS = CONSUMERS == 3 ? 160 : 240;

template <int ROWS, int DIM>
struct Tile {
    static constexpr uint32_t BOX = ROWS * SWIZZLED_ROW, BYTES = DIM / 64 * BOX;
};

/// Starts to copy a tile of a tensor's columns, rows (from `first` on), parts and samples, in boxes
/// of BOX rows.
template <int ROWS, int DIM, int BOX = ROWS>
DEVICE void copy_tile(unsigned char *to, const TensorMap *map, uint32_t first, uint32_t part,
    uint32_t sample, uint64_t *full) {
    static_assert(ROWS % BOX == 0 && BOX % 8 == 0, "boxes one after the other are as a single one");
#pragma unroll
    for (uint32_t box = 0; box < DIM / 64; box++)
#pragma unroll
        for (uint32_t row = 0; row < ROWS; row += BOX)
            copy_box(to + box * Tile<ROWS, DIM>::BOX + row * SWIZZLED_ROW, map, box * 64, part,
                sample, first + row, full);
}

/// A value that is equal in all threads of a warp. Declaring this keeps it, and values computed
/// from it, out of the threads' registers.
DEVICE uint32_t uniform(uint32_t value) { return __shfl_sync(~0u, value, 0); }

/// The descriptor of a tile's operand. For an operand some bytes later, add a 16th of the bytes to
/// the descriptor. This is one addition between products; computing the address would take ten
/// instructions.
DEVICE uint64_t operand(uint32_t address, uint32_t next) {
    return descriptor(uniform(address), next);
}

/// Bytes from a tile's beginning to its columns from 16 · k on.
template <int ROWS, int DIM>
DEVICE constexpr uint32_t columns_at(uint32_t k) {
    return k / 4 * Tile<ROWS, DIM>::BOX + k % 4 * 32;
}

/// Starts C [64, N] = A · Bᵀ (the old C is not read) over DIM columns: 64 rows of a tile of A_ROWS
/// and a tile of N rows.
template <class E, int DIM, int A_ROWS, int N>
DEVICE void multiply_rows(float (&c)[N / 8][4], uint32_t a, uint32_t b) {
    const uint64_t left = operand(a, 16), right = operand(b, 16);
    Wgmma<E, N>::assign(c, left, right);
#pragma unroll
    for (uint32_t k = 1; k < DIM / 16; k++)
        Wgmma<E, N>::add(
            c, left + columns_at<A_ROWS, DIM>(k) / 16, right + columns_at<N, DIM>(k) / 16);
}

/// Starts C [64, DIM] += weights · B over K rows of a tile.
template <class E, int DIM, int K>
DEVICE void multiply_weights(
    float (&c)[DIM / 8][4], const uint32_t (&weights)[K / 16][4], uint32_t b) {
    const uint64_t right = operand(b, Tile<K, DIM>::BOX);
#pragma unroll
    for (uint32_t k = 0; k < K / 16; k++)
        Wgmma<E, DIM>::add_weighed(c, weights[k], right + k * 16 * SWIZZLED_ROW / 16);
}

/// Starts two such products, interleaved, so that none waits for the sums of the one before.
template <class E, int DIM, int K>
DEVICE void multiply_weights(float (&c)[DIM / 8][4], const uint32_t (&weights)[K / 16][4],
    uint32_t b, float (&other_c)[DIM / 8][4], const uint32_t (&other_weights)[K / 16][4],
    uint32_t other_b) {
    const uint64_t right = operand(b, Tile<K, DIM>::BOX),
                   other_right = operand(other_b, Tile<K, DIM>::BOX);
#pragma unroll
    for (uint32_t k = 0; k < K / 16; k++) {
        Wgmma<E, DIM>::add_weighed(c, weights[k], right + k * 16 * SWIZZLED_ROW / 16);
        Wgmma<E, DIM>::add_weighed(
            other_c, other_weights[k], other_right + k * 16 * SWIZZLED_ROW / 16);
    }
}

/// Rounds the result of a product to left operands of the next.
template <class E, int N>
DEVICE void round_weights(uint32_t (&weights)[N / 2][4], const float (&c)[N][4]) {
#pragma unroll
    for (uint32_t k = 0; k < N / 2; k++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            weights[k][i] = E::pack(c[2 * k + i / 2][i % 2 * 2], c[2 * k + i / 2][i % 2 * 2 + 1]);
}

/// Arrives for the warp, after all of its threads have read the released data: an arrival only
/// covers its own thread's accesses.
DEVICE void release(uint64_t *barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

/// Writes a warp's 16 rows, times a factor each and rounded, to `to`, except rows from `count` on.
/// Goes through rows of a tile that only this warp uses, so that 16 bytes are written at a time.
/// These rows begin at a multiple of 1024 bytes.
template <class E, int ROWS, int DIM>
DEVICE void store_warp(uint16_t *to, size_t stride, uint32_t count, unsigned char *rows,
    const float (&c)[DIM / 8][4], const float (&factors)[2]) {
    uint32_t lane = threadIdx.x % 32;
    made_here(lane);
    __syncwarp();
#pragma unroll
    for (uint32_t n = 0; n < DIM / 8; n++)
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t pair = E::pack(c[n][2 * i] * factors[i], c[n][2 * i + 1] * factors[i]);
            *reinterpret_cast<uint32_t *>(rows + n / 8 * Tile<ROWS, DIM>::BOX +
                                          swizzled(lane / 4 + 8 * i, n % 8) + lane % 4 * 4) = pair;
        }
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 16 * DIM / 8 / 32; i++) {
        const uint32_t piece = lane + 32 * i, row = piece / (DIM / 8), column = piece % (DIM / 8);
        if (row < count)
            *reinterpret_cast<uint4 *>(to + row * stride + column * 8) =
                *reinterpret_cast<const uint4 *>(
                    rows + column / 8 * Tile<ROWS, DIM>::BOX + swizzled(row, column % 8));
    }
}

/// Counts the tiles that went through a ring of STAGES; gives slot and parity.
template <int STAGES>
struct Turn {
    uint32_t count = 0;
    __device__ __forceinline__ uint32_t slot() const { return count % STAGES; }
    __device__ __forceinline__ uint32_t parity() const { return count / STAGES % 2; }
    /// The slot of the previous tile.
    __device__ __forceinline__ uint32_t before() const { return (count - 1) % STAGES; }
};

/// The place of piece of work `number`, with `tiles` pieces for each of `all` heads (or groups), in
/// the order in which blocks take them. Heads come in sections; data that a section's tiles share
/// stays in L2. Within a section, the first tiles of all its heads come first.
struct Place {
    uint32_t tile, which;

    __device__ __forceinline__ Place(
        uint32_t number, uint32_t tiles, uint32_t all, uint32_t section) {
        const uint32_t begin = number / (section * tiles) * section,
                       in_section = number - begin * tiles, size = min(section, all - begin);
        tile = in_section / size;
        which = begin + in_section % size;
    }
};

/// A tile of QUERIES of a head, OWN of them per warpgroup, and the tiles of KEYS that they see, up
/// to the one before `end`. The last tiles come first, because they take longest. If queries do not
/// fill whole tiles, the first tile is the partial one: it has the fewest keys, and its last
/// warpgroups are idle.
template <uint32_t QUERIES, uint32_t KEYS>
struct QueryWork {
    uint32_t first, end_query, head, sample;

    __device__ __forceinline__ QueryWork(
        const Attention &call, uint32_t number, uint32_t tiles, uint32_t section) {
        const uint32_t heads = call.groups * call.heads_per_group,
                       missing = tiles * QUERIES - (call.s + OWN - 1) / OWN * OWN;
        const Place place(number, tiles, heads * call.b, section);
        first = (tiles - 1 - place.tile) * QUERIES;
        end_query = min(first + QUERIES - missing, call.s);
        first -= min(first, missing);
        head = place.which % heads;
        sample = place.which / heads;
    }

    __device__ __forceinline__ uint32_t begin(const Attention &call) const {
        return first_key(call, sample, first) / KEYS;
    }
    __device__ __forceinline__ uint32_t end() const { return (end_query - 1) / KEYS + 1; }
};
