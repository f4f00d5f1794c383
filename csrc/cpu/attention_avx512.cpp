// Attention for AVX-512 (this file alone is compiled with those instructions).
#define TERN_ISA avx512

#include "attention_vector.h"
#include "isas.h"

#include <immintrin.h>

namespace tern::avx512 {

namespace {

struct Avx512 {
    static constexpr int LANES = 16;

    __m512 v;

    static Avx512 zero() { return {_mm512_setzero_ps()}; }
    static Avx512 all(float x) { return {_mm512_set1_ps(x)}; }
    static Avx512 load(const float * p) { return {_mm512_loadu_ps(p)}; }
    void store(float * p) const { _mm512_storeu_ps(p, v); }

    static Avx512 fma(Avx512 a, Avx512 b, Avx512 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    friend Avx512 operator*(Avx512 a, Avx512 b) { return {_mm512_mul_ps(a.v, b.v)}; }
    friend Avx512 operator+(Avx512 a, Avx512 b) { return {_mm512_add_ps(a.v, b.v)}; }

    float sum() const {
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }

    static Avx512 all_fp16(const uint8_t * p) {
        uint16_t h;
        std::memcpy(&h, p, sizeof(h));
        return {_mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(h)))};
    }
    static Avx512 fp16(const uint8_t * p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
    }
    static Avx512 bf16(const uint8_t * p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
    }
    static Avx512 int8(const uint8_t * p) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))))};
    }
    static Avx512 nibbles(const uint8_t * p, int shift) { return {_mm512_cvtepi32_ps(nibbles_as_int(p, shift))}; }
    static Avx512 nibbles(const uint8_t * p, int shift, uint32_t fifth) {
        const __m512i low = nibbles_as_int(p, shift);
        const auto lanes = static_cast<__mmask16>(fifth);
        return {_mm512_cvtepi32_ps(_mm512_mask_or_epi32(low, lanes, low, _mm512_set1_epi32(16)))};
    }

  private:
    static __m512i nibbles_as_int(const uint8_t * p, int shift) {
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        return shift == 0 ? _mm512_and_si512(bytes, _mm512_set1_epi32(15)) : _mm512_srli_epi32(bytes, 4);
    }
};

}  // namespace

const AttentionKernels ATTENTION = attention_table<Avx512>();

}  // namespace tern::avx512
