// Stands in for the compiler's header of this name: the instructions of x86 in plain C++, by SIMDe, and what its releases
// so far leave out.
#pragma once

// SIMDe takes AVX2 from the real one where it may.
#if defined(__x86_64__)
#include_next <immintrin.h>
#endif

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cstdint>
#include <cstring>

#if !defined(__x86_64__)
using __mmask16 = simde__mmask16;
#endif

#define _mm512_cvtepi32_ps shim_mm512_cvtepi32_ps
inline simde__m512 shim_mm512_cvtepi32_ps(simde__m512i v) {
    int32_t from[16];
    float to[16];
    simde_mm512_storeu_si512(from, v);
    for (int i = 0; i < 16; i++) {
        to[i] = static_cast<float>(from[i]);
    }
    return simde_mm512_loadu_ps(to);
}

// 16 integers of a narrower type, the first bytes of `v`, each in 32 bits.
template <typename From, typename Register> inline simde__m512i widen(Register v) {
    From from[16];
    int32_t to[16];
    std::memcpy(from, &v, sizeof(from));
    for (int i = 0; i < 16; i++) {
        to[i] = from[i];
    }
    return simde_mm512_loadu_si512(to);
}
#define _mm512_cvtepi8_epi32 widen<int8_t>
#define _mm512_cvtepu8_epi32 widen<uint8_t>
#define _mm512_cvtepu16_epi32 widen<uint16_t>

#define _mm512_cvtph_ps shim_mm512_cvtph_ps
inline simde__m512 shim_mm512_cvtph_ps(simde__m256i v) {
    float to[16];
    simde_mm256_storeu_ps(to, simde_mm256_cvtph_ps(simde_mm256_extracti128_si256(v, 0)));
    simde_mm256_storeu_ps(to + 8, simde_mm256_cvtph_ps(simde_mm256_extracti128_si256(v, 1)));
    return simde_mm512_loadu_ps(to);
}

#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps shim_mm512_extractf32x8_ps
inline simde__m256 shim_mm512_extractf32x8_ps(simde__m512 v, int half) {
    float from[16];
    simde_mm512_storeu_ps(from, v);
    return simde_mm256_loadu_ps(from + 8 * half);
}

#define _mm512_mask_storeu_ps shim_mm512_mask_storeu_ps
inline void shim_mm512_mask_storeu_ps(float * p, uint16_t mask, simde__m512 v) {
    float from[16];
    simde_mm512_storeu_ps(from, v);
    for (int i = 0; i < 16; i++) {
        if ((mask >> i & 1) != 0) {
            p[i] = from[i];
        }
    }
}

#ifndef _MM_HINT_T0
#define _MM_HINT_T0 3
#endif
#undef _mm_prefetch
#define _mm_prefetch(p, hint) static_cast<void>(p)

#include "no_asm.h"
