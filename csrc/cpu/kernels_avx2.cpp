// Kernels for AVX2 with FMA and F16C (this file alone is compiled with those instructions).
//
// The inner step is vpmaddubsw: 32 products of an unsigned code and a signed activation, added in pairs to 16 bits. The
// 16-bit lanes begin at minus the sum of a half group, within 64 * 127 = 8128, and take a whole group of 128 inputs before
// they are widened: 64 products each, within 3 * 127 (code 3; 2 * 127 for ternary codes). 8128 + 64 * 381 = 32512 < 32768,
// so nothing saturates; activations are within +-127.
#define TERN_ISA avx2

#include "isas.h"

#include "../format/float16.h"
#include "dense_tiles.h"
#include "squared_relu.h"
#include "x86.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tern::avx2 {

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

void quantize_activation(const ColumnLayout & layout, const float * x, int64_t group_begin, int64_t group_end,
                         uint8_t * column) {
    float * scales = reinterpret_cast<float *>(column + layout.scales);
    int16_t * minus_sums = reinterpret_cast<int16_t *>(column + layout.sums);
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
        // d = 0: all of the group is 0, or below what an fp32 scale can tell apart. d = Inf or NaN spoils the result, as it
        // should. A subnormal d is so coarse that quotients go beyond 127.
        const bool usable = d > 0 && std::isfinite(d);
        const __m256 divisor = _mm256_set1_ps(usable ? d : 1.0f);
        const __m256i limit = _mm256_set1_epi32(usable ? 127 : 0);
        const __m256i lower_limit = _mm256_set1_epi32(usable ? -127 : 0);
        for (int64_t half = begin; half < end; half += ACTIVATION_SUM_GROUP) {
            __m256i sum = _mm256_setzero_si256();
            for (int64_t i = half; i < half + ACTIVATION_SUM_GROUP; i += 32) {
                __m256i v[4];
                for (int k = 0; k < 4; k++) {
                    v[k] = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(x + i + 8 * k), divisor));
                    v[k] = _mm256_max_epi32(_mm256_min_epi32(v[k], limit), lower_limit);
                    sum = _mm256_add_epi32(sum, v[k]);
                }
                const __m256i packed =
                    _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(column + i),
                                    _mm256_permutevar8x32_epi32(packed, order));
            }
            minus_sums[half / ACTIVATION_SUM_GROUP] = static_cast<int16_t>(-sum_lanes(sum));
        }
    }
}

// The butterflies of neighbours at distance 1, 2 and 4, inside one register: each lane adds its partner to itself, the
// upper one of a pair with its own sign turned.
inline __m256 butterflies_inside(__m256 v) {
    const __m256 upper1 = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
    const __m256 upper2 = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
    const __m256 upper4 = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
    v = _mm256_add_ps(_mm256_permute_ps(v, _MM_SHUFFLE(2, 3, 0, 1)), _mm256_xor_ps(v, upper1));
    v = _mm256_add_ps(_mm256_permute_ps(v, _MM_SHUFFLE(1, 0, 3, 2)), _mm256_xor_ps(v, upper2));
    return _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, upper4));
}

// Two stages at once, at the distances `half` and 2 * half, halve the loads and stores.
void two_stages(float * x, int64_t block, int64_t half) {
    for (int64_t begin = 0; begin < block; begin += 4 * half) {
        for (int64_t i = begin; i < begin + half; i += 8) {
            const __m256 a = _mm256_loadu_ps(x + i);
            const __m256 b = _mm256_loadu_ps(x + i + half);
            const __m256 c = _mm256_loadu_ps(x + i + 2 * half);
            const __m256 d = _mm256_loadu_ps(x + i + 3 * half);
            const __m256 ab = _mm256_add_ps(a, b);
            const __m256 cd = _mm256_add_ps(c, d);
            const __m256 a_b = _mm256_sub_ps(a, b);
            const __m256 c_d = _mm256_sub_ps(c, d);
            _mm256_storeu_ps(x + i, _mm256_add_ps(ab, cd));
            _mm256_storeu_ps(x + i + half, _mm256_add_ps(a_b, c_d));
            _mm256_storeu_ps(x + i + 2 * half, _mm256_sub_ps(ab, cd));
            _mm256_storeu_ps(x + i + 3 * half, _mm256_sub_ps(a_b, c_d));
        }
    }
}

void hadamard(float * x, const float * signs, int64_t block) {
    if (block < 8) {
        generic::KERNELS.hadamard(x, signs, block);
        return;
    }
    const __m256 norm = _mm256_set1_ps(1.0f / std::sqrt(static_cast<float>(block)));
    for (int64_t i = 0; i < block; i += 8) {
        const __m256 factor = signs != nullptr ? _mm256_mul_ps(_mm256_loadu_ps(signs + i), norm) : norm;
        _mm256_storeu_ps(x + i, butterflies_inside(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor)));
    }
    int64_t half = 8;
    for (; 2 * half < block; half *= 4) {
        two_stages(x, block, half);
    }
    if (half < block) {
        for (int64_t i = 0; i < half; i += 8) {
            const __m256 a = _mm256_loadu_ps(x + i);
            const __m256 b = _mm256_loadu_ps(x + i + half);
            _mm256_storeu_ps(x + i, _mm256_add_ps(a, b));
            _mm256_storeu_ps(x + i + half, _mm256_sub_ps(a, b));
        }
    }
}

inline __m256i broadcast4(const void * p) {
    return _mm256_set1_epi32(four_bytes(p));
}

// A sum is in two 16-bit parts, which finish() adds.
struct Step {
    template <int GROUP, int COLS> static __m256i start(const PanelView<GROUP, COLS> & x, int64_t begin, int c) {
        const __m256i halves = broadcast4(x.halves(begin, c));
        if constexpr (GROUP == ACTIVATION_GROUP) {
            return halves;
        }
        return begin % ACTIVATION_GROUP == 0 ? _mm256_and_si256(halves, _mm256_set1_epi32(0xffff))
                                             : _mm256_srli_epi32(halves, 16);
    }
    static void add(__m256i & sum, __m256i u, const uint8_t * q) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(u, broadcast4(q)));
        stay_in_order(sum);
    }
    static __m256i finish(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
};

template <int GROUP, int COLS> using PanelKernel = PanelKernelOf<Step, GROUP, COLS>;

// One column alone (decode). Codes are taken two bit pairs from one shift: the upper pair stays 4 times its value, and its
// sums are divided at the end of the group, exactly. They get a register for each pair: 8 loads of 2 * 12 * 127 are 24384.
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
            __m256i once = Step::start(x, begin, 0);
            __m256i four_times[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            const uint8_t * q = x.q + begin;
#pragma GCC unroll 8
            for (int i = 0; i < GROUP; i += 16) {
                const __m256i load = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes + 2 * i));
                prefetch_line(codes + 2 * i, i % 32 == 0 ? PREFETCH_BYTES : PREFETCH_AGAIN_BYTES);
                const __m256i upper = _mm256_srli_epi16(load, 4);
                const __m256i p0 = _mm256_maddubs_epi16(_mm256_and_si256(load, low_pair), broadcast4(q + i));
                const __m256i p1 = _mm256_maddubs_epi16(_mm256_and_si256(load, high_pair), broadcast4(q + i + 4));
                const __m256i p2 = _mm256_maddubs_epi16(_mm256_and_si256(upper, low_pair), broadcast4(q + i + 8));
                const __m256i p3 = _mm256_maddubs_epi16(_mm256_and_si256(upper, high_pair), broadcast4(q + i + 12));
                once = _mm256_add_epi16(once, _mm256_add_epi16(p0, p2));
                four_times[0] = _mm256_add_epi16(four_times[0], p1);
                four_times[1] = _mm256_add_epi16(four_times[1], p3);
                stay_in_order(once);
                stay_in_order(four_times[0]);
                stay_in_order(four_times[1]);
            }
            codes += GROUP * 2;
            for (const __m256i sum : four_times) {
                once = _mm256_add_epi16(once, _mm256_srai_epi16(sum, 2));
            }
            y = add_group(y, Step::finish(once), load_scales(scales), x.scale(begin, 0));
            scales += TILE_ROWS * sizeof(uint16_t);
        }
        prefetch(codes, tiles + stride - codes);
        store_rows(output + row, y, n_rows - row);
    }
}

// Two codes of each of 32 words: 3a + b to a | b << 2. The words keep the rest.
inline __m256i next_codes(__m256i & lower, __m256i & upper) {
    const __m256i half_bytes =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 1, 5, 9, 2, 6, 10, 0, 0, 0, 0, 0, 0, 0));
    const __m256i nine = _mm256_set1_epi16(9);
    const __m256i codes = _mm256_packus_epi16(_mm256_mulhi_epu16(lower, nine), _mm256_mulhi_epu16(upper, nine));
    lower = _mm256_mullo_epi16(lower, nine);
    upper = _mm256_mullo_epi16(upper, nine);
    return _mm256_shuffle_epi8(half_bytes, codes);
}

void expand(const uint8_t * dense, int64_t n_in, uint8_t * tile) {
    for (int64_t begin = 0; begin < n_in; begin += DENSE_GROUP) {
        prefetch(dense, DENSE_WORDS * sizeof(uint16_t));
        __m256i codes[16];
#pragma GCC unroll 3
        for (int i = 0; i < 3; i++) {
            const auto * words = reinterpret_cast<const __m256i *>(dense) + 2 * i;
            __m256i lower = _mm256_loadu_si256(words);
            __m256i upper = _mm256_loadu_si256(words + 1);
#pragma GCC unroll 5
            for (int k = 0; k < 5; k++) {
                codes[5 * i + k] = next_codes(lower, upper);
            }
        }
        // The last 8 words, four times in two registers, with two codes taken off 0, 2, 1 and 3 times.
        const __m256i last = _mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i *>(dense + (DENSE_WORDS - 8) * sizeof(uint16_t))));
        __m256i lower =
            _mm256_mullo_epi16(last, _mm256_setr_epi16(1, 1, 1, 1, 1, 1, 1, 1, 81, 81, 81, 81, 81, 81, 81, 81));
        __m256i upper = _mm256_mullo_epi16(lower, _mm256_set1_epi16(9));
        codes[15] = next_codes(lower, upper);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(tile) + i,
                                _mm256_or_si256(codes[2 * i], _mm256_slli_epi16(codes[2 * i + 1], 4)));
        }
        dense += DENSE_WORDS * sizeof(uint16_t);
        tile += DENSE_GROUP * 2;
    }
    std::memcpy(tile, dense, static_cast<size_t>(n_in / DENSE_GROUP) * TILE_ROWS * sizeof(uint16_t));
}

// 8 sums, a register of codes, its bit pairs, the mask and the products fit the 16 registers.
constexpr int MAX_COLUMNS = 8;

}  // namespace

const Kernels KERNELS = {
    quantize_activation, hadamard, multiply_any<PanelKernel, MAX_COLUMNS>, MAX_COLUMNS, squared_relu_for_silu, expand,
};

const Isa ISA = {"avx2", KERNELS, ATTENTION, MULTIPLY_ADDS};

}  // namespace tern::avx2
