// What the kernels for NEON share: rows in two registers of four, and one column alone (decode).
//
// The inner step is sdot by lane: four products of codes and activations, both of 8 bits, added to a 32-bit lane. 16 codes of
// a tile are those of 4 rows; 16 bytes of a panel are the activations of 4 columns, each the four that one lane of codes
// meets. Nothing can overflow. The lanes begin at minus the sum of a group.
#pragma once

#include "by_columns.h"

#include <arm_neon.h>

#include <cstring>

namespace tern::TERN_ISA {

namespace {  // on purpose: one copy for each instruction set

// A value for each of the 8 rows of a tile.
struct RowFloats {
    float32x4_t half[2];
};

inline RowFloats load_scales(const uint8_t * scales) {
    uint16_t d[TILE_ROWS];
    std::memcpy(d, scales, sizeof(d));
    return {{vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(d))), vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(d + 4)))}};
}

// y + d_w * d_x * sum
inline float32x4_t add_group(float32x4_t y, int32x4_t sum, float32x4_t d_w, float d_x) {
    return vfmaq_f32(y, vcvtq_f32_s32(sum), vmulq_n_f32(d_w, d_x));
}

inline void store_rows(float * output, const RowFloats & y, int64_t n_rows) {
    if (n_rows >= TILE_ROWS) {
        vst1q_f32(output, y.half[0]);
        vst1q_f32(output + 4, y.half[1]);
    } else {
        float rows[TILE_ROWS];
        vst1q_f32(rows, y.half[0]);
        vst1q_f32(rows + 4, y.half[1]);
        std::memcpy(output, rows, n_rows * sizeof(float));
    }
}

inline const int8_t * as_int8(const uint8_t * p) {
    return reinterpret_cast<const int8_t *>(p);
}

template <int PAIR> inline int8x16_t bit_pair(uint8x16_t codes) {
    if constexpr (PAIR == 0) {
        return vreinterpretq_s8_u8(vandq_u8(codes, vdupq_n_u8(3)));
    } else if constexpr (PAIR == 3) {
        return vreinterpretq_s8_u8(vshrq_n_u8(codes, 6));
    } else {
        return vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(codes, 2 * PAIR), vdupq_n_u8(3)));
    }
}

// Keeps GCC from moving the loads of later activations up, until the sums no longer fit the registers.
inline void stay_in_order(int32x4_t & sum) {
    asm volatile("" : "+w"(sum));
}

// sum += u * (the 4 activations in a lane of q, the same for all rows)
template <int LANE> inline void add_products(int32x4_t & sum, int8x16_t u, int8x16_t q) {
    sum = vdotq_laneq_s32(sum, u, q, LANE);
    stay_in_order(sum);
}

// One column. The two bit pairs in the middle of a byte stay 4 and 16 times their value, which saves their shifts, and their
// sums are divided at the end of the group, exactly.
template <int GROUP>
void multiply_column(const uint8_t * tiles, int64_t n_rows, const ColumnLayout & layout, const uint8_t * column,
                     float * output) {
    const PanelView<GROUP, 1> x(layout, column);
    const size_t stride = tile_bytes(layout.n_in, GROUP);
    for (int64_t row = 0; row < n_rows; row += TILE_ROWS, tiles += stride) {
        const uint8_t * codes = tiles;
        const uint8_t * scales = tiles + tile_code_bytes(layout.n_in);
        RowFloats y = {{vdupq_n_f32(0), vdupq_n_f32(0)}};
        for (int64_t begin = 0; begin < layout.n_in; begin += GROUP) {
            const int32x4_t start = vdupq_n_s32(x.minus_sum(begin, 0));
            int32x4_t once[2] = {start, start};
            int32x4_t four_times[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
            int32x4_t sixteen_times[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
#pragma GCC unroll 8
            for (int i = 0; i < GROUP; i += 16) {
                const int8x16_t q = vld1q_s8(as_int8(x.q + begin + i));
                for (int h = 0; h < 2; h++) {
                    const uint8x16_t load = vld1q_u8(codes);
                    codes += 16;
                    const int8x16_t pair1 = vreinterpretq_s8_u8(vandq_u8(load, vdupq_n_u8(3 << 2)));
                    const int8x16_t pair2 = vreinterpretq_s8_u8(vandq_u8(load, vdupq_n_u8(3 << 4)));
                    add_products<0>(once[h], bit_pair<0>(load), q);
                    add_products<1>(four_times[h], pair1, q);
                    add_products<2>(sixteen_times[h], pair2, q);
                    add_products<3>(once[h], bit_pair<3>(load), q);
                }
            }
            const RowFloats d_w = load_scales(scales);
            scales += TILE_ROWS * sizeof(uint16_t);
            for (int h = 0; h < 2; h++) {
                const int32x4_t sum =
                    vaddq_s32(vaddq_s32(once[h], vshrq_n_s32(four_times[h], 2)), vshrq_n_s32(sixteen_times[h], 4));
                y.half[h] = add_group(y.half[h], sum, d_w.half[h], x.scale(begin, 0));
            }
        }
        store_rows(output + row, y, n_rows - row);
    }
}

}  // namespace

}  // namespace tern::TERN_ISA
