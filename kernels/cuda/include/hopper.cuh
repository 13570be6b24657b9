// Hopper's (sm_90a) instructions that feed tensor cores without registers: barriers that count
// bytes (mbarrier), copies of boxes of tensors (cp.async.bulk.tensor, "TMA"), and asynchronous
// products of whole warpgroups from shared memory (wgmma).
//
// The emulated versions follow the layouts of the PTX ISA: descriptors are decoded bit by bit, and
// boxes arrive swizzled. Copies and products happen as late as allowed, at the wait for them.
#pragma once

#include "mma.cuh"

/// A tensor map for 16-bit elements, as cuTensorMapEncodeTiled makes it. It has four dimensions;
/// boxes have 64 elements (128 bytes) in the first and some rows in the last; 16-byte pieces are
/// swizzled within each 1024 bytes. Copies require alignment to 64 bytes; CUDA 13's own type has
/// 128.
struct alignas(128) TensorMap {
    uint64_t opaque[16];
};

/// Bytes of a row of a swizzled tile.
constexpr uint32_t SWIZZLED_ROW = 128;

/// Offset of 16-byte piece `piece` of row `row` in a tile of such rows that begins at a multiple of
/// 1024 bytes.
DEVICE uint32_t swizzled(uint32_t row, uint32_t piece) {
    return row * SWIZZLED_ROW + (piece ^ row % 8) * 16;
}

/// The wgmma descriptor of an operand in such a tile; its first row is at a multiple of 1024 bytes.
/// The operand is [rows, 16] (16 elements along a row), or [16, columns] (16 down the rows).
/// Columns from the 64th on are in a tile `next` bytes later.
DEVICE uint64_t descriptor(uint32_t address, uint32_t next) {
    const uint64_t leading = next >> 4, stride = 8 * SWIZZLED_ROW >> 4, swizzle_of_128_bytes = 1;
    return (address >> 4 & 0x3FFF) | leading << 16 | stride << 32 | swizzle_of_128_bytes << 62;
}

#ifndef EMULATED

#include "wgmma.cuh"

/// Begins products; they see the current contents of registers.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Ends a group of products.
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until all but the last N groups of products are complete.
template <int N>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/// A compiler barrier for registers of products: results are not used before the wait, and inputs
/// are not computed after `products_begin`, which only covers memory.
template <int N>
DEVICE void products_touch(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
}

/// The same for left operands in registers.
template <int N>
DEVICE void products_touch(uint32_t (&a)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[n][i])::"memory");
}

/// Forces the inputs of `sum` to be computed before the following wait, so that this overlaps with
/// the products. Otherwise ptxas waits first, but not before a store that needs the sum. The store
/// never happens: no addition gives this signalling NaN.
DEVICE void computed_before_wait(float sum, uint32_t shared) {
    asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0x7fa00001; @p st.shared.u32 [%1], %0;}" ::"r"(
                     __float_as_uint(sum)),
        "r"(shared)
        : "memory");
}

/// Keeps the compiler from computing values that depend on `value` earlier, where they would occupy
/// registers from one piece of work to the next.
DEVICE void made_here(uint32_t &value) { asm volatile("" : "+r"(value)); }

/// Initializes a barrier of `count` arrivals, by one thread. Other threads see it after
/// `barriers_made` and a barrier of the block.
DEVICE void barrier_make(uint64_t *barrier, uint32_t count) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
        : "memory");
}

DEVICE void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

/// Arrives, once per phase.
DEVICE void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
        : "memory");
}

/// Arrives, and makes the phase wait for that many bytes of copies.
DEVICE void barrier_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

/// Waits until the phase of this parity is complete. A barrier's first phase has parity 0, and the
/// phase before it 1.
DEVICE void barrier_wait(uint64_t *barrier, uint32_t parity) {
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\n"
                 "bra again;\n"
                 "done: }" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

/// Starts to copy a box of `map` to shared memory, at a multiple of 1024 bytes; its bytes count for
/// `barrier`.
DEVICE void copy_box(void *to, const TensorMap *map, uint32_t c0, uint32_t c1, uint32_t c2,
    uint32_t c3, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

/// Makes this thread's reads and writes of shared memory visible to copies and products that start
/// later. Other threads must be signalled after this.
DEVICE void before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void fetch_map(const TensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// A barrier of some warps of a block, by number (1 to 15): waits for `threads` threads, or only
/// arrives.
DEVICE void some_wait(uint32_t number, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
DEVICE void some_come(uint32_t number, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/// Lowers the registers of a warpgroup's threads to N, or raises them to N.
template <int N>
DEVICE void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEVICE void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#else
#include "hopper_emulated.cuh"
#endif
