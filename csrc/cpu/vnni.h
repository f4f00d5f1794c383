// What the kernels for AVX-VNNI and for AVX-512 share: vpdpbusd on 256 bits, and one column alone (decode).
//
// vpdpbusd adds four products of an unsigned code and a signed activation to a 32-bit lane: the whole inner step, and
// nothing can overflow. The lanes begin at minus the sum of a group.
#pragma once

#include "by_columns.h"

#include <immintrin.h>

#include <cstring>

namespace tern {

namespace {  // on purpose: one copy for each instruction set

inline int32_t four_bytes(const uint8_t * p) {
    int32_t four;
    std::memcpy(&four, p, sizeof(four));
    return four;
}

// Keeps GCC from moving the loads of later activations up, until the sums no longer fit the registers.
template <class Register> inline void stay_in_order(Register & sum) {
    asm volatile("" : "+v"(sum));
}

// sum += u * (4 activations, the same for all rows)
inline void add_products(__m256i & sum, __m256i u, const uint8_t * q) {
    sum = _mm256_dpbusd_epi32(sum, u, _mm256_set1_epi32(four_bytes(q)));
    stay_in_order(sum);
}

inline __m256 load_scales(const uint8_t * scales) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(scales)));
}

// y + d_w * d_x * sum
inline __m256 add_group(__m256 y, __m256i sum, __m256 d_w, float d_x) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(d_w, _mm256_set1_ps(d_x)), y);
}

inline void store_rows(float * output, __m256 y, int64_t n_rows) {
    if (n_rows >= TILE_ROWS) {
        _mm256_storeu_ps(output, y);
    } else {
        const __m256i row = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_maskstore_ps(output, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n_rows)), row), y);
    }
}

// Asks for n_bytes of memory PREFETCH_BYTES ahead of `p`, which soon lie in the tiles that follow: decode waits for memory
// more than it computes. Always inlined, because GCC drops calls of a function that does nothing but prefetch.
constexpr int PREFETCH_BYTES = 8192;

__attribute__((always_inline)) inline void prefetch(const uint8_t * p, int64_t n_bytes) {
    for (int64_t line = 0; line < n_bytes; line += 64) {
        _mm_prefetch(reinterpret_cast<const char *>(p + PREFETCH_BYTES + line), _MM_HINT_T0);
    }
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

}  // namespace tern
