// Shared by all attention kernels: offsets in packed tensors, the keys that a query sees, and the
// weights that are dropped.
#pragma once

#include "mma.cuh"
#include "philox.cuh"

constexpr float LN_2 = 0.6931471805599453f;

/// A call of attention; kernels/src/cuda/attention/mod.rs has the same layout.
struct Attention {
    /// `[b][s]`, the first key that a query sees, or null.
    const uint32_t *first_keys;
    /// Slope per local query head, for powers of two; or null.
    const float *slopes;
    /// `[b]` global sample numbers, low word first; if `step_on_device`, they follow the training
    /// step.
    const uint2 *samples;
    uint32_t s, b, groups, heads_per_group, head_dim;
    /// Most keys that a query sees; 0: no limit.
    uint32_t window;
    /// Factor of the scores, for powers of two and for the scores themselves.
    float scale_log2, scale;
    /// Whether scores are scaled before their maximum is taken: there are slopes, or the scale is
    /// not positive.
    uint32_t tilted;
    /// Whether every row of a head begins at a multiple of 16 bytes.
    uint32_t aligned;
    /// Key of dropout; if `step_on_device`, the key's inputs without the step.
    uint32_t key[4];
    uint32_t threshold, first_head;
    /// 1/(1−p)
    float kept;
    uint32_t step_on_device;
};

/// Stride of positions in qkv, in elements.
DEVICE size_t qkv_stride(const Attention &call) {
    return (size_t)call.b * call.groups * (call.heads_per_group + 2) * call.head_dim;
}

/// Offset in qkv, at position 0, of a part of a group: its query heads, its key, its value.
DEVICE size_t qkv_at(const Attention &call, uint32_t sample, uint32_t group, uint32_t part) {
    return (((size_t)sample * call.groups + group) * (call.heads_per_group + 2) + part) *
           call.head_dim;
}

/// Stride of positions in the output, in elements.
DEVICE size_t out_stride(const Attention &call) {
    return (size_t)call.b * call.groups * call.heads_per_group * call.head_dim;
}

/// Offset in the output, at position 0, of a head.
DEVICE size_t out_at(const Attention &call, uint32_t sample, uint32_t head) {
    return ((size_t)sample * call.groups * call.heads_per_group + head) * call.head_dim;
}

/// Offset of a head's first query in `[b, heads, s]`.
DEVICE size_t statistics_at(const Attention &call, uint32_t sample, uint32_t head) {
    return ((size_t)sample * call.groups * call.heads_per_group + head) * call.s;
}

/// The first key that a query sees. Queries beyond the sequence's end get the value of its last
/// query. Does not decrease along the queries.
DEVICE uint32_t first_key(const Attention &call, uint32_t sample, uint32_t query) {
    query = query < call.s ? query : call.s - 1;
    uint32_t first = call.window && query >= call.window ? query + 1 - call.window : 0;
    if (call.first_keys) {
        // Every query sees itself, whatever the table says. Otherwise Hopper's kernels would wait
        // for ever for tiles of keys that no query sees.
        const uint32_t of_document = min(call.first_keys[(size_t)sample * call.s + query], query);
        first = first > of_document ? first : of_document;
    }
    return first;
}

/// If scores are tilted, scales a fragment C of products of queries and keys and adds the slope's
/// term. Returns the factor that is still to apply. `row` and `column` are the fragment's first
/// ones: a query and a key, or, with KEYS_IN_ROWS, a key and a query.
template <bool KEYS_IN_ROWS, int N>
DEVICE float tilt(
    const Attention &call, float slope, uint32_t row, uint32_t column, float (&scores)[N][4]) {
    if (!call.tilted) return call.scale_log2;
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int behind = static_cast<int>(column + n * 8 + 2 * t + i % 2) -
                               static_cast<int>(row + g + i / 2 * 8);
            const int distance = KEYS_IN_ROWS ? -behind : behind;
            scores[n][i] = scores[n][i] * call.scale_log2 + slope * static_cast<float>(distance);
        }
    return 1.0f;
}

/// As above, for 16 · M rows.
template <bool KEYS_IN_ROWS, int M, int N>
DEVICE float tilt(
    const Attention &call, float slope, uint32_t row, uint32_t column, float (&scores)[M][N][4]) {
    float scale = 1.0f;
#pragma unroll
    for (int m = 0; m < M; m++)
        scale = tilt<KEYS_IN_ROWS>(call, slope, row + m * 16, column, scores[m]);
    return scale;
}

/// The random words that decide which weights of a head are dropped. Four keys share one Philox
/// block.
struct HeadMask {
    uint32_t k0, k1, b, d;

    HeadMask() = default;

    __device__ __forceinline__ HeadMask(const Attention &call, uint32_t sample, uint32_t head) {
        uint2 words = call.samples[sample];
        uint4 key = make_uint4(call.key[0], call.key[1], call.key[2], call.key[3]);
        if (call.step_on_device) key = derive_key(key, call.samples[-1]);
        uint4 derived = philox4x32(
            make_uint4(words.x, words.y, call.first_head + head, key.z), make_uint2(key.x, key.y));
        k0 = derived.x, k1 = derived.y, b = derived.z, d = derived.w;
    }

    /// The words of a query and the four keys from `key`, a multiple of 4, on.
    __device__ __forceinline__ uint4 words(uint32_t query, uint32_t key) const {
        return philox4x32(make_uint4(query, b, key / 4, d), make_uint2(k0, k1));
    }
};

/// The words of a thread's elements of a fragment C [16 queries, 8 keys] that begins at `query` and
/// `key`. A thread has two adjacent keys of two queries. Two threads share a Philox block, so each
/// computes one block and they exchange halves.
DEVICE void words_of_queries_by_keys(
    const HeadMask &mask, uint32_t query, uint32_t key, uint32_t (&words)[4]) {
    uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, odd = t % 2;
    uint4 block = mask.words(query + g + 8 * odd, key + t / 2 * 4);
    // The even thread has the lower query's block, the odd one the upper query's. Each needs its
    // two keys from both blocks.
    uint32_t first = __shfl_xor_sync(~0u, odd ? block.x : block.z, 1);
    uint32_t second = __shfl_xor_sync(~0u, odd ? block.y : block.w, 1);
    words[0] = odd ? first : block.x;
    words[1] = odd ? second : block.y;
    words[2] = odd ? block.z : first;
    words[3] = odd ? block.w : second;
}

/// As above, for a fragment C [16 keys, 8 queries]. A thread has keys g and g + 8 of two adjacent
/// queries. Four threads share the same four Philox blocks, so each computes one of them and they
/// exchange words.
DEVICE void words_of_keys_by_queries(
    const HeadMask &mask, uint32_t key, uint32_t query, uint32_t (&words)[4]) {
    uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, mine = g % 4;
    // Element i of the four has query 2t + i % 2 and key g + 8 · (i / 2). Thread i of the four
    // computes the block with all four threads' words of element i.
    uint4 block = mask.words(query + 2 * t + mine % 2, key + g / 4 * 4 + mine / 2 * 8);
    uint32_t got[4];
#pragma unroll
    for (uint32_t distance = 0; distance < 4; distance++) {
        // This thread sends the word of the thread `distance` before it, modulo four, and receives
        // its own word from the thread `distance` after it.
        uint32_t to = (mine - distance) % 4, from = (mine + distance) % 4;
        uint32_t low = to & 1 ? block.y : block.x, high = to & 1 ? block.w : block.z;
        uint32_t word = to & 2 ? high : low;
        uint32_t source = (g - mine + from) * 4 + t;
        got[distance] = distance == 0 ? word : __shfl_sync(~0u, word, source);
    }
    // got[distance] is element (mine + distance) % 4: rotate into place.
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t at = (i - mine) % 4;
        uint32_t low = at & 1 ? got[1] : got[0], high = at & 1 ? got[3] : got[2];
        words[i] = at & 2 ? high : low;
    }
}
