// Attention in plain C++, for any processor: block by block is decoded, and the rest are plain loops.
#define TERN_ISA generic

#include "attention_softmax.h"
#include "isas.h"

#include <cstring>

namespace tern::generic {

namespace {

float fp16_at(const uint8_t * p) {
    uint16_t h;
    std::memcpy(&h, p, sizeof(h));
    return fp32_from_fp16(h);
}

// Element i < 16 of a block has the low nibble of byte i, element 16 + i the high one.
int nibble(const uint8_t * nibbles, int i) {
    return nibbles[i % 16] >> (i < 16 ? 0 : 4) & 15;
}

// The fifth bits of the elements are those of a 32-bit number, in order.
int fifth_bit(const uint8_t * bits, int i) {
    return (bits[i / 8] >> i % 8 & 1) << 4;
}

// Value i of a block of 32. A block begins with its scale and, in Q4_1 and Q5_1, its minimum.
float value_of(KvType type, const uint8_t * block, int i) {
    switch (type) {
    case KvType::F32: {
        float value;
        std::memcpy(&value, block + 4 * i, sizeof(value));
        return value;
    }
    case KvType::F16: return fp16_at(block + 2 * i);
    case KvType::BF16: {
        uint16_t h;
        std::memcpy(&h, block + 2 * i, sizeof(h));
        return fp32_from_bf16(h);
    }
    case KvType::Q4_0: return static_cast<float>(nibble(block + 2, i) - 8) * fp16_at(block);
    case KvType::Q4_1: return static_cast<float>(nibble(block + 4, i)) * fp16_at(block) + fp16_at(block + 2);
    case KvType::Q5_0:
        return static_cast<float>((nibble(block + 6, i) | fifth_bit(block + 2, i)) - 16) * fp16_at(block);
    case KvType::Q5_1:
        return static_cast<float>(nibble(block + 8, i) | fifth_bit(block + 4, i)) * fp16_at(block) + fp16_at(block + 2);
    case KvType::Q8_0: return static_cast<float>(static_cast<int8_t>(block[2 + i])) * fp16_at(block);
    }
    return 0;
}

void decode(KvType type, const uint8_t * rows, size_t stride, int n_positions, int64_t d, float * values) {
    for (int p = 0; p < n_positions; p++) {
        const uint8_t * block = rows + p * stride;
        for (int64_t b = 0; b < d / KV_BLOCK; b++, block += block_bytes(type)) {
            for (int i = 0; i < KV_BLOCK; i++) {
                values[p * d + b * KV_BLOCK + i] = value_of(type, block, i);
            }
        }
    }
}

// Block b of a row as floats.
struct DecodedBlock {
    float values[KV_BLOCK];

    DecodedBlock(KvType type, const uint8_t * row, int64_t b) {
        decode(type, row + b * block_bytes(type), 0, 1, KV_BLOCK, values);
    }
};

void multiply(KvType type, const uint8_t * k, size_t stride, int n_positions, int64_t d, const float * q, int n_rows,
              float * scores) {
    for (int p = 0; p < n_positions; p++) {
        for (int r = 0; r < n_rows; r++) {
            scores[r * ATTENTION_CHUNK + p] = 0;
        }
        for (int64_t b = 0; b < d / KV_BLOCK; b++) {
            const DecodedBlock block(type, k + p * stride, b);
            for (int r = 0; r < n_rows; r++) {
                float sum = scores[r * ATTENTION_CHUNK + p];
                for (int i = 0; i < KV_BLOCK; i++) {
                    sum += q[r * d + b * KV_BLOCK + i] * block.values[i];
                }
                scores[r * ATTENTION_CHUNK + p] = sum;
            }
        }
    }
}

void accumulate(KvType type, const uint8_t * v, size_t stride, int n_positions, int64_t d, const float * weights,
                int n_rows, float * sums) {
    for (int p = 0; p < n_positions; p++) {
        for (int64_t b = 0; b < d / KV_BLOCK; b++) {
            const DecodedBlock block(type, v + p * stride, b);
            for (int r = 0; r < n_rows; r++) {
                const float weight = weights[r * ATTENTION_CHUNK + p];
                for (int i = 0; i < KV_BLOCK; i++) {
                    sums[r * d + b * KV_BLOCK + i] += weight * block.values[i];
                }
            }
        }
    }
}

}  // namespace

const AttentionKernels ATTENTION = {decode, multiply, accumulate, weigh, scale};

}  // namespace tern::generic
