// Kernels for NEON with its matrix products of 8-bit integers (this file alone is compiled with those instructions).
// Quantization and Hadamard transform are those of NEON, and so is one column alone.
//
// smmla multiplies 2 rows by 2 columns over 8 inputs, twice what sdot does. It wants the 8 inputs of a row, and of a
// column, side by side: so panels lie in parts of 8 inputs, and two bit pairs of a register of codes, 4 inputs of 4 rows
// each, are zipped into two registers of 2 rows.
#define TERN_ISA i8mm

#include "isas.h"

#include "dense_tiles.h"
#include "neon.h"
#include "squared_relu.h"

#include <utility>

namespace tern::i8mm {

namespace {

constexpr int PANEL_INPUTS = 8;
constexpr int ROW_PAIRS = TILE_ROWS / 2;

// 8 inputs of two rows, from registers with 4 of four rows.
inline int8x16_t first_rows(int8x16_t u, int8x16_t next) {
    return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(u), vreinterpretq_s32_s8(next)));
}
inline int8x16_t last_rows(int8x16_t u, int8x16_t next) {
    return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(u), vreinterpretq_s32_s8(next)));
}

// PanelKernel of the bit pairs PAIR and PAIR + 1 of 8 rows with pairs of columns; q: the activations of these 8 inputs. A sum
// has row 0 times column 0, row 0 times column 1, row 1 times column 0, row 1 times column 1.
template <int PAIR, size_t PAIRS>
inline void add_columns(int32x4_t (&sums)[PAIRS][ROW_PAIRS], uint8x16_t codes0, uint8x16_t codes1, const int8_t * q) {
    const int8x16_t u0 = bit_pair<PAIR>(codes0);
    const int8x16_t u1 = bit_pair<PAIR>(codes1);
    const int8x16_t next0 = bit_pair<PAIR + 1>(codes0);
    const int8x16_t next1 = bit_pair<PAIR + 1>(codes1);
    const int8x16_t rows[ROW_PAIRS] = {first_rows(u0, next0), last_rows(u0, next0), first_rows(u1, next1),
                                       last_rows(u1, next1)};
#pragma GCC unroll 8
    for (size_t p = 0; p < PAIRS; p++) {
        const int8x16_t columns = vld1q_s8(q + p * 16);
#pragma GCC unroll 4
        for (int r = 0; r < ROW_PAIRS; r++) {
            sums[p][r] = vmmlaq_s32(sums[p][r], rows[r], columns);
            stay_in_order(sums[p][r]);
        }
    }
}

template <int GROUP, int COLS> struct PanelKernel {
    // The last column of an odd number has company from what lies behind it in the panel; those sums go nowhere.
    static constexpr int PAIRS = (COLS + 1) / 2;

    static void multiply(const uint8_t * tiles, int64_t n_rows, const ColumnLayout & layout, const uint8_t * panel,
                         float * const * outputs) {
        const PanelView<GROUP, COLS> x(layout, panel);
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
                int32x4_t sums[PAIRS][ROW_PAIRS];
#pragma GCC unroll 8
                for (int p = 0; p < PAIRS; p++) {
                    const int32_t second = 2 * p + 1 < COLS ? x.minus_sum(begin, 2 * p + 1) : 0;
                    const int32x4_t start = vzip1q_s32(vdupq_n_s32(x.minus_sum(begin, 2 * p)), vdupq_n_s32(second));
                    for (int r = 0; r < ROW_PAIRS; r++) {
                        sums[p][r] = start;
                    }
                }
                for (int i = 0; i < GROUP; i += 16) {
                    const uint8x16_t codes0 = vld1q_u8(codes);
                    const uint8x16_t codes1 = vld1q_u8(codes + 16);
                    add_columns<0>(sums, codes0, codes1, q);
                    add_columns<2>(sums, codes0, codes1, q + PANEL_INPUTS * COLS);
                    codes += 32;
                    q += 2 * PANEL_INPUTS * COLS;
                }
                const RowFloats d_w = load_scales(scales);
                scales += TILE_ROWS * sizeof(uint16_t);
#pragma GCC unroll 16
                for (int c = 0; c < COLS; c++) {
                    for (int h = 0; h < 2; h++) {
                        const int32x4_t upper = sums[c / 2][2 * h];
                        const int32x4_t lower = sums[c / 2][2 * h + 1];
                        const int32x4_t sum = c % 2 == 0 ? vuzp1q_s32(upper, lower) : vuzp2q_s32(upper, lower);
                        y[c].half[h] = add_group(y[c].half[h], sum, d_w.half[h], x.scale(begin, c));
                    }
                }
            }
            for (int c = 0; c < COLS; c++) {
                store_rows(outputs[c] + row, y[c], n_rows - row);
            }
        }
    }
};

void quantize_activation(const ColumnLayout & layout, const float * x, int64_t group_begin, int64_t group_end,
                         uint8_t * column) {
    neon::KERNELS.quantize_activation(layout, x, group_begin, group_end, column);
}

void hadamard(float * x, const float * signs, int64_t block) {
    neon::KERNELS.hadamard(x, signs, block);
}

// 24 sums of 2 columns times 2 rows, two registers of codes, four of rows, the activations and the mask fill the 32 registers.
constexpr int MAX_COLUMNS = 12;

}  // namespace

const Kernels KERNELS = {
    quantize_activation, hadamard,     multiply_any<PanelKernel, MAX_COLUMNS>, MAX_COLUMNS, squared_relu_for_silu,
    expand_tile,         PANEL_INPUTS,
};

const Isa ISA = {"i8mm", KERNELS, neon::ATTENTION, MULTIPLY_ADDS};

}  // namespace tern::i8mm
