// The multiply-adds of the AVX2 kernels alone (this file is compiled with those instructions): vpmaddubsw, 32 products added in
// pairs, and vpaddw, which adds them to 16 sums.
#define TERN_ISA avx2

#include "isas.h"
#include "multiply_add_loop_of.h"

#include <immintrin.h>

namespace tern::avx2 {

namespace {

struct Step {
    using Bytes = __m256i;
    using Sums = __m256i;
    using Lane = int16_t;
    static constexpr int MULTIPLY_ADDS = 32;

    static Bytes ones() { return _mm256_set1_epi8(1); }
    static Sums zero() { return _mm256_setzero_si256(); }
    static Sums add(Sums sums, Bytes codes, Bytes x) { return _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, x)); }
    static __m256i hold(__m256i v) {
        asm volatile("" : "+x"(v));
        return v;
    }
};

}  // namespace

const MultiplyAddLoop MULTIPLY_ADDS = multiply_add_loop<Step, 2, 4>();

}  // namespace tern::avx2
