// Kernels for NEON with its dot products (this file alone is compiled with those instructions).
#define TERN_ISA neon

#include "isas.h"

#include "../format/float16.h"
#include "dense_tiles.h"
#include "neon.h"
#include "squared_relu.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tern::neon {

namespace {

void quantize_activation(const ColumnLayout & layout, const float * x, int64_t group_begin, int64_t group_end,
                         uint8_t * column) {
    float * scales = reinterpret_cast<float *>(column + layout.scales);
    int16_t * minus_sums = reinterpret_cast<int16_t *>(column + layout.sums);
    for (int64_t g = group_begin; g < group_end; g++) {
        const int64_t begin = g * ACTIVATION_GROUP;
        const int64_t end = std::min<int64_t>(begin + ACTIVATION_GROUP, layout.n_in);
        // Magnitudes as integers: the order is that of the floats, and NaN comes out on top instead of getting lost.
        uint32x4_t largest = vdupq_n_u32(0);
        for (int64_t i = begin; i < end; i += 4) {
            const uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(x + i));
            largest = vmaxq_u32(largest, vandq_u32(bits, vdupq_n_u32(0x7fffffff)));
        }
        const float d = bit_cast<float>(vmaxvq_u32(largest)) / 127.0f;
        scales[g] = d;
        // d = 0: all of the group is 0, or below what an fp32 scale can tell apart. d = Inf or NaN spoils the result, as it
        // should.
        const bool usable = d > 0 && std::isfinite(d);
        const float32x4_t divisor = vdupq_n_f32(usable ? d : 1.0f);
        const int32x4_t limit = vdupq_n_s32(usable ? 127 : 0);
        for (int64_t half = begin; half < end; half += ACTIVATION_SUM_GROUP) {
            int32x4_t sum = vdupq_n_s32(0);
            for (int64_t i = half; i < half + ACTIVATION_SUM_GROUP; i += 16) {
                int32x4_t v[4];
                for (int k = 0; k < 4; k++) {
                    v[k] = vcvtnq_s32_f32(vdivq_f32(vld1q_f32(x + i + 4 * k), divisor));
                    v[k] = vmaxq_s32(vminq_s32(v[k], limit), vnegq_s32(limit));
                    sum = vaddq_s32(sum, v[k]);
                }
                const int16x8_t low = vcombine_s16(vmovn_s32(v[0]), vmovn_s32(v[1]));
                const int16x8_t high = vcombine_s16(vmovn_s32(v[2]), vmovn_s32(v[3]));
                vst1q_s8(reinterpret_cast<int8_t *>(column + i), vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
            }
            minus_sums[half / ACTIVATION_SUM_GROUP] = static_cast<int16_t>(-vaddvq_s32(sum));
        }
    }
}

// v with the signs of the lanes turned where `upper` has its sign bit set.
inline float32x4_t turn_signs(float32x4_t v, uint32x4_t upper) {
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), upper));
}

// The butterflies of neighbours at distance 1 and 2, inside one register: each lane adds its partner to itself, the upper
// one of a pair with its own sign turned.
inline float32x4_t butterflies_inside(float32x4_t v) {
    constexpr uint32_t UPPER1[4] = {0, 0x80000000, 0, 0x80000000};
    constexpr uint32_t UPPER2[4] = {0, 0, 0x80000000, 0x80000000};
    v = vaddq_f32(vrev64q_f32(v), turn_signs(v, vld1q_u32(UPPER1)));
    return vaddq_f32(vextq_f32(v, v, 2), turn_signs(v, vld1q_u32(UPPER2)));
}

// Two stages at once, at the distances `half` and 2 * half, halve the loads and stores.
void two_stages(float * x, int64_t block, int64_t half) {
    for (int64_t begin = 0; begin < block; begin += 4 * half) {
        for (int64_t i = begin; i < begin + half; i += 4) {
            const float32x4_t a = vld1q_f32(x + i);
            const float32x4_t b = vld1q_f32(x + i + half);
            const float32x4_t c = vld1q_f32(x + i + 2 * half);
            const float32x4_t d = vld1q_f32(x + i + 3 * half);
            const float32x4_t ab = vaddq_f32(a, b);
            const float32x4_t cd = vaddq_f32(c, d);
            const float32x4_t a_b = vsubq_f32(a, b);
            const float32x4_t c_d = vsubq_f32(c, d);
            vst1q_f32(x + i, vaddq_f32(ab, cd));
            vst1q_f32(x + i + half, vaddq_f32(a_b, c_d));
            vst1q_f32(x + i + 2 * half, vsubq_f32(ab, cd));
            vst1q_f32(x + i + 3 * half, vsubq_f32(a_b, c_d));
        }
    }
}

void hadamard(float * x, const float * signs, int64_t block) {
    if (block < 4) {
        generic::KERNELS.hadamard(x, signs, block);
        return;
    }
    const float32x4_t norm = vdupq_n_f32(1.0f / std::sqrt(static_cast<float>(block)));
    for (int64_t i = 0; i < block; i += 4) {
        const float32x4_t factor = signs != nullptr ? vmulq_f32(vld1q_f32(signs + i), norm) : norm;
        vst1q_f32(x + i, butterflies_inside(vmulq_f32(vld1q_f32(x + i), factor)));
    }
    int64_t half = 4;
    for (; 2 * half < block; half *= 4) {
        two_stages(x, block, half);
    }
    if (half < block) {
        for (int64_t i = 0; i < half; i += 4) {
            const float32x4_t a = vld1q_f32(x + i);
            const float32x4_t b = vld1q_f32(x + i + half);
            vst1q_f32(x + i, vaddq_f32(a, b));
            vst1q_f32(x + i + half, vsubq_f32(a, b));
        }
    }
}

// PanelKernel of the bit pairs PAIR of 8 rows with COLS columns; q: the activations of 16 inputs.
template <int COLS, int PAIR, size_t... C>
inline void add_columns(int32x4_t (&sums)[COLS][2], uint8x16_t codes0, uint8x16_t codes1, const int8_t * q,
                        std::index_sequence<C...>) {
    const int8x16_t u0 = bit_pair<PAIR>(codes0);
    const int8x16_t u1 = bit_pair<PAIR>(codes1);
    // Column C is the 32-bit word PAIR * COLS + C of the activations.
    ((add_products<(PAIR * COLS + C) % 4>(sums[C][0], u0, vld1q_s8(q + (PAIR * COLS + C) / 4 * 16)),
      add_products<(PAIR * COLS + C) % 4>(sums[C][1], u1, vld1q_s8(q + (PAIR * COLS + C) / 4 * 16))),
     ...);
}

template <int GROUP, int COLS> struct PanelKernel {
    static void multiply(const uint8_t * tiles, int64_t n_rows, const ColumnLayout & layout, const uint8_t * panel,
                         float * const * outputs) {
        const PanelView<GROUP, COLS> x(layout, panel);
        const auto columns = std::make_index_sequence<COLS>();
        const size_t stride = tile_bytes(layout.n_in, GROUP);
        for (int64_t row = 0; row < n_rows; row += TILE_ROWS, tiles += stride) {
            const uint8_t * codes = tiles;
            const uint8_t * scales = tiles + tile_code_bytes(layout.n_in);
            const int8_t * q = as_int8(x.q);
            RowFloats y[COLS];
            for (int c = 0; c < COLS; c++) {
                y[c] = {{vdupq_n_f32(0), vdupq_n_f32(0)}};
            }
            for (int64_t begin = 0; begin < layout.n_in; begin += GROUP) {
                int32x4_t sums[COLS][2];
#pragma GCC unroll 16
                for (int c = 0; c < COLS; c++) {
                    sums[c][0] = sums[c][1] = vdupq_n_s32(x.minus_sum(begin, c));
                }
                for (int i = 0; i < GROUP; i += 16) {
                    const uint8x16_t codes0 = vld1q_u8(codes);
                    const uint8x16_t codes1 = vld1q_u8(codes + 16);
                    add_columns<COLS, 0>(sums, codes0, codes1, q, columns);
                    add_columns<COLS, 1>(sums, codes0, codes1, q, columns);
                    add_columns<COLS, 2>(sums, codes0, codes1, q, columns);
                    add_columns<COLS, 3>(sums, codes0, codes1, q, columns);
                    codes += 32;
                    q += 16 * COLS;
                }
                const RowFloats d_w = load_scales(scales);
                scales += TILE_ROWS * sizeof(uint16_t);
#pragma GCC unroll 16
                for (int c = 0; c < COLS; c++) {
                    for (int h = 0; h < 2; h++) {
                        y[c].half[h] = add_group(y[c].half[h], sums[c][h], d_w.half[h], x.scale(begin, c));
                    }
                }
            }
            for (int c = 0; c < COLS; c++) {
                store_rows(outputs[c] + row, y[c], n_rows - row);
            }
        }
    }
};

// 24 sums, two registers of codes, two of their bit pairs, the activations and the mask fit the 32 registers.
constexpr int MAX_COLUMNS = 12;

}  // namespace

const Kernels KERNELS = {
    quantize_activation,   hadamard,    multiply_any<PanelKernel, MAX_COLUMNS>, MAX_COLUMNS,
    squared_relu_for_silu, expand_tile,
};

const Isa ISA = {"neon", KERNELS, ATTENTION, MULTIPLY_ADDS};

}  // namespace tern::neon
