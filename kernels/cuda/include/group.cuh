// Sums and maxima over the threads that share a row: a warp, or a whole block.
//
// All threads of the group get the same result. Its order of operations depends on the group's size
// alone.
#pragma once

#include "device.cuh"

struct Add {
    static DEVICE float neutral() { return 0.0f; }
    static DEVICE float join(float a, float b) { return a + b; }
};

struct Max {
    static DEVICE float neutral() { return -INFINITY; }
    static DEVICE float join(float a, float b) { return fmaxf(a, b); }
};

template <class Op>
DEVICE float over_warp(float v) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        v = Op::join(v, __shfl_xor_sync(0xffffffffu, v, distance));
    return v;
}

// Over a block of whole warps. `slots` holds 32 floats and serves one call only: the next call
// needs other slots, or a barrier before it.
template <class Op>
DEVICE float over_block(float v, float *slots) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    v = over_warp<Op>(v);
    if (lane == 0) slots[warp] = v;
    __syncthreads();
    return over_warp<Op>(lane < warps ? slots[lane] : Op::neutral());
}
