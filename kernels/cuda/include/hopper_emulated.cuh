// The emulated half of hopper.cuh.
#pragma once

#include <functional>
#include <vector>

/// A block's copies and products between their start and the wait for them.
struct HopperState {
    struct Box {
        void *to;
        const TensorMap *map;
        uint32_t at[4];
        uint64_t *barrier;
    };
    std::vector<Box> boxes;
    /// Groups of products by thread; the last group is open.
    std::vector<std::vector<std::function<void()>>> products[1024];

    /// The state of the block that runs on this system thread.
    static HopperState &of_block() {
        static thread_local HopperState state;
        return state;
    }

    std::vector<std::vector<std::function<void()>>> &own() {
        auto &groups = products[emulator::thread().number];
        if (groups.empty()) groups.emplace_back();
        return groups;
    }
};

/// An mbarrier's eight bytes.
struct MBarrier {
    uint64_t phase : 1, count : 20, pending : 20;
    int64_t bytes : 22;

    static MBarrier read(const uint64_t *at) {
        MBarrier b;
        memcpy(&b, at, 8);
        return b;
    }

    void write(uint64_t *at) {
        if (pending == 0 && bytes == 0) {
            phase ^= 1;
            pending = count;
            emulator::block().progress++;
        }
        memcpy(at, this, 8);
    }
};
static_assert(sizeof(MBarrier) == 8, "an mbarrier has 64 bits");

DEVICE uint32_t shared_address(const void *at) {
    const uintptr_t offset =
        reinterpret_cast<uintptr_t>(at) - reinterpret_cast<uintptr_t>(emulator::dynamic_shared());
    return static_cast<uint32_t>(offset);
}

DEVICE void barrier_make(uint64_t *barrier, uint32_t count) {
    // An earlier block may have failed in the middle of its copies.
    HopperState::of_block().boxes.clear();
    MBarrier b{};
    b.count = b.pending = count;
    memcpy(barrier, &b, 8);
}

DEVICE void barriers_made() {}

DEVICE void barrier_arrive(uint64_t *barrier) {
    MBarrier b = MBarrier::read(barrier);
    if (b.pending == 0) emulator::fail("mbarrier: more arrivals than the phase has");
    b.pending--;
    b.write(barrier);
    emulator::block().progress++;
}

DEVICE void barrier_expect(uint64_t *barrier, uint32_t bytes) {
    MBarrier b = MBarrier::read(barrier);
    if (b.pending == 0) emulator::fail("mbarrier: more arrivals than the phase has");
    b.bytes += bytes;
    b.pending--;
    b.write(barrier);
    emulator::block().progress++;
}

/// A tensor map in the emulator's form, which gpu/tensor_map.rs makes.
struct EmulatedMap {
    uint64_t base;
    uint32_t dims[4], box[4];
    uint64_t strides[4]; // in bytes
};
static_assert(sizeof(EmulatedMap) <= sizeof(TensorMap), "room for a map");

/// Copies a box: rows of 128 bytes, in which pieces of 16 bytes are permuted by bits 7 to 9 of
/// their addresses; zeros outside of the tensor.
DEVICE void emulated_box(const HopperState::Box &box) {
    EmulatedMap map;
    memcpy(&map, box.map, sizeof map);
    uint32_t bytes = 0;
    for (uint32_t i3 = 0; i3 < map.box[3]; i3++)
        for (uint32_t i2 = 0; i2 < map.box[2]; i2++)
            for (uint32_t i1 = 0; i1 < map.box[1]; i1++)
                for (uint32_t i0 = 0; i0 < map.box[0]; i0++, bytes += 2) {
                    const uint32_t at[4] = {
                        box.at[0] + i0, box.at[1] + i1, box.at[2] + i2, box.at[3] + i3};
                    uint64_t from = map.base;
                    bool inside = true;
                    for (int i = 0; i < 4; i++) {
                        inside &= at[i] < map.dims[i];
                        from += at[i] * map.strides[i];
                    }
                    uint32_t to = shared_address(box.to) + bytes;
                    to ^= (to >> 7 & 7) << 4;
                    uint16_t value = 0;
                    if (inside) memcpy(&value, reinterpret_cast<const void *>(from), 2);
                    memcpy(emulator::dynamic_shared() + to, &value, 2);
                }
    MBarrier b = MBarrier::read(box.barrier);
    b.bytes -= bytes;
    b.write(box.barrier);
}

DEVICE void copy_box(void *to, const TensorMap *map, uint32_t c0, uint32_t c1, uint32_t c2,
    uint32_t c3, uint64_t *barrier) {
    if (shared_address(to) % 1024)
        emulator::fail(
            "cp.async.bulk.tensor: a swizzled box that does not begin at a multiple of 1024 bytes");
    HopperState::of_block().boxes.push_back({to, map, {c0, c1, c2, c3}, barrier});
}

DEVICE void barrier_wait(uint64_t *barrier, uint32_t parity) {
    const auto ready = [=] {
        // Copies land when a thread waits for them.
        auto &boxes = HopperState::of_block().boxes;
        for (size_t i = 0; i < boxes.size();) {
            const HopperState::Box box = boxes[i];
            if (box.barrier != barrier) {
                i++;
                continue;
            }
            boxes.erase(boxes.begin() + static_cast<std::ptrdiff_t>(i));
            emulated_box(box);
        }
        return MBarrier::read(barrier).phase != parity;
    };
    emulator::wait_until(ready, "mbarrier.try_wait");
}

DEVICE void before_copies() {}
DEVICE void fetch_map(const TensorMap *) {}
DEVICE void some_wait(uint32_t number, uint32_t threads) {
    emulator::barrier(number, threads, 0, "bar.sync");
}
DEVICE void some_come(uint32_t number, uint32_t threads) {
    emulator::barrier_arrive(number, threads);
}
template <int N>
DEVICE void registers_give() {}
template <int N>
DEVICE void registers_take() {}

DEVICE void products_begin() {}
DEVICE void products_commit() { HopperState::of_block().own().emplace_back(); }

template <int N>
DEVICE void products_wait() {
    auto &groups = HopperState::of_block().own();
    const size_t committed = groups.size() - 1, finish = committed > N ? committed - N : 0;
    for (size_t g = 0; g < finish; g++)
        for (auto &product : groups[g]) product();
    groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(finish));
}

template <class T, int N>
DEVICE void products_touch(T (&)[N][4]) {}
DEVICE void computed_before_wait(float, uint32_t) {}
DEVICE void made_here(uint32_t &) {}

/// An operand in shared memory, given by its descriptor (PTX ISA, "Matrix Descriptor Format" and
/// "Strides"; canonical layouts with a swizzle of 128 bytes).
template <class E>
class EmulatedOperand {
    const unsigned char *const memory = emulator::dynamic_shared();
    const uint32_t bytes = emulator::block().shared_bytes;
    const uint32_t start, leading, stride;

public:
    explicit EmulatedOperand(uint64_t descriptor)
        : start((descriptor & 0x3FFF) << 4), leading((descriptor >> 16 & 0x3FFF) << 4),
          stride((descriptor >> 32 & 0x3FFF) << 4) {
        if (descriptor >> 62 != 1)
            emulator::fail("wgmma: only operands with a swizzle of 128 bytes are emulated");
    }

    /// Element (row, k) of [rows, 16], or, transposed, of [16, rows] in row-major order.
    float at(bool transposed, uint32_t row, uint32_t k) const {
        uint32_t at = start;
        if (transposed) at += row % 64 * 2 + row / 64 * leading + k % 8 * 128 + k / 8 * stride;
        else at += k * 2 + row % 8 * 128 + row / 8 * stride;
        at ^= (at >> 7 & 7) << 4;
        if (at + 2 > bytes) emulator::fail("wgmma: an operand behind shared memory");
        uint16_t bits;
        memcpy(&bits, memory + at, 2);
        return E::unpack(bits).x;
    }
};

template <class E, int N>
struct Wgmma {
    static void assign(float (&c)[N / 8][4], uint64_t a, uint64_t b) {
        multiply<false>(c, a, b, false);
    }
    static void add(float (&c)[N / 8][4], uint64_t a, uint64_t b) {
        multiply<false>(c, a, b, true);
    }
    static void assign_turned(float (&c)[N / 8][4], uint64_t a, uint64_t b) {
        multiply<true>(c, a, b, false);
    }
    static void add_turned(float (&c)[N / 8][4], uint64_t a, uint64_t b) {
        multiply<true>(c, a, b, true);
    }
    static void add_weighed(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {
        multiply<true>(c, a, b, true);
    }

private:
    template <bool TRANSPOSED>
    static void multiply(
        float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
        struct Fragment {
            uint32_t a[4];
        };
        float (*const to)[4] = c;
        const uint32_t *const registers = a;
        HopperState::of_block().own().back().push_back([=] {
            const Fragment mine{{registers[0], registers[1], registers[2], registers[3]}};
            float left[2][16];
            emulator::exchange(~0u, "wgmma", mine, [&](auto lanes) {
                const uint32_t lane = emulator::thread().number % 32;
                for (uint32_t t = 0; t < 4; t++) {
                    const Fragment of = lanes[lane / 4 * 4 + t];
                    for (uint32_t r = 0; r < 4; r++) {
                        const float2 pair = E::unpack(of.a[r]);
                        left[r % 2][2 * t + r / 2 * 8] = pair.x;
                        left[r % 2][2 * t + r / 2 * 8 + 1] = pair.y;
                    }
                }
                return 0;
            });
            apply<TRANSPOSED>(to, left, b, accumulate);
        });
    }

    template <bool TURNED>
    static void multiply(float (&c)[N / 8][4], uint64_t a, uint64_t b, bool accumulate) {
        float (*const to)[4] = c;
        HopperState::of_block().own().back().push_back([=] {
            const uint32_t lane = emulator::thread().number % 32,
                           warp = emulator::thread().number / 32 % 4;
            const EmulatedOperand<E> of_a(a);
            float left[2][16];
            for (uint32_t half = 0; half < 2; half++)
                for (uint32_t k = 0; k < 16; k++)
                    left[half][k] = of_a.at(TURNED, 16 * warp + lane / 4 + 8 * half, k);
            apply<TURNED>(to, left, b, accumulate);
        });
    }

    template <bool TRANSPOSED>
    static void apply(float (*c)[4], const float (&left)[2][16], uint64_t b, bool accumulate) {
        const uint32_t t = emulator::thread().number % 4;
        const EmulatedOperand<E> of_b(b);
        for (uint32_t n = 0; n < N / 8; n++)
            for (uint32_t i = 0; i < 2; i++) {
                float sums[2] = {0.0f, 0.0f};
                for (uint32_t k = 0; k < 16; k++) {
                    const float right = of_b.at(TRANSPOSED, 8 * n + 2 * t + i, k);
                    sums[0] += left[0][k] * right;
                    sums[1] += left[1][k] * right;
                }
                for (uint32_t half = 0; half < 2; half++)
                    c[n][2 * half + i] = (accumulate ? c[n][2 * half + i] : 0.0f) + sums[half];
            }
    }
};
