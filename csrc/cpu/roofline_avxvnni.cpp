// The multiply-adds of the AVX-VNNI kernels alone (this file is compiled with those instructions): vpdpbusd, 32 products added
// to 8 sums.
#define TERN_ISA avxvnni

#include "isas.h"
#include "multiply_add_loop_of.h"

#include <immintrin.h>

namespace tern::avxvnni {

namespace {

struct Step {
    using Bytes = __m256i;
    using Sums = __m256i;
    using Lane = int32_t;
    static constexpr int MULTIPLY_ADDS = 32;

    static Bytes ones() { return _mm256_set1_epi8(1); }
    static Sums zero() { return _mm256_setzero_si256(); }
    static Sums add(Sums sums, Bytes codes, Bytes x) { return hold(_mm256_dpbusd_epi32(sums, codes, x)); }
    static __m256i hold(__m256i v) {
        asm volatile("" : "+x"(v));
        return v;
    }
};

}  // namespace

// It takes 4 or 5 cycles, and two can begin in each: 10 sums, and room for 12 in the 16 registers.
const MultiplyAddLoop MULTIPLY_ADDS = multiply_add_loop<Step, 1, 2, 6>();

}  // namespace tern::avxvnni
