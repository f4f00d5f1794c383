// IEEE half and bfloat16 conversions in portable integer arithmetic, written so that compilers vectorize loops over them.
#pragma once

#include <cstdint>
#include <cstring>

namespace tern {

template <typename To, typename From> inline To bit_cast(const From & from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline float fp32_from_bf16(uint16_t h) {
    return bit_cast<float>(uint32_t{h} << 16);
}

// Exponent and mantissa move to their place in an fp32 whose exponent is 112 too small; one exact multiplication by
// 2^112 mends that for normal and subnormal values alike. Inf and NaN keep an all-ones exponent.
inline float fp32_from_fp16(uint16_t h) {
    const uint32_t magnitude = uint32_t{h} & 0x7fffu;
    const float scaled = bit_cast<float>(magnitude << 13) * 0x1p112f;
    const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
    return bit_cast<float>(bit_cast<uint32_t>(scaled) | special | (uint32_t{h} & 0x8000u) << 16);
}

// Rounds to nearest even; what lies beyond 65504 becomes infinity, NaN stays NaN.
inline uint16_t fp16_from_fp32(float f) {
    const uint32_t bits = bit_cast<uint32_t>(f);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Subnormal halves: adding 0.5 leaves the half's integer value, rounded by the adder, in the low mantissa bits.
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? special : half;
    return static_cast<uint16_t>(sign | half);
}

}  // namespace tern
