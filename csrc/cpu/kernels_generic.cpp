// Kernels in plain C++: the readable version of what the others do, and what runs where no other fits.
#define TERN_ISA generic

#include "isas.h"

#include "../format/float16.h"
#include "dense_tiles.h"
#include "squared_relu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tern::generic {

namespace {

void quantize_activation(const ColumnLayout & layout, const float * x, int64_t group_begin, int64_t group_end,
                         uint8_t * column) {
    int8_t * q = reinterpret_cast<int8_t *>(column);
    float * scales = reinterpret_cast<float *>(column + layout.scales);
    int16_t * minus_sums = reinterpret_cast<int16_t *>(column + layout.sums);
    for (int64_t g = group_begin; g < group_end; g++) {
        const int64_t begin = g * ACTIVATION_GROUP;
        const int64_t end = std::min<int64_t>(begin + ACTIVATION_GROUP, layout.n_in);
        // Magnitudes as integers: the order is that of the floats, and NaN comes out on top instead of getting lost.
        uint32_t largest = 0;
        for (int64_t i = begin; i < end; i++) {
            largest = std::max(largest, bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
        }
        const float d = bit_cast<float>(largest) / 127.0f;
        scales[g] = d;
        // d = 0: all of the group is 0, or below what an fp32 scale can tell apart. d = Inf or NaN spoils the result, as it
        // should.
        const bool usable = d > 0 && std::isfinite(d);
        for (int64_t half = begin; half < end; half += ACTIVATION_SUM_GROUP) {
            int32_t sum = 0;
            for (int64_t i = half; i < half + ACTIVATION_SUM_GROUP; i++) {
                q[i] = usable ? static_cast<int8_t>(std::clamp(std::nearbyint(x[i] / d), -127.0f, 127.0f)) : int8_t{0};
                sum += q[i];
            }
            minus_sums[half / ACTIVATION_SUM_GROUP] = static_cast<int16_t>(-sum);
        }
    }
}

void hadamard(float * x, const float * signs, int64_t block) {
    const float norm = 1.0f / std::sqrt(static_cast<float>(block));
    for (int64_t i = 0; i < block; i++) {
        x[i] *= signs != nullptr ? signs[i] * norm : norm;
    }
    for (int64_t half = 1; half < block; half *= 2) {
        for (int64_t pair = 0; pair < block; pair += 2 * half) {
            for (int64_t i = pair; i < pair + half; i++) {
                const float a = x[i];
                const float b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
        }
    }
}

void multiply(const uint8_t * tiles, int64_t n_rows, int group, const ColumnLayout & layout, const uint8_t * panel,
              int n_cols, float * const * outputs) {
    const int8_t * q = reinterpret_cast<const int8_t *>(panel);
    const float * d_x = reinterpret_cast<const float *>(panel + layout.scales * n_cols);
    const int16_t * minus_sums = reinterpret_cast<const int16_t *>(panel + layout.sums * n_cols);
    for (int64_t r = 0; r < n_rows; r++) {
        const uint8_t * tile = tiles + r / TILE_ROWS * tile_bytes(layout.n_in, group);
        const uint8_t * codes = tile + r % TILE_ROWS * 4;
        const uint8_t * scales = tile + tile_code_bytes(layout.n_in) + r % TILE_ROWS * 2;
        for (int c = 0; c < n_cols; c++) {
            float y = 0;
            for (int64_t begin = 0; begin < layout.n_in; begin += group) {
                int32_t sum = 0;
                for (int64_t half = begin / ACTIVATION_SUM_GROUP; half < (begin + group) / ACTIVATION_SUM_GROUP;
                     half++) {
                    sum += minus_sums[(half / 2 * n_cols + c) * 2 + half % 2];
                }
                for (int64_t i = begin; i < begin + group; i++) {
                    const int code = codes[i / 16 * 32 + i % 4] >> 2 * (i / 4 % 4) & 3;
                    sum += code * q[(i / 4 * n_cols + c) * 4 + i % 4];
                }
                uint16_t d_w;
                std::memcpy(&d_w, scales + begin / group * TILE_ROWS * 2, sizeof(d_w));
                const float d = fp32_from_fp16(d_w) * d_x[begin / ACTIVATION_GROUP * n_cols + c];
                y += static_cast<float>(sum) * d;
            }
            outputs[c][r] = y;
        }
    }
}

}  // namespace

const Kernels KERNELS = {quantize_activation, hadamard, multiply, 6, squared_relu_for_silu, expand_tile};

const Isa ISA = {"generic", KERNELS, ATTENTION, MULTIPLY_ADDS};

}  // namespace tern::generic
