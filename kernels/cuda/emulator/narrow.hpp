// The 16-bit floats as the emulator and the stand-ins represent and convert them.
#pragma once

#include <cstdint>
#include <cstring>

template <class To, class From>
static inline To emulator_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// 16-bit floats: plain bits here; functions of device.cuh convert them.
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

static inline float emulator_float(bf16 x) { return emulator_bits<float>(static_cast<uint32_t>(x.bits) << 16); }
static inline bf16 emulator_bf16(float x) {
    uint32_t u = emulator_bits<uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(0x7fff)};
    return {static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1)) >> 16)};
}
static inline float emulator_float(f16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
    // Reads the bits with f32's exponent bias, then rescales: exact, also for subnormal numbers.
    const uint32_t finite = emulator_bits<uint32_t>(emulator_bits<float>(magnitude) * 0x1p112f);
    return emulator_bits<float>(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}
static inline f16 emulator_f16(float x) {
    const uint32_t u = emulator_bits<uint32_t>(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(0x7fff)};
    // 65520 and larger values round to infinity.
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00)};
    // Below 2^-14: multiples of 2^-24, by an addition that rounds to nearest even.
    if (magnitude < 0x38800000u) {
        const float shifted = emulator_bits<float>(magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (emulator_bits<uint32_t>(shifted) - 0x3f000000u))};
    }
    return {static_cast<uint16_t>(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u) >> 13))};
}
