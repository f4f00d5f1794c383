// Attention for AVX2 with FMA and F16C (this file alone is compiled with those instructions).
#define TERN_ISA avx2

#include "attention_vector.h"
#include "isas.h"

#include <immintrin.h>

namespace tern::avx2 {

namespace {

struct Avx2 {
    static constexpr int LANES = 8;

    __m256 v;

    static Avx2 zero() { return {_mm256_setzero_ps()}; }
    static Avx2 all(float x) { return {_mm256_set1_ps(x)}; }
    static Avx2 load(const float * p) { return {_mm256_loadu_ps(p)}; }
    void store(float * p) const { _mm256_storeu_ps(p, v); }

    static Avx2 fma(Avx2 a, Avx2 b, Avx2 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
    friend Avx2 operator*(Avx2 a, Avx2 b) { return {_mm256_mul_ps(a.v, b.v)}; }
    friend Avx2 operator+(Avx2 a, Avx2 b) { return {_mm256_add_ps(a.v, b.v)}; }

    float sum() const {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }

    static Avx2 all_fp16(const uint8_t * p) {
        uint16_t h;
        std::memcpy(&h, p, sizeof(h));
        return {_mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(h)))};
    }
    static Avx2 fp16(const uint8_t * p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))};
    }
    static Avx2 bf16(const uint8_t * p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
    }
    static Avx2 int8(const uint8_t * p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))))};
    }
    static Avx2 nibbles(const uint8_t * p, int shift) { return {_mm256_cvtepi32_ps(nibbles_as_int(p, shift))}; }
    static Avx2 nibbles(const uint8_t * p, int shift, uint32_t fifth) {
        // Lane l moves bit l to the place of bit 4.
        const __m256i up =
            _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(fifth)), _mm256_setr_epi32(4, 3, 2, 1, 0, 0, 0, 0));
        const __m256i bit = _mm256_srlv_epi32(up, _mm256_setr_epi32(0, 0, 0, 0, 0, 1, 2, 3));
        return {_mm256_cvtepi32_ps(
            _mm256_or_si256(nibbles_as_int(p, shift), _mm256_and_si256(bit, _mm256_set1_epi32(16))))};
    }

  private:
    static __m256i nibbles_as_int(const uint8_t * p, int shift) {
        const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
        return shift == 0 ? _mm256_and_si256(bytes, _mm256_set1_epi32(15)) : _mm256_srli_epi32(bytes, 4);
    }
};

}  // namespace

const AttentionKernels ATTENTION = attention_table<Avx2>();

}  // namespace tern::avx2
