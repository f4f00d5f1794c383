// e^x for loops that compilers vectorize: plain C++, no branches, the same bits from every instruction set.
#pragma once

#include "../format/float16.h"

#include <cstdint>

namespace tern::TERN_ISA {

namespace {  // on purpose: one copy for each instruction set

// e^x for x in [-87, 0], within 2e-7 of it, and 1 for 0; any other x gives some number, NaN gives NaN.
inline float exp_negative(float x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
    const float shifted = x * 1.44269504f + ROUND;
    const float n = shifted - ROUND;
    const float t = x - n * 0.693359375f + n * 2.12194440e-4f;  // x - n ln 2, |t| <= ln 2 / 2
    float p = 1.0f / 720;
    p = p * t + 1.0f / 120;
    p = p * t + 1.0f / 24;
    p = p * t + 1.0f / 6;
    p = p * t + 0.5f;
    p = p * t + 1.0f;
    p = p * t + 1.0f;
    return p * bit_cast<float>((bit_cast<uint32_t>(shifted) + 127) << 23);
}

// condition ? a : b, without the branch that would keep compilers from vectorizing.
inline float select(bool condition, float a, float b) {
    const uint32_t mask = condition ? 0xffffffffu : 0u;
    return bit_cast<float>((bit_cast<uint32_t>(a) & mask) | (bit_cast<uint32_t>(b) & ~mask));
}

// e^x for x <= 0, down to -inf; 0 where it is less than 1e-37.
inline float exp_or_zero(float x) {
    return select(x < -87.0f, 0.0f, exp_negative(x));
}

}  // namespace

}  // namespace tern::TERN_ISA
