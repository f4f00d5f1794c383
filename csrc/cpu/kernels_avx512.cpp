// Kernels for AVX-512 with VNNI (this file alone is compiled with those instructions). Quantization and Hadamard transform
// are those of AVX2.
//
// Many columns meet two neighbouring tiles at a time, 16 rows in a register of 512 bits: the first tile in its lower half,
// the second in its upper. One column alone meets one tile at a time in registers of 256 bits. Fed with two tiles or with two loads of one, wide
// registers would save decode nothing: they halve the ports that and, shift and vpdpbusd can go to, and memory is the
// bound.
#define TERN_ISA avx512

#include "isas.h"

#include "squared_relu.h"
#include "vnni.h"

#include <algorithm>

namespace tern::avx512 {

namespace {

constexpr int TILES_AT_ONCE = 2;
constexpr int PAIR_ROWS = TILES_AT_ONCE * TILE_ROWS;

// The same place in both tiles of a pair.
inline __m512i load_codes(const uint8_t * first, const uint8_t * second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(first))),
                              _mm256_loadu_si256(reinterpret_cast<const __m256i *>(second)), 1);
}

inline void add_products(__m512i & sum, __m512i u, const uint8_t * q) {
    sum = _mm512_dpbusd_epi32(sum, u, _mm512_set1_epi32(four_bytes(q)));
    stay_in_order(sum);
}

inline __m512 load_scales(const uint8_t * first, const uint8_t * second) {
    return _mm512_cvtph_ps(
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(first))),
                                _mm_loadu_si128(reinterpret_cast<const __m128i *>(second)), 1));
}

template <int GROUP, int COLS> struct PanelKernel {
    static void multiply(const uint8_t * tiles, int64_t n_rows, const ColumnLayout & layout, const uint8_t * panel,
                         float * const * outputs) {
        const PanelView<GROUP, COLS> x(layout, panel);
        const __m512i two_bits = _mm512_set1_epi8(3);
        const size_t stride = tile_bytes(layout.n_in, GROUP);
        for (int64_t row = 0; row < n_rows; row += PAIR_ROWS, tiles += 2 * stride) {
            // The last tile of an odd number stands in for its neighbour, whose rows are not stored.
            const size_t second = n_rows - row > TILE_ROWS ? stride : 0;
            const uint8_t * codes = tiles;
            const uint8_t * scales = tiles + tile_code_bytes(layout.n_in);
            const uint8_t * q = x.q;
            __m512 y[COLS];
            for (int c = 0; c < COLS; c++) {
                y[c] = _mm512_setzero_ps();
            }
            for (int64_t begin = 0; begin < layout.n_in; begin += GROUP) {
                __m512i sum[COLS];
#pragma GCC unroll 32
                for (int c = 0; c < COLS; c++) {
                    sum[c] = _mm512_set1_epi32(x.minus_sum(begin, c));
                }
                prefetch(codes, GROUP * 2);
                prefetch(codes + second, GROUP * 2);
                for (int i = 0; i < GROUP; i += 16) {
                    __m512i load = load_codes(codes, codes + second);
                    codes += 32;
#pragma GCC unroll 4
                    for (int k = 0; k < 4; k++) {
                        const __m512i u = _mm512_and_si512(load, two_bits);
#pragma GCC unroll 32
                        for (int c = 0; c < COLS; c++) {
                            add_products(sum[c], u, q);
                            q += 4;
                        }
                        load = _mm512_srli_epi16(load, 2);
                    }
                }
                const __m512 d_w = load_scales(scales, scales + second);
                scales += TILE_ROWS * sizeof(uint16_t);
#pragma GCC unroll 32
                for (int c = 0; c < COLS; c++) {
                    const __m512 d = _mm512_mul_ps(d_w, _mm512_set1_ps(x.scale(begin, c)));
                    y[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[c]), d, y[c]);
                }
            }
            const auto n = static_cast<int>(std::min<int64_t>(n_rows - row, PAIR_ROWS));
            for (int c = 0; c < COLS; c++) {
                _mm512_mask_storeu_ps(outputs[c] + row, static_cast<__mmask16>((1u << n) - 1), y[c]);
            }
        }
    }
};

// 24 sums, two registers of codes, their bit pairs, the mask and the activations fit the 32 registers.
constexpr int MAX_COLUMNS = 24;
constexpr int PANEL_INPUTS = 4;

}  // namespace

const Kernels KERNELS = {
    quantize_activation,
    hadamard,
    multiply_any<PanelKernel, MAX_COLUMNS>,
    MAX_COLUMNS,
    squared_relu_for_silu,
    expand,
    PANEL_INPUTS,
    TILES_AT_ONCE,
};

const Isa ISA = {"avx512", KERNELS, ATTENTION, MULTIPLY_ADDS};

}  // namespace tern::avx512
