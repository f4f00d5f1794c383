// What attention wants of an instruction set.
#pragma once

#include "attention.h"

namespace tern {

constexpr uint16_t FP16_MINUS_INFINITY = 0xfc00;

// K and V come as rows in blocks of a KvType, `stride` bytes from one position to the next. Positions: up to ATTENTION_CHUNK.
struct AttentionKernels {
    // values[p * d + i] = value i of position p.
    void (*decode)(KvType type, const uint8_t * rows, size_t stride, int n_positions, int64_t d, float * values);

    // scores[r * ATTENTION_CHUNK + p] = q[r * d ..) . k[p ..)
    void (*multiply)(KvType type, const uint8_t * k, size_t stride, int n_positions, int64_t d, const float * q,
                     int n_rows, float * scores);

    // sums[r * d + i] += weights[r * ATTENTION_CHUNK + p] * v[p][i], p by p.
    void (*accumulate)(KvType type, const uint8_t * v, size_t stride, int n_positions, int64_t d, const float * weights,
                       int n_rows, float * sums);

    // The scores of a row become weights: see attention_softmax.h.
    float (*weigh)(float * scores, int n_positions, const uint16_t * mask, float slope, float softcap, float & maximum,
                   float & sum);

    // values[i] *= factor
    void (*scale)(float * values, int64_t n, float factor);
};

// Bytes of 32 values.
constexpr size_t block_bytes(KvType type) {
    switch (type) {
    case KvType::F32: return 128;
    case KvType::F16: return 64;
    case KvType::BF16: return 64;
    case KvType::Q4_0: return 2 + 16;
    case KvType::Q4_1: return 2 + 2 + 16;
    case KvType::Q5_0: return 2 + 4 + 16;
    case KvType::Q5_1: return 2 + 2 + 4 + 16;
    case KvType::Q8_0: return 2 + 32;
    }
    return 0;
}

}  // namespace tern
