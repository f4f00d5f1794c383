// The multiply-adds of the AVX2 kernels alone (this file is compiled with those instructions): vpmaddubsw, 32 products added in
// pairs, and vpaddw, which adds them to 16 sums. Eight sums in flight hide the latency of both.
#include "multiply_add_loops.h"

#include <immintrin.h>

namespace tern {

namespace {

constexpr int CODES = 2;
constexpr int COLUMNS = 4;

void run(int64_t n_passes) {
    __m256i codes[CODES];
    __m256i columns[COLUMNS];
    __m256i sums[CODES][COLUMNS];
    for (int k = 0; k < CODES; k++) {
        codes[k] = _mm256_set1_epi8(static_cast<char>(k + 1));
        for (int c = 0; c < COLUMNS; c++) {
            columns[c] = _mm256_set1_epi8(static_cast<char>(c - 2));
            sums[k][c] = _mm256_setzero_si256();
        }
    }
    for (int64_t pass = 0; pass < n_passes; pass++) {
        // Says that the columns have changed, or the compiler would multiply once and for all.
        for (int c = 0; c < COLUMNS; c++) {
            asm volatile("" : "+x"(columns[c]));
        }
        for (int k = 0; k < CODES; k++) {
            for (int c = 0; c < COLUMNS; c++) {
                sums[k][c] = _mm256_add_epi16(sums[k][c], _mm256_maddubs_epi16(codes[k], columns[c]));
            }
        }
    }
    for (int k = 0; k < CODES; k++) {
        for (int c = 0; c < COLUMNS; c++) {
            asm volatile("" : : "x"(sums[k][c]));  // a use, so that all this is not in vain
        }
    }
}

}  // namespace

const MultiplyAddLoop MULTIPLY_ADD_AVX2 = {"avx2", CODES * COLUMNS * 32, run};

}  // namespace tern
