// Lookup of rows in a vocabulary-parallel embedding, and the gradient of its weight without
// floating-point atomics.
//
// Tokens are sorted by the row that they look up; tokens of one row keep their order. First tiles
// of tokens are sorted (`sort_tile`), then each token finds its place among all (`place`). Then
// every row sums the gradients of its run of tokens, by segments of 64, so that a frequent token
// does not keep one block busy while the others are idle. A row with one segment is then complete;
// longer runs are joined from the segments' sums, in order.
#include "divider.cuh"
#include "inplace.cuh"

constexpr uint32_t SEGMENT = 64;
constexpr uint32_t TILE = 2048; // tokens that a block sorts

/// The local row of an id, or `rows` if this rank does not have it.
DEVICE uint32_t local_row(uint32_t id, uint32_t first_row, uint32_t rows) {
    return id >= first_row && id - first_row < rows ? id - first_row : rows;
}

// y [tokens, h] = rows of weight [rows, h]; zeros for ids of other ranks. An item is V elements of
// a row.
template <class T, bool VECTORS>
DEVICE void lookup(const uint32_t *ids, const T *weight, T *y, uint32_t items, uint32_t first_row,
    uint32_t rows, const Divider per_row) {
    constexpr int V = VECTORS ? VECTOR<T> : 1;
    const uint32_t item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= items) return;
    uint32_t in_row = item;
    const uint32_t row = local_row(ids[per_row.split(in_row)], first_row, rows);
    const uint64_t from = (static_cast<uint64_t>(row) * per_row.divisor + in_row) * V,
                   to = static_cast<uint64_t>(item) * V;
    if (VECTORS) {
        store_vector(
            y + to, row < rows ? load_vector(weight + from) : Vector<T>{make_uint4(0, 0, 0, 0)});
    } else {
        y[to] = row < rows ? weight[from] : from_float<T>(0.0f);
    }
}

// Sorts the keys of the tokens of tile blockIdx.x, ascending. A key is the token's row, and in its
// low bits the token's number, so that no two are equal. A bitonic sort (Batcher 1968) with half as
// many threads as a tile has tokens; a partial last tile is padded with keys larger than any other.
DEVICE void sort_tile(
    const uint32_t *ids, uint64_t *keys, uint32_t n, uint32_t first_row, uint32_t rows) {
    SHARED(uint64_t, tile, [TILE]);
    const uint32_t first = blockIdx.x * TILE, size = min(TILE, n - first), t = threadIdx.x;
    for (uint32_t j = t; j < TILE; j += TILE / 2)
        tile[j] = j < size
                      ? static_cast<uint64_t>(local_row(ids[first + j], first_row, rows)) << 32 |
                            (first + j)
                      : ~uint64_t(0);
    for (uint32_t length = 2; length <= TILE; length *= 2) {
        for (uint32_t distance = length / 2; distance > 0; distance /= 2) {
            __syncthreads();
            // Of every 2·distance elements, pair each element of the first half with its partner in
            // the second.
            const uint32_t low = 2 * t - (t & (distance - 1)), high = low + distance;
            const uint64_t a = tile[low], b = tile[high];
            const bool ascending = (low & length) == 0;
            if ((a > b) == ascending) {
                tile[low] = b;
                tile[high] = a;
            }
        }
    }
    __syncthreads();
    for (uint32_t j = t; j < size; j += TILE / 2) keys[first + j] = tile[j];
}

// Writes the row and the number of every token of sorted tiles to its place among all tokens: after
// the keys before it in its own tile, and after the smaller keys of every other tile.
DEVICE void place(const uint64_t *keys, uint32_t *sorted, uint32_t *order, uint32_t n) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const uint64_t key = keys[i];
    const uint32_t tiles = (n - 1) / TILE + 1, own = i / TILE;
    uint32_t before = i % TILE;
    // Several tiles are searched side by side, because each search waits for memory at every step.
    constexpr int SEARCHES = 4;
    for (uint32_t tile = 0; tile < tiles; tile += SEARCHES) {
        uint32_t first[SEARCHES], size[SEARCHES], smaller[SEARCHES];
#pragma unroll
        for (int s = 0; s < SEARCHES; s++) {
            first[s] = (tile + s) * TILE;
            size[s] = tile + s < tiles && tile + s != own ? min(TILE, n - first[s]) : 0;
            smaller[s] = 0;
        }
        for (uint32_t step = TILE; step > 0; step /= 2) {
#pragma unroll
            for (int s = 0; s < SEARCHES; s++) {
                const uint32_t with = smaller[s] + step;
                if (with <= size[s] && __ldg(keys + first[s] + with - 1) < key) smaller[s] = with;
            }
        }
#pragma unroll
        for (int s = 0; s < SEARCHES; s++) before += smaller[s];
    }
    sorted[before] = static_cast<uint32_t>(key >> 32);
    order[before] = static_cast<uint32_t>(key);
}

// starts[p] = the place where the run that contains p begins.
DEVICE void find_starts(const uint32_t *sorted, uint32_t *starts, uint32_t n) {
    const uint32_t p = blockIdx.x * blockDim.x + threadIdx.x;
    if (p >= n) return;
    uint32_t low = 0, high = p;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (sorted[middle] < sorted[p]) low = middle + 1;
        else high = middle;
    }
    starts[p] = low;
}

/// The slot for the sum of a segment that is not the only one of its row. Full segments begin at
/// least 64 places apart, and so do those that end a run after full ones.
DEVICE uint64_t slot(uint32_t place, uint32_t length) {
    return place / SEGMENT * 2 + (length < SEGMENT);
}

/// V elements of T, in f32.
template <class T, int V>
struct Few {
    float value[V];

    /// Elements that this thread will overwrite.
    DEVICE static Few own(const float *at) {
        Few few;
        if constexpr (V == 1) {
            few.value[0] = *at;
        } else {
#pragma unroll
            for (int v = 0; v < V / 4; v++) {
                const Vector<float> in = load_own(at + 4 * v);
#pragma unroll
                for (int i = 0; i < 4; i++) few.value[4 * v + i] = in[i];
            }
        }
        return few;
    }

    DEVICE static Few zero() {
        Few few;
#pragma unroll
        for (int i = 0; i < V; i++) few.value[i] = 0.0f;
        return few;
    }

    DEVICE void add(const T *at) {
        if constexpr (V == 1) {
            value[0] += to_float(*at);
        } else {
#pragma unroll
            for (int v = 0; v < V / VECTOR<T>; v++) {
                const Vector<T> in = load_vector(at + v * VECTOR<T>);
#pragma unroll
                for (int i = 0; i < VECTOR<T>; i++) value[v * VECTOR<T> + i] += in[i];
            }
        }
    }

    DEVICE void store(float *at) const {
        if constexpr (V == 1) {
            *at = value[0];
        } else {
#pragma unroll
            for (int v = 0; v < V / 4; v++)
                store_vector(
                    at + 4 * v, Vector<float>::of([&](int i) { return value[4 * v + i]; }));
        }
    }
};

// Sums the segment that begins at place blockIdx.x, if there is one: into its row of dweight, or
// into its slot of `partials` if the row has more segments.
template <class T, int V>
DEVICE void sum_segment(const T *dy, const uint32_t *sorted, const uint32_t *order,
    const uint32_t *starts, float *dweight, float *partials, uint32_t n, uint32_t h,
    uint32_t rows) {
    SHARED(uint32_t, tokens, [SEGMENT]);
    const uint32_t place = blockIdx.x, start = starts[place], row = sorted[place], t = threadIdx.x;
    if ((place - start) % SEGMENT != 0 || row == rows) return;
    const bool mine = t < SEGMENT && place + t < n && starts[place + t] == start;
    if (mine) tokens[t] = order[place + t];
    const uint32_t length = __syncthreads_count(mine);
    const bool alone = place == start && !(place + SEGMENT < n && starts[place + SEGMENT] == start);
    float *to =
        alone ? dweight + static_cast<uint64_t>(row) * h : partials + slot(place, length) * h;
    for (uint32_t c = t * V; c < h; c += blockDim.x * V) {
        Few<T, V> sum = alone ? Few<T, V>::own(to + c) : Few<T, V>::zero();
#pragma unroll 4
        for (uint32_t k = 0; k < length; k++)
            sum.add(dy + static_cast<uint64_t>(tokens[k]) * h + c);
        sum.store(to + c);
    }
}

// Adds the segments' sums to dweight's row, for a run of more than one segment. Such a run has a
// multiple of SEGMENT among its first places: blockIdx.x is the number of that multiple.
template <int V>
DEVICE void join_segments(const uint32_t *sorted, const uint32_t *starts, float *dweight,
    const float *partials, uint32_t n, uint32_t h, uint32_t rows) {
    const uint32_t here = blockIdx.x * SEGMENT, start = starts[here], row = sorted[start];
    if (here - start >= SEGMENT || row == rows || start + SEGMENT >= n ||
        starts[start + SEGMENT] != start)
        return;
    float *to = dweight + static_cast<uint64_t>(row) * h;
    for (uint32_t c = threadIdx.x * V; c < h; c += blockDim.x * V) {
        Few<float, V> sum = Few<float, V>::own(to + c);
        for (uint32_t place = start; place < n && starts[place] == start; place += SEGMENT) {
            const bool full = place + SEGMENT - 1 < n && starts[place + SEGMENT - 1] == start;
            sum.add(partials + slot(place, full ? SEGMENT : 0) * h + c);
        }
        sum.store(to + c);
    }
}

#define KERNELS(T, suffix)                                                                         \
    KERNEL(embedding_##suffix, const uint32_t *ids, const T *weight, T *y, uint32_t items,         \
        uint32_t first_row, uint32_t rows, const Divider per_row) {                                \
        lookup<T, true>(ids, weight, y, items, first_row, rows, per_row);                          \
    }                                                                                              \
    KERNEL(embedding_any_##suffix, const uint32_t *ids, const T *weight, T *y, uint32_t items,     \
        uint32_t first_row, uint32_t rows, const Divider per_row) {                                \
        lookup<T, false>(ids, weight, y, items, first_row, rows, per_row);                         \
    }                                                                                              \
    KERNEL(embedding_sum_##suffix, const T *dy, const uint32_t *sorted, const uint32_t *order,     \
        const uint32_t *starts, float *dweight, float *partials, uint32_t n, uint32_t h,           \
        uint32_t rows) {                                                                           \
        sum_segment<T, VECTOR<T>>(dy, sorted, order, starts, dweight, partials, n, h, rows);       \
    }                                                                                              \
    KERNEL(embedding_sum_any_##suffix, const T *dy, const uint32_t *sorted, const uint32_t *order, \
        const uint32_t *starts, float *dweight, float *partials, uint32_t n, uint32_t h,           \
        uint32_t rows) {                                                                           \
        sum_segment<T, 1>(dy, sorted, order, starts, dweight, partials, n, h, rows);               \
    }
FOR_DTYPES(KERNELS)

KERNEL_BOUNDS(1024, 1, embedding_sort, const uint32_t *ids, uint64_t *keys, uint32_t n,
    uint32_t first_row, uint32_t rows) {
    sort_tile(ids, keys, n, first_row, rows);
}
KERNEL(embedding_place, const uint64_t *keys, uint32_t *sorted, uint32_t *order, uint32_t n) {
    place(keys, sorted, order, n);
}
KERNEL(embedding_starts, const uint32_t *sorted, uint32_t *starts, uint32_t n) {
    find_starts(sorted, starts, n);
}
KERNEL(embedding_join, const uint32_t *sorted, const uint32_t *starts, float *dweight,
    const float *partials, uint32_t n, uint32_t h, uint32_t rows) {
    join_segments<4>(sorted, starts, dweight, partials, n, h, rows);
}
KERNEL(embedding_join_any, const uint32_t *sorted, const uint32_t *starts, float *dweight,
    const float *partials, uint32_t n, uint32_t h, uint32_t rows) {
    join_segments<1>(sorted, starts, dweight, partials, n, h, rows);
}
