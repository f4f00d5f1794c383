// Kernels for AVX-VNNI: AVX2 and vpdpbusd (this file alone is compiled with those instructions). Quantization and Hadamard
// transform are those of AVX2.
#include "kernel_tables.h"

#include "squared_relu.h"
#include "vnni.h"

namespace tern {

namespace {

template <int GROUP, int COLS> struct Products {
    static void multiply(const uint8_t * tiles, int64_t n_rows, const ColumnLayout & layout, const uint8_t * panel,
                         float * const * outputs) {
        const PanelView<GROUP, COLS> x(layout, panel);
        const __m256i two_bits = _mm256_set1_epi8(3);
        const size_t stride = tile_bytes(layout.n_in, GROUP);
        for (int64_t row = 0; row < n_rows; row += TILE_ROWS, tiles += stride) {
            const uint8_t * codes = tiles;
            const uint8_t * scales = tiles + tile_code_bytes(layout.n_in);
            const uint8_t * q = x.q;
            __m256 y[COLS];
            for (int c = 0; c < COLS; c++) {
                y[c] = _mm256_setzero_ps();
            }
            for (int64_t begin = 0; begin < layout.n_in; begin += GROUP) {
                __m256i sum[COLS];
#pragma GCC unroll 16
                for (int c = 0; c < COLS; c++) {
                    sum[c] = _mm256_set1_epi32(x.minus_sum(begin, c));
                }
                prefetch(codes, GROUP * 2);
                for (int i = 0; i < GROUP; i += 16) {
                    __m256i load = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes));
                    codes += 32;
#pragma GCC unroll 4
                    for (int k = 0; k < 4; k++) {
                        const __m256i u = _mm256_and_si256(load, two_bits);
#pragma GCC unroll 16
                        for (int c = 0; c < COLS; c++) {
                            add_products(sum[c], u, q);
                            q += 4;
                        }
                        load = _mm256_srli_epi16(load, 2);
                    }
                }
                const __m256 d_w = load_scales(scales);
                scales += TILE_ROWS * sizeof(uint16_t);
#pragma GCC unroll 16
                for (int c = 0; c < COLS; c++) {
                    y[c] = add_group(y[c], sum[c], d_w, x.scale(begin, c));
                }
            }
            for (int c = 0; c < COLS; c++) {
                store_rows(outputs[c] + row, y[c], n_rows - row);
            }
        }
    }
};

template <int GROUP> struct Products<GROUP, 1> {
    static void multiply(const uint8_t * tiles, int64_t n_rows, const ColumnLayout & layout, const uint8_t * panel,
                         float * const * outputs) {
        multiply_column<GROUP>(tiles, n_rows, layout, panel, outputs[0]);
    }
};

void quantize(const ColumnLayout & layout, const float * x, int64_t group_begin, int64_t group_end, uint8_t * column) {
    KERNELS_AVX2.quantize(layout, x, group_begin, group_end, column);
}

void hadamard(float * x, const float * signs, int64_t block) {
    KERNELS_AVX2.hadamard(x, signs, block);
}

// 12 sums, a register of codes, its bit pairs, the mask and the activations fill the 16 registers.
constexpr int MAX_COLUMNS = 12;

}  // namespace

const Kernels KERNELS_AVXVNNI = {
    "avxvnni", quantize, hadamard, multiply_any<Products, MAX_COLUMNS>, MAX_COLUMNS, squared_relu_for_silu,
};

}  // namespace tern
