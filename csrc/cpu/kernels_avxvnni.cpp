// Kernels for AVX-VNNI: AVX2 and vpdpbusd (this file alone is compiled with those instructions). Quantization and Hadamard
// transform are those of AVX2.
#define TERN_ISA avxvnni

#include "isas.h"

#include "squared_relu.h"
#include "vnni.h"

namespace tern::avxvnni {

namespace {

struct Step {
    template <class View> static __m256i start(const View & x, int64_t begin, int c) {
        return _mm256_set1_epi32(x.minus_sum(begin, c));
    }
    static void add(__m256i & sum, __m256i u, const uint8_t * q) { add_products(sum, u, q); }
    static __m256i finish(__m256i sum) { return sum; }
};

template <int GROUP, int COLS> using PanelKernel = PanelKernelOf<Step, GROUP, COLS>;

// 12 sums, a register of codes, its bit pairs, the mask and the activations fill the 16 registers.
constexpr int MAX_COLUMNS = 12;

}  // namespace

const Kernels KERNELS = {
    quantize_activation, hadamard, multiply_any<PanelKernel, MAX_COLUMNS>, MAX_COLUMNS, squared_relu_for_silu, expand,
};

const Isa ISA = {"avxvnni", KERNELS, avx2::ATTENTION, MULTIPLY_ADDS};

}  // namespace tern::avxvnni
