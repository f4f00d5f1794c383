// The multiply-adds of the kernels for NEON with matrix products alone (this file is compiled with those instructions): smmla,
// 32 products added to 4 sums.
#define TERN_ISA i8mm

#include "isas.h"
#include "multiply_add_loop_of.h"

#include <arm_neon.h>

namespace tern::i8mm {

namespace {

struct Step {
    using Bytes = int8x16_t;
    using Sums = int32x4_t;
    using Lane = int32_t;
    static constexpr int MULTIPLY_ADDS = 32;

    static Bytes ones() { return vdupq_n_s8(1); }
    static Sums zero() { return vdupq_n_s32(0); }
    static Sums add(Sums sums, Bytes codes, Bytes x) { return hold(vmmlaq_s32(sums, codes, x)); }
    template <class Vector> static Vector hold(Vector v) {
        asm volatile("" : "+w"(v));
        return v;
    }
};

}  // namespace

// It takes up to 4 cycles, and up to four can begin in each: 16 sums, and their operands, of the 32 registers.
const MultiplyAddLoop MULTIPLY_ADDS = multiply_add_loop<Step, 4, 4>();

}  // namespace tern::i8mm
