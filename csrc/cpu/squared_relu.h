// Squared ReLU for a graph that computes SiLU.
//
// BitNet has relu(g)^2 * u between its gate and its up matrix; llama.cpp's graph of it has silu(g) * u. But silu(h) =
// h / (1 + e^-h) takes [0, inf) one to one to itself. A product with the gate matrix that hands out
//
//   h = silu^-1(r)  with  r = relu(g)^2
//
// in place of g therefore makes the stock graph compute what the model is, whatever it fuses SiLU with.
//
// h is the root of f(h) = h - r (1 + e^-h). A rational start, within 1.2 % for every r, is followed by one step of
// Chebyshev's method, d + d^2 f'' / (2 f') with d = f / f'. The step is of third order, so what it leaves, 1e-7, is what
// fp32 can tell: silu(h) is r within 3e-7. From r = 20 on h is r itself.
//
// Plain C++ that vectorizes; every table of kernels compiles it for its own instruction set, with the same results.
#pragma once

#include "../format/float16.h"

#include <cstdint>

namespace tern {

namespace {  // on purpose: one copy for each instruction set

// e^x for x in [-20, 0], within 2e-7 of it; any other x gives some number.
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

// values[i] = silu^-1(relu(values[i])^2). NaN stays NaN.
void squared_relu_for_silu(float * values, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float g = select(values[i] < 0, 0, values[i]);
        const float r = g * g;
        const float s = 1.00938f + r * (0.798098f + r * 0.122662f);
        const float start = r + r / (s * s);
        const float re = r * exp_negative(-start);
        const float inverse = 1 / (1 + re);  // of f'; f'' = -re
        const float d = (start - r - re) * inverse;
        const float h = start - d + d * d * (0.5f * re * inverse);
        values[i] = select(r > 20, r, h);
    }
}

}  // namespace

}  // namespace tern
