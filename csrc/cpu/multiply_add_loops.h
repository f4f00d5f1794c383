// For every instruction set of the kernels, a loop of the multiply-adds that they rest on and of nothing else: no loads, no
// unpacking. It shows how fast a product could be at best.
#pragma once

#include <cstdint>

namespace tern {

struct MultiplyAddLoop {
    int64_t multiply_adds_a_pass;
    // All factors are 1. Returns the sum of the sums: the number of multiply-adds, as long as no sum outgrows its lane, which
    // 1000 passes do not make it do.
    int64_t (*run)(int64_t n_passes);
};

}  // namespace tern
