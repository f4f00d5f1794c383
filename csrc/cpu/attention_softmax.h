// The softmax of attention, online: the weights of a row are relative to the largest score so far, and shrink when a
// larger one comes (https://arxiv.org/abs/1805.02867).
//
// Plain C++ that vectorizes; every table of kernels compiles it for its own instruction set, with the same results.
#pragma once

#include "attention_kernels.h"
#include "exp.h"

#include <algorithm>
#include <cmath>

namespace tern::TERN_ISA {

namespace {  // on purpose: one copy for each instruction set

// tanh within 1e-7, absolute: softcap wants no more, its results are added to others.
inline float tanh_of(float x) {
    const float e = exp_or_zero(-2 * std::fabs(x));
    return std::copysign((1 - e) / (1 + e), x);
}

// The values of a chunk, reduced to one in an order that is the same everywhere: halves onto halves.
template <class Operation> inline float reduce(const float * values, const Operation & operation) {
    float folded[ATTENTION_CHUNK / 2];
    for (int p = 0; p < ATTENTION_CHUNK / 2; p++) {
        folded[p] = operation(values[p], values[p + ATTENTION_CHUNK / 2]);
    }
    for (int n = ATTENTION_CHUNK / 4; n > 0; n /= 2) {
        for (int p = 0; p < n; p++) {
            folded[p] = operation(folded[p], folded[p + n]);
        }
    }
    return folded[0];
}

// The scores of one row and chunk, n_positions of them, become weights e^(score - maximum), and the rest of the chunk 0.
// maximum: the largest score of the row so far, -inf at first. sum: of its weights. Both are brought up to date.
// mask: fp16 of the first position, or nullptr. Returns what the earlier sums of the row are to be multiplied with.
float weigh(float * scores, int n_positions, const uint16_t * mask, float slope, float softcap, float & maximum,
            float & sum) {
    if (softcap != 0) {
        for (int p = 0; p < n_positions; p++) {
            scores[p] = softcap * tanh_of(scores[p]);
        }
    }
    float bias[ATTENTION_CHUNK];
    for (int p = 0; p < n_positions; p++) {
        bias[p] = mask != nullptr ? slope * fp32_from_fp16(mask[p]) : 0.0f;
    }
    std::fill(bias + n_positions, bias + ATTENTION_CHUNK, -INFINITY);
    for (int p = 0; p < ATTENTION_CHUNK; p++) {
        // The score of a hidden cell may be NaN.
        scores[p] = select(bias[p] == -INFINITY, -INFINITY, scores[p] + bias[p]);
    }
    const float before = maximum;
    const float top = std::max(before, reduce(scores, [](float a, float b) { return b > a ? b : a; }));
    if (top == -INFINITY) {
        // All are hidden, or NaN.
        for (int p = 0; p < ATTENTION_CHUNK; p++) {
            scores[p] = select(scores[p] == -INFINITY, 0.0f, scores[p]);
        }
    } else {
        for (int p = 0; p < ATTENTION_CHUNK; p++) {
            scores[p] = exp_or_zero(scores[p] - top);
        }
    }
    const float shrink = before == top ? 1.0f : exp_or_zero(before - top);
    maximum = top;
    sum = sum * shrink + reduce(scores, [](float a, float b) { return a + b; });
    return shrink;
}

void scale(float * values, int64_t n, float factor) {
    for (int64_t i = 0; i < n; i++) {
        values[i] *= factor;
    }
}

}  // namespace

}  // namespace tern::TERN_ISA
