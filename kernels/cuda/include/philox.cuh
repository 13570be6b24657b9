// Counter-based random numbers: the words of `kernels::tensor::philox`, bit for bit.
//
// Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3": Philox4x32-10.
#pragma once

#include "device.cuh"

/// Four random words, a bijection of the counter for every key.
DEVICE uint4 philox4x32(uint4 c, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c.x,
                       p1 = static_cast<uint64_t>(0xCD9E8D57u) * c.z;
        c = make_uint4(static_cast<uint32_t>(p1 >> 32) ^ c.y ^ key.x, static_cast<uint32_t>(p1),
            static_cast<uint32_t>(p0 >> 32) ^ c.w ^ key.y, static_cast<uint32_t>(p0));
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return c;
}

/// A dropout key's four words, as `DropoutKey::derive` of `kernels::tensor::arguments::dropout`
/// makes them: from the step (low word first) and the other inputs: two words of the seed, layer,
/// site.
DEVICE uint4 derive_key(uint4 without_step, uint2 step) {
    return philox4x32(make_uint4(step.x, step.y, without_step.z, without_step.w),
        make_uint2(without_step.x, without_step.y));
}
