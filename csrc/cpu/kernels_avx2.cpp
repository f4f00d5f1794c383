// Kernels for AVX2 with FMA and F16C (this file alone is compiled with those instructions).
//
// The inner step is vpmaddubsw: 32 products of an unsigned code and a signed activation, added in pairs to 16 bits. The
// 16-bit lanes take a whole group of 128 inputs before they are widened. In the worst case a lane adds 64 products of
// 3 * 127 (code 3; 2 * 127 for ternary codes) = 24384 < 32768, so nothing saturates: activations are within +-127.
#include "kernel_tables.h"

#include "../format/float16.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace tern {

namespace {

inline int32_t sum_lanes(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, _MM_SHUFFLE(1, 0, 3, 2)));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtsi128_si32(s);
}

inline int32_t max_lane(__m256i v) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtsi128_si32(m);
}

void quantize(const ColumnLayout & layout, const float * x, int64_t group_begin, int64_t group_end, uint8_t * column) {
    float * scales = reinterpret_cast<float *>(column + layout.scales);
    int32_t * sums = reinterpret_cast<int32_t *>(column + layout.sums);
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    // vpackssdw and vpacksswb work in 128-bit halves; this puts the 32 bytes back in order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t g = group_begin; g < group_end; g++) {
        const int64_t begin = g * ACTIVATION_GROUP;
        const int64_t end = std::min<int64_t>(begin + ACTIVATION_GROUP, layout.n_in);
        // Magnitudes as integers: the order is that of the floats, and NaN comes out on top instead of getting lost.
        __m256i largest = _mm256_setzero_si256();
        for (int64_t i = begin; i < end; i += 8) {
            const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + i));
            largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, magnitude));
        }
        const float d = bit_cast<float>(max_lane(largest)) / 127.0f;
        scales[g] = d;
        // d = 0: all of the group is 0, or below what an fp32 scale can tell apart. d = NaN spoils the result, as it should.
        const __m256 divisor = _mm256_set1_ps(d > 0 ? d : 1.0f);
        const __m256i keep = _mm256_set1_epi32(d > 0 ? -1 : 0);
        for (int64_t half = begin; half < end; half += ACTIVATION_SUM_GROUP) {
            __m256i sum = _mm256_setzero_si256();
            for (int64_t i = half; i < half + ACTIVATION_SUM_GROUP; i += 32) {
                __m256i v[4];
                for (int k = 0; k < 4; k++) {
                    v[k] = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(x + i + 8 * k), divisor));
                    v[k] = _mm256_and_si256(v[k], keep);
                    sum = _mm256_add_epi32(sum, v[k]);
                }
                const __m256i packed =
                    _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(column + i),
                                    _mm256_permutevar8x32_epi32(packed, order));
            }
            sums[half / ACTIVATION_SUM_GROUP] = sum_lanes(sum);
        }
    }
}

inline __m256i broadcast4(const uint8_t * q) {
    int32_t four;
    std::memcpy(&four, q, sizeof(four));
    return _mm256_set1_epi32(four);
}

// Asks for the memory PREFETCH_BYTES ahead of the group at `codes`, into the next tile at the end of this one. The
// processor's own prefetcher stops at every 4 KiB page, which costs decode more than the arithmetic does.
constexpr int PREFETCH_BYTES = 8192;

template <int GROUP> inline void prefetch_group(const uint8_t * codes) {
    for (int line = 0; line < GROUP * 2; line += 64) {
        _mm_prefetch(reinterpret_cast<const char *>(codes + PREFETCH_BYTES + line), _MM_HINT_T0);
    }
}

template <int GROUP, int COLS>
void tile_kernel(const uint8_t * tile, const ColumnLayout & layout, const uint8_t * const * columns,
                 float (*outputs)[TILE_ROWS]) {
    const __m256i two_bits = _mm256_set1_epi8(3);
    const __m256i ones = _mm256_set1_epi16(1);
    const uint8_t * codes = tile;
    const uint8_t * scales = tile + tile_code_bytes(layout.n_in);
    __m256 y[COLS];
    for (int c = 0; c < COLS; c++) {
        y[c] = _mm256_setzero_ps();
    }
    for (int64_t begin = 0; begin < layout.n_in; begin += GROUP) {
        __m256i acc[COLS];
        for (int c = 0; c < COLS; c++) {
            acc[c] = _mm256_setzero_si256();
        }
        prefetch_group<GROUP>(codes);
        for (int64_t i = begin; i < begin + GROUP; i += 16) {
            const __m256i load = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes));
            codes += 32;
            const __m256i u[4] = {
                _mm256_and_si256(load, two_bits),
                _mm256_and_si256(_mm256_srli_epi16(load, 2), two_bits),
                _mm256_and_si256(_mm256_srli_epi16(load, 4), two_bits),
                _mm256_and_si256(_mm256_srli_epi16(load, 6), two_bits),
            };
            for (int c = 0; c < COLS; c++) {
                for (int k = 0; k < 4; k++) {
                    acc[c] = _mm256_add_epi16(acc[c], _mm256_maddubs_epi16(u[k], broadcast4(columns[c] + i + 4 * k)));
                }
            }
        }
        const __m256 d_w = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(scales)));
        scales += TILE_ROWS * sizeof(uint16_t);
        for (int c = 0; c < COLS; c++) {
            const float * d_x = reinterpret_cast<const float *>(columns[c] + layout.scales);
            const int32_t * sums =
                reinterpret_cast<const int32_t *>(columns[c] + layout.sums) + begin / ACTIVATION_SUM_GROUP;
            const int32_t sum = GROUP == 128 ? sums[0] + sums[1] : sums[0];
            const __m256i products = _mm256_sub_epi32(_mm256_madd_epi16(acc[c], ones), _mm256_set1_epi32(sum));
            const __m256 d = _mm256_mul_ps(d_w, _mm256_set1_ps(d_x[begin / ACTIVATION_GROUP]));
            y[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), d, y[c]);
        }
    }
    for (int c = 0; c < COLS; c++) {
        _mm256_storeu_ps(outputs[c], y[c]);
    }
}

template <int GROUP>
void dispatch_columns(const uint8_t * tile, const ColumnLayout & layout, const uint8_t * const * columns, int n_cols,
                      float (*outputs)[TILE_ROWS]) {
    switch (n_cols) {
    case 1: return tile_kernel<GROUP, 1>(tile, layout, columns, outputs);
    case 2: return tile_kernel<GROUP, 2>(tile, layout, columns, outputs);
    case 3: return tile_kernel<GROUP, 3>(tile, layout, columns, outputs);
    case 4: return tile_kernel<GROUP, 4>(tile, layout, columns, outputs);
    case 5: return tile_kernel<GROUP, 5>(tile, layout, columns, outputs);
    case 6: return tile_kernel<GROUP, 6>(tile, layout, columns, outputs);
    }
}

void tile_times_columns(const uint8_t * tile, int group, const ColumnLayout & layout, const uint8_t * const * columns,
                        int n_cols, float (*outputs)[TILE_ROWS]) {
    if (group == 64) {
        dispatch_columns<64>(tile, layout, columns, n_cols, outputs);
    } else {
        dispatch_columns<128>(tile, layout, columns, n_cols, outputs);
    }
}

}  // namespace

const Kernels KERNELS_AVX2 = {"avx2", quantize, tile_times_columns};

}  // namespace tern
