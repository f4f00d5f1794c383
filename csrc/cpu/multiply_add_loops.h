// For every instruction set of the kernels, a loop of the multiply-adds that they rest on and of nothing else: no loads, no
// unpacking. It shows how fast a product could be at best.
#pragma once

#include <cstdint>

namespace tern {

struct MultiplyAddLoop {
    const char * isa;  // as in its Kernels
    int64_t multiply_adds_a_pass;
    // All factors are 1. Returns the sum of the sums: the number of multiply-adds, as long as no sum outgrows its lane, which
    // 1000 passes do not make it do.
    int64_t (*run)(int64_t n_passes);
};

// Declared are all; compiled in are those for the family of the processor that the compiler can make.
extern const MultiplyAddLoop MULTIPLY_ADD_GENERIC;
extern const MultiplyAddLoop MULTIPLY_ADD_AVX2;
extern const MultiplyAddLoop MULTIPLY_ADD_AVXVNNI;
extern const MultiplyAddLoop MULTIPLY_ADD_AVX512;
extern const MultiplyAddLoop MULTIPLY_ADD_NEON;
extern const MultiplyAddLoop MULTIPLY_ADD_I8MM;

}  // namespace tern
