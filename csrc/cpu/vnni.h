// What the kernels for AVX-VNNI and for AVX-512 share: vpdpbusd on 256 bits, one column alone (decode), and what they take
// from AVX2.
//
// vpdpbusd adds four products of an unsigned code and a signed activation to a 32-bit lane: the whole inner step, and
// nothing can overflow. The lanes begin at minus the sum of a group.
#pragma once

#include "isas.h"
#include "x86.h"

namespace tern::TERN_ISA {

namespace {  // on purpose: one copy for each instruction set

// sum += u * (4 activations, the same for all rows)
inline void add_products(__m256i & sum, __m256i u, const uint8_t * q) {
    sum = _mm256_dpbusd_epi32(sum, u, _mm256_set1_epi32(four_bytes(q)));
    stay_in_order(sum);
}

// Those of AVX2.
inline void quantize_activation(const ColumnLayout & layout, const float * x, int64_t group_begin, int64_t group_end,
                                uint8_t * column) {
    avx2::KERNELS.quantize_activation(layout, x, group_begin, group_end, column);
}

inline void hadamard(float * x, const float * signs, int64_t block) {
    avx2::KERNELS.hadamard(x, signs, block);
}

inline void expand(const uint8_t * dense, int64_t n_in, uint8_t * tile) {
    avx2::KERNELS.expand(dense, n_in, tile);
}

// One column. Codes are taken two bit pairs from one shift: the upper pair stays 4 times its value, and its sums are divided
// at the end of the group, exactly. Four sums side by side, because vpdpbusd takes 4 or 5 cycles.
template <int GROUP>
void multiply_column(const uint8_t * tiles, int64_t n_rows, const ColumnLayout & layout, const uint8_t * column,
                     float * output) {
    const PanelView<GROUP, 1> x(layout, column);
    const __m256i low_pair = _mm256_set1_epi8(3);
    const __m256i high_pair = _mm256_set1_epi8(12);
    const size_t stride = tile_bytes(layout.n_in, GROUP);
    for (int64_t row = 0; row < n_rows; row += TILE_ROWS, tiles += stride) {
        const uint8_t * codes = tiles;
        const uint8_t * scales = tiles + tile_code_bytes(layout.n_in);
        __m256 y = _mm256_setzero_ps();
        for (int64_t begin = 0; begin < layout.n_in; begin += GROUP) {
            __m256i once[2] = {_mm256_set1_epi32(x.minus_sum(begin, 0)), _mm256_setzero_si256()};
            __m256i four_times[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            prefetch(codes, GROUP * 2);
            const uint8_t * q = x.q + begin;
#pragma GCC unroll 8
            for (int i = 0; i < GROUP; i += 16) {
                const __m256i load = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes + 2 * i));
                const __m256i upper = _mm256_srli_epi16(load, 4);
                add_products(once[0], _mm256_and_si256(load, low_pair), q + i);
                add_products(four_times[0], _mm256_and_si256(load, high_pair), q + i + 4);
                add_products(once[1], _mm256_and_si256(upper, low_pair), q + i + 8);
                add_products(four_times[1], _mm256_and_si256(upper, high_pair), q + i + 12);
            }
            codes += GROUP * 2;
            const __m256i four_times_sum = _mm256_add_epi32(four_times[0], four_times[1]);
            const __m256i sum =
                _mm256_add_epi32(_mm256_add_epi32(once[0], once[1]), _mm256_srai_epi32(four_times_sum, 2));
            y = add_group(y, sum, load_scales(scales), x.scale(begin, 0));
            scales += TILE_ROWS * sizeof(uint16_t);
        }
        prefetch(codes, tiles + stride - codes);
        store_rows(output + row, y, n_rows - row);
    }
}

}  // namespace

}  // namespace tern::TERN_ISA
