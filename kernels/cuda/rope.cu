// Rotary position embedding (Su et al. 2021) of packed queries and keys in place. Rotates halves,
// as Llama does.
//
// A row of qkv holds, per group, `heads` heads to rotate (its queries and its key) and the value,
// `head_dim` elements each. A thread takes 16 bytes of a head's first half and the 16 bytes of the
// second half that pair with them.
#include "divider.cuh"
#include "inplace.cuh"

/// The layout of items in a row; half a head has `parts` items.
struct Heads {
    Divider per_row, parts, heads, batch;
    uint32_t head_dim, width;
    // The table's last position.
    uint32_t last;
};

/// An item's address, and the row of the table for its rotation.
struct Place {
    uint64_t first;
    uint32_t part, position;

    // Row (s, b) has position offset + s, or its position in the list. The list is not checked.
    DEVICE Place(uint32_t item, const Heads &shape, const uint32_t *positions, uint32_t offset) {
        const uint32_t row = shape.per_row.split(item);
        uint32_t head = shape.parts.split(item);
        part = item;
        const uint32_t group = shape.heads.split(head);
        first = static_cast<uint64_t>(row) * shape.width +
                (group * (shape.heads.divisor + 1) + head) * shape.head_dim;
        position = positions ? min(positions[row], shape.last) : offset + shape.batch.quotient(row);
    }
};

template <class T>
DEVICE void vectors(T *qkv, const float *cosines, const float *sines, const uint32_t *positions,
    uint32_t offset, uint32_t items, float sign, const Heads &shape) {
    constexpr int V = VECTOR<T>;
    const uint32_t item = blockIdx.x * blockDim.x + threadIdx.x, half = shape.head_dim / 2;
    if (item >= items) return;
    const Place place(item, shape, positions, offset);
    T *first = qkv + place.first + place.part * V, *second = first + half;
    const Vector<T> a = load_own(first), b = load_own(second);
    const uint64_t at = static_cast<uint64_t>(place.position) * half + place.part * V;
    float turn_cos[V], turn_sin[V];
#pragma unroll
    for (int q = 0; q < V / 4; q++) {
        const Vector<float> c = load_vector(cosines + at + 4 * q),
                            s = load_vector(sines + at + 4 * q);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            turn_cos[4 * q + i] = c[i];
            turn_sin[4 * q + i] = s[i] * sign;
        }
    }
    store_vector(
        first, Vector<T>::of([&](int i) { return a[i] * turn_cos[i] - b[i] * turn_sin[i]; }));
    store_vector(
        second, Vector<T>::of([&](int i) { return b[i] * turn_cos[i] + a[i] * turn_sin[i]; }));
}

// As `vectors`, for any width and alignment: items are single pairs.
template <class T>
DEVICE void pairs(T *qkv, const float *cosines, const float *sines, const uint32_t *positions,
    uint32_t offset, uint32_t items, float sign, const Heads &shape) {
    const uint32_t item = blockIdx.x * blockDim.x + threadIdx.x, half = shape.head_dim / 2;
    if (item >= items) return;
    const Place place(item, shape, positions, offset);
    T *first = qkv + place.first + place.part, *second = first + half;
    const uint64_t at = static_cast<uint64_t>(place.position) * half + place.part;
    const float a = to_float(*first), b = to_float(*second), cos = cosines[at],
                sin = sines[at] * sign;
    *first = from_float<T>(a * cos - b * sin);
    *second = from_float<T>(b * cos + a * sin);
}

#define KERNELS(T, suffix)                                                                         \
    KERNEL(rope_##suffix, T *qkv, const float *cosines, const float *sines,                        \
        const uint32_t *positions, uint32_t offset, uint32_t items, float sign,                    \
        const Heads shape) {                                                                       \
        vectors(qkv, cosines, sines, positions, offset, items, sign, shape);                       \
    }                                                                                              \
    KERNEL(rope_any_##suffix, T *qkv, const float *cosines, const float *sines,                    \
        const uint32_t *positions, uint32_t offset, uint32_t items, float sign,                    \
        const Heads shape) {                                                                       \
        pairs(qkv, cosines, sines, positions, offset, items, sign, shape);                         \
    }
FOR_DTYPES(KERNELS)
