// Kernels that test the emulator: correct ones, and ones with mistakes that it must find. Not for
// GPUs.
#include "../include/device.cuh"

/// The sum of the threads' numbers, first within warps, then through shared memory.
KERNEL(block_sum, float *out, uint32_t n) {
    DYNAMIC_SHARED(memory);
    float *sums = reinterpret_cast<float *>(memory);
    float sum = static_cast<float>(threadIdx.x);
    for (int with = 16; with > 0; with /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, with);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (uint32_t w = 0; w < blockDim.x / 32; w++) sum += sums[w];
    if (__syncthreads_count(threadIdx.x % 2) != static_cast<int>(blockDim.x / 2)) sum = -1.0f;
    if (!__all_sync(0xffffffffu, sum > 0.0f) ||
        __ballot_sync(0xffffffffu, threadIdx.x % 32 == 3) != 8)
        sum = -2.0f;
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = sum;
}

KERNEL(halves_of_a_warp, float *out, uint32_t n) {
    float sum = static_cast<float>(threadIdx.x);
    if (threadIdx.x < 16) {
        for (int with = 8; with > 0; with /= 2) sum += __shfl_xor_sync(0x0000ffffu, sum, with);
    } else {
        for (int with = 8; with > 0; with /= 2) sum += __shfl_xor_sync(0xffff0000u, sum, with);
    }
    __syncwarp();
    if (threadIdx.x < n) out[threadIdx.x] = sum;
}

/// The first warp writes, the second reads.
KERNEL(producer_and_consumer, float *out, uint32_t n) {
    SHARED(float, values, [32]);
    if (threadIdx.x < 32) {
        values[threadIdx.x] = 100.0f + static_cast<float>(threadIdx.x);
        emulator::barrier_arrive(3, 64);
        out[threadIdx.x] = 0.0f;
    } else {
        emulator::barrier(3, 64, 0, "bar.sync 3");
        if (threadIdx.x < n) out[threadIdx.x] = values[(threadIdx.x + 1) % 32];
    }
}

KERNEL(missing_barrier, float *out, uint32_t n) {
    SHARED(float, values, [64]);
    values[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (threadIdx.x < n) out[threadIdx.x] = values[(threadIdx.x + 1) % 64];
}

KERNEL(barrier_for_some, float *out, uint32_t n) {
    if (threadIdx.x >= 40) return;
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = 0.0f;
}

KERNEL(shuffle_without_a_lane, float *out, uint32_t n) {
    if (threadIdx.x == 5) return;
    const float value = __shfl_sync(0xffffffffu, 1.0f, 0);
    if (threadIdx.x < n) out[threadIdx.x] = value;
}

KERNEL(mask_without_oneself, float *out, uint32_t n) {
    const float value = __shfl_sync(0x0000ffffu, 1.0f, 0);
    if (threadIdx.x < n) out[threadIdx.x] = value;
}

KERNEL(behind_shared_memory, float *out, uint32_t n) {
    DYNAMIC_SHARED(memory);
    if (threadIdx.x == 0) memory[64] = 1;
    if (threadIdx.x < n) out[threadIdx.x] = 0.0f;
}
