// Tiles of rows in shared memory, and their products on tensor cores.
//
// Rows are padded by 16 bytes. Eight rows then begin in eight different 16-byte groups of
// shared-memory banks, so ldmatrix has no bank conflicts.
#pragma once

#include "mma.cuh"

/// Row stride of a tile of DIM columns, in elements.
template <int DIM>
constexpr int ROW = DIM + 8;

/// Rows of a head in global memory.
struct Rows {
    const uint16_t *at;
    size_t stride;
    /// Number of rows, and columns of each.
    uint32_t count, width;
    /// Whether rows begin at multiples of 16 bytes.
    bool aligned;

    /// The rows `offset` elements later.
    __device__ __forceinline__ Rows from(size_t offset) const {
        return {at + offset, stride, count, width, aligned};
    }
};

/// Starts to copy COUNT rows from `first` on into a tile, by all THREADS of the block, with zeros
/// beyond the last row and column. Rows that are not aligned are copied at once.
template <int COUNT, int DIM, int THREADS>
DEVICE void copy_rows(uint16_t *tile, const Rows &rows, uint32_t first) {
    constexpr int PIECES = DIM / 8;
    static_assert(COUNT * PIECES % THREADS == 0, "every thread copies as many pieces");
    if (rows.aligned) {
#pragma unroll
        for (int i = 0; i < COUNT * PIECES / THREADS; i++) {
            uint32_t piece = threadIdx.x + i * THREADS, row = piece / PIECES,
                     column = piece % PIECES * 8;
            bool valid = first + row < rows.count && column < rows.width;
            const uint16_t *from =
                rows.at + (valid ? (size_t)(first + row) * rows.stride + column : 0);
            copy_16(tile + row * ROW<DIM> + column, from, valid);
        }
    } else {
        for (uint32_t element = threadIdx.x; element < COUNT * DIM; element += THREADS) {
            uint32_t row = element / DIM, column = element % DIM;
            bool valid = first + row < rows.count && column < rows.width;
            tile[row * ROW<DIM> + column] =
                valid ? rows.at[(size_t)(first + row) * rows.stride + column] : 0;
        }
    }
}

/// Writes COUNT rows of a tile that one warp has made to global memory, except beyond the last row
/// and column.
template <int COUNT, int DIM>
DEVICE void store_rows(uint16_t *to, const Rows &rows, uint32_t first, const uint16_t *tile) {
    constexpr int PIECES = DIM / 8;
    uint32_t lane = threadIdx.x % 32;
    if (rows.aligned) {
        for (uint32_t piece = lane; piece < COUNT * PIECES; piece += 32) {
            uint32_t row = piece / PIECES, column = piece % PIECES * 8;
            if (first + row < rows.count && column < rows.width)
                *(uint4 *)(to + (size_t)(first + row) * rows.stride + column) =
                    *(const uint4 *)(tile + row * ROW<DIM> + column);
        }
    } else {
        for (uint32_t element = lane; element < COUNT * DIM; element += 32) {
            uint32_t row = element / DIM, column = element % DIM;
            if (first + row < rows.count && column < rows.width)
                to[(size_t)(first + row) * rows.stride + column] = tile[row * ROW<DIM> + column];
        }
    }
}

/// Loads a fragment A of 16 rows × 16 columns.
template <int DIM>
DEVICE void left_fragment(uint32_t (&a)[4], const uint16_t *tile, int row, int column) {
    uint32_t lane = threadIdx.x % 32;
    ldmatrix(a, tile + (row + lane % 16) * ROW<DIM> + column + lane / 16 * 8);
}

/// C [M · 16, N · 8] += A · Bᵀ over DIM columns; rows of A and B are in tiles.
template <class E, int DIM, int M, int N>
DEVICE void product_of_rows(
    float (&c)[M][N][4], const uint16_t *a_tile, int a_row, const uint16_t *b_tile) {
    static_assert(N % 2 == 0, "fragments of B are read in pairs");
    uint32_t lane = threadIdx.x % 32;
    const uint16_t *b_at = b_tile + (lane % 8 + lane / 16 * 8) * ROW<DIM> + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) left_fragment<DIM>(a[m], a_tile, a_row + 16 * m, 16 * k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            ldmatrix(b, b_at + n * 8 * ROW<DIM> + 16 * k);
#pragma unroll
            for (int m = 0; m < M; m++) {
                E::mma(c[m][n], a[m], b[0], b[1]);
                E::mma(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/// C [M · 16, DIM] += A · B over K rows of B, which are in a tile. A are weights [M · 16, K] in the
/// layout of a product's result, rounded to 16 bits.
template <class E, int DIM, int M, int K>
DEVICE void product_of_weights(
    float (&c)[M][DIM / 8][4], const uint32_t (&weights)[M][K / 8][2], const uint16_t *b_tile) {
    uint32_t lane = threadIdx.x % 32;
    const uint16_t *b_at = b_tile + lane % 16 * ROW<DIM> + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
#pragma unroll
        for (int n = 0; n < DIM / 8; n += 2) {
            uint32_t b[4];
            ldmatrix_transposed(b, b_at + k * 16 * ROW<DIM> + n * 8);
#pragma unroll
            for (int m = 0; m < M; m++) {
                // A thread's elements of two adjacent fragments C are exactly its elements of one
                // fragment A.
                const uint32_t a[4] = {weights[m][2 * k][0], weights[m][2 * k][1],
                    weights[m][2 * k + 1][0], weights[m][2 * k + 1][1]};
                E::mma(c[m][n], a, b[0], b[1]);
                E::mma(c[m][n + 1], a, b[2], b[3]);
            }
        }
    }
}

/// Writes C [M · 16, DIM], times a factor per row and rounded, to rows of global memory from
/// `first` on. Goes through rows of a tile that only this warp uses.
template <class E, int DIM, int M>
DEVICE void store_fragments(uint16_t *to, const Rows &rows, uint32_t first, uint16_t *own,
    const float (&c)[M][DIM / 8][4], const float (&factors)[M][2]) {
    uint32_t lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t pair = E::pack(
                    c[m][n][2 * half] * factors[m][half], c[m][n][2 * half + 1] * factors[m][half]);
                *reinterpret_cast<uint32_t *>(
                    own + (16 * m + 8 * half + lane / 4) * ROW<DIM> + n * 8 + lane % 4 * 2) = pair;
            }
    __syncwarp();
    store_rows<M * 16, DIM>(to, rows, first, own);
}

/// As above, with one factor.
template <class E, int DIM, int M>
DEVICE void store_fragments(uint16_t *to, const Rows &rows, uint32_t first, uint16_t *own,
    const float (&c)[M][DIM / 8][4], float factor) {
    float factors[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) factors[m][0] = factors[m][1] = factor;
    store_fragments<E, DIM, M>(to, rows, first, own, c, factors);
}
