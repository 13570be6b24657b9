// Gradients of keys and values of attention, for Hopper.
#include "gradients_of_keys.cuh"

namespace {

/// Gradients of keys and values: a tile of keys of a group each.
struct OfKeys {
    /// Two accumulators and two tiles of weights need more registers than a third warpgroup would
    /// leave.
    template <int DIM>
    static constexpr uint32_t CONSUMERS = 2;
    /// Which of the two counters of pieces of work.
    static constexpr uint32_t NUMBER = 0;
    /// Arrivals that complete the barriers of resident tiles, and of a stage, besides the bytes:
    /// the thread that expects the bytes, and a warp that writes statistics.
    static constexpr uint32_t STAY_ARRIVALS = 1, ARRIVALS = 1 + 32;
    __device__ __forceinline__ static uint32_t heads(const Attention &call) { return call.groups; }

    template <class... Args>
    __device__ __forceinline__ static void produce(const Args &...args) {
        copy_work(args...);
    }

    template <class E, int DIM>
    __device__ __forceinline__ static void consume(const Attention &call,
        const Shared<DIM, 2> &shared, uint16_t *dqkv, uint32_t tiles, uint32_t all,
        uint32_t section, const Rotation &rotation) {
        gradients_of_keys<E, DIM>(call, shared, dqkv, tiles, all, section, rotation, KeptSlants());
    }
};

} // namespace

BACKWARD(dkdv, OfKeys)
