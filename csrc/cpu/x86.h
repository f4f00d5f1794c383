// What the kernels for AVX2 and those above it share: rows in a register of 256 bits, and many columns at a time.
#pragma once

#include "by_columns.h"

#include <immintrin.h>

#include <cstring>

namespace tern::TERN_ISA {

namespace {  // on purpose: one copy for each instruction set

inline int32_t four_bytes(const void * p) {
    int32_t four;
    std::memcpy(&four, p, sizeof(four));
    return four;
}

// Keeps a sum in its register and its additions in order. Without this GCC adds the products of several steps to each other
// first, or moves the loads of later activations up, until they no longer fit the registers.
template <class Register> inline void stay_in_order(Register & sum) {
    asm volatile("" : "+v"(sum));
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

// Decode waits for memory more than it computes, so lines of the tiles that follow are asked for so far ahead, and once more
// when they are nearly needed: what was asked for while memory had all it could take may have been dropped. Best spread
// evenly over the loads.
constexpr int PREFETCH_BYTES = 8192;
constexpr int PREFETCH_AGAIN_BYTES = 2048;

// These are always inlined, because GCC drops calls of a function that does nothing but prefetch.
__attribute__((always_inline)) inline void prefetch_line(const uint8_t * p, int64_t ahead) {
    _mm_prefetch(reinterpret_cast<const char *>(p + ahead), _MM_HINT_T0);
}

__attribute__((always_inline)) inline void prefetch(const uint8_t * p, int64_t n_bytes) {
    for (int64_t line = 0; line < n_bytes; line += 64) {
        prefetch_line(p + line, PREFETCH_BYTES);
    }
}

// One panel. Step: how the 32-bit lane of a row sums up a group, in the instructions of its set:
//   start(x, begin, c)   minus the sum of the activations
//   add(sum, u, q)       sum += codes u times the 4 activations q
//   finish(sum)          the int32
template <class Step, int GROUP, int COLS> struct PanelKernelOf {
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
                    sum[c] = Step::start(x, begin, c);
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
                            Step::add(sum[c], u, q);
                            q += 4;
                        }
                        load = _mm256_srli_epi16(load, 2);
                    }
                }
                const __m256 d_w = load_scales(scales);
                scales += TILE_ROWS * sizeof(uint16_t);
#pragma GCC unroll 16
                for (int c = 0; c < COLS; c++) {
                    y[c] = add_group(y[c], Step::finish(sum[c]), d_w, x.scale(begin, c));
                }
            }
            for (int c = 0; c < COLS; c++) {
                store_rows(outputs[c] + row, y[c], n_rows - row);
            }
        }
    }
};

}  // namespace

}  // namespace tern::TERN_ISA
