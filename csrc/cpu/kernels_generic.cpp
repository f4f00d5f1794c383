// Kernels in plain C++: the readable version of what the others do, and what runs where no other fits.
#include "kernel_tables.h"

#include "../format/float16.h"
#include "squared_relu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tern {

namespace {

void quantize(const ColumnLayout & layout, const float * x, int64_t group_begin, int64_t group_end, uint8_t * column) {
    int8_t * q = reinterpret_cast<int8_t *>(column);
    float * scales = reinterpret_cast<float *>(column + layout.scales);
    int32_t * sums = reinterpret_cast<int32_t *>(column + layout.sums);
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
            sums[half / ACTIVATION_SUM_GROUP] = sum;
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

void tile_times_columns(const uint8_t * tile, int group, const ColumnLayout & layout, const uint8_t * const * columns,
                        int n_cols, float (*outputs)[TILE_ROWS]) {
    const uint8_t * scales = tile + tile_code_bytes(layout.n_in);
    for (int c = 0; c < n_cols; c++) {
        const int8_t * q = reinterpret_cast<const int8_t *>(columns[c]);
        const float * d_x = reinterpret_cast<const float *>(columns[c] + layout.scales);
        const int32_t * sums = reinterpret_cast<const int32_t *>(columns[c] + layout.sums);
        float y[TILE_ROWS] = {};
        for (int64_t begin = 0; begin < layout.n_in; begin += group) {
            int32_t products[TILE_ROWS] = {};
            for (int64_t i = begin; i < begin + group; i += 16) {
                const uint8_t * load = tile + i * 2;
                for (int row = 0; row < TILE_ROWS; row++) {
                    for (int k = 0; k < 16; k++) {
                        products[row] += (load[row * 4 + k % 4] >> 2 * (k / 4) & 3) * q[i + k];
                    }
                }
            }
            int32_t sum = 0;
            for (int64_t half = begin; half < begin + group; half += ACTIVATION_SUM_GROUP) {
                sum += sums[half / ACTIVATION_SUM_GROUP];
            }
            for (int row = 0; row < TILE_ROWS; row++) {
                uint16_t d_w;
                std::memcpy(&d_w, scales + (begin / group * TILE_ROWS + row) * 2, sizeof(d_w));
                const float d = fp32_from_fp16(d_w) * d_x[begin / ACTIVATION_GROUP];
                y[row] += static_cast<float>(products[row] - sum) * d;
            }
        }
        std::memcpy(outputs[c], y, sizeof(y));
    }
}

}  // namespace

const Kernels KERNELS_GENERIC = {"generic", quantize, hadamard, tile_times_columns, squared_relu_for_silu};

}  // namespace tern
