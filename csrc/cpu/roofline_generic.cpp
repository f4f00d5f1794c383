// The multiply-adds of the generic kernels alone: 8-bit codes and activations, widened, multiplied and summed in 32 bits.
#define TERN_ISA generic

#include "isas.h"

namespace tern::generic {

namespace {

constexpr int N = 16;

int64_t run(int64_t n_passes) {
    uint8_t codes[N];
    int8_t activations[N];
    for (int i = 0; i < N; i++) {
        codes[i] = 1;
        activations[i] = 1;
    }
    int32_t sum = 0;
    for (int64_t pass = 0; pass < n_passes; pass++) {
        // Says that the memory has changed, or the compiler would multiply once and for all.
        asm volatile("" : : "r"(codes), "r"(activations) : "memory");
        for (int i = 0; i < N; i++) {
            sum += codes[i] * activations[i];
        }
    }
    return sum;
}

}  // namespace

const MultiplyAddLoop MULTIPLY_ADDS = {N, run};

}  // namespace tern::generic
