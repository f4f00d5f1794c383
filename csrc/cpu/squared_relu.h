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

#include "exp.h"

#include <cstdint>

namespace tern::TERN_ISA {

namespace {  // on purpose: one copy for each instruction set

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

}  // namespace tern::TERN_ISA
