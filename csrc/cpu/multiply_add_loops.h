// For every instruction set of the kernels, a loop of the multiply-adds that they rest on and of nothing else: no loads, no
// unpacking. It shows how fast a product could be at best.
#pragma once

#include <cstdint>

namespace tern {

struct MultiplyAddLoop {
    const char * isa;  // as in its Kernels
    int64_t multiply_adds_a_pass;
    void (*run)(int64_t n_passes);
};

extern const MultiplyAddLoop MULTIPLY_ADD_GENERIC;
#if defined(__x86_64__)
extern const MultiplyAddLoop MULTIPLY_ADD_AVX2;
#endif

}  // namespace tern
