// The multiply-adds of the AVX-512 kernels alone (this file is compiled with those instructions): vpdpbusd, 64 products added to
// 16 sums.
#define TERN_ISA avx512

#include "isas.h"
#include "multiply_add_loop_of.h"

#include <immintrin.h>

namespace tern::avx512 {

namespace {

struct Step {
    using Bytes = __m512i;
    using Sums = __m512i;
    using Lane = int32_t;
    static constexpr int MULTIPLY_ADDS = 64;

    static Bytes ones() { return _mm512_set1_epi8(1); }
    static Sums zero() { return _mm512_setzero_si512(); }
    static Sums add(Sums sums, Bytes codes, Bytes x) { return hold(_mm512_dpbusd_epi32(sums, codes, x)); }
    static __m512i hold(__m512i v) {
        asm volatile("" : "+v"(v));
        return v;
    }
};

}  // namespace

// It takes 4 or 5 cycles, and two can begin in each.
const MultiplyAddLoop MULTIPLY_ADDS = multiply_add_loop<Step, 3, 4>();

}  // namespace tern::avx512
