// Stands in for the compiler's header of this name: NEON in plain C++, by SIMDe, and what its releases so far leave out.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/arm/neon.h>

#include <cmath>
#include <cstdint>

#ifndef vcvtnq_s32_f32
#define vcvtnq_s32_f32 shim_vcvtnq_s32_f32
inline simde_int32x4_t shim_vcvtnq_s32_f32(simde_float32x4_t v) {
    float from[4];
    int32_t to[4];
    simde_vst1q_f32(from, v);
    for (int i = 0; i < 4; i++) {
        // As the instruction has it: NaN is 0, what does not fit is the nearest that does.
        to[i] = std::isnan(from[i])         ? 0
                : from[i] >= 2147483648.0f  ? INT32_MAX
                : from[i] <= -2147483648.0f ? INT32_MIN
                                            : static_cast<int32_t>(std::nearbyint(from[i]));
    }
    return simde_vld1q_s32(to);
}
#endif

#ifndef vdivq_f32
#define vdivq_f32 shim_vdivq_f32
inline simde_float32x4_t shim_vdivq_f32(simde_float32x4_t a, simde_float32x4_t b) {
    float x[4];
    float y[4];
    simde_vst1q_f32(x, a);
    simde_vst1q_f32(y, b);
    for (int i = 0; i < 4; i++) {
        x[i] /= y[i];
    }
    return simde_vld1q_f32(x);
}
#endif

#ifndef vmmlaq_s32
#define vmmlaq_s32 shim_vmmlaq_s32
inline simde_int32x4_t shim_vmmlaq_s32(simde_int32x4_t sum, simde_int8x16_t rows, simde_int8x16_t columns) {
    int32_t s[4];
    int8_t a[16];
    int8_t b[16];
    simde_vst1q_s32(s, sum);
    simde_vst1q_s8(a, rows);
    simde_vst1q_s8(b, columns);
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 2; j++) {
            for (int k = 0; k < 8; k++) {
                s[2 * i + j] += a[8 * i + k] * b[8 * j + k];
            }
        }
    }
    return simde_vld1q_s32(s);
}
#endif

#include "no_asm.h"
