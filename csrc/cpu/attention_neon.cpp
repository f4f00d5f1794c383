// Attention for NEON.
#define TERN_ISA neon

#include "attention_vector.h"
#include "isas.h"

#include <arm_neon.h>

namespace tern::neon {

namespace {

struct Neon {
    static constexpr int LANES = 4;

    float32x4_t v;

    static Neon zero() { return {vdupq_n_f32(0)}; }
    static Neon all(float x) { return {vdupq_n_f32(x)}; }
    static Neon load(const float * p) { return {vld1q_f32(p)}; }
    void store(float * p) const { vst1q_f32(p, v); }

    static Neon fma(Neon a, Neon b, Neon c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
    friend Neon operator*(Neon a, Neon b) { return {vmulq_f32(a.v, b.v)}; }
    friend Neon operator+(Neon a, Neon b) { return {vaddq_f32(a.v, b.v)}; }

    float sum() const { return vaddvq_f32(v); }

    static Neon all_fp16(const uint8_t * p) {
        uint16_t h;
        std::memcpy(&h, p, sizeof(h));
        return {vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h)))};
    }
    static Neon fp16(const uint8_t * p) { return {vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)))}; }
    static Neon bf16(const uint8_t * p) {
        return {vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16))};
    }
    static Neon int8(const uint8_t * p) {
        return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p))))))};
    }
    static Neon nibbles(const uint8_t * p, int shift) { return {vcvtq_f32_u32(nibbles_as_int(p, shift))}; }
    static Neon nibbles(const uint8_t * p, int shift, uint32_t fifth) {
        // Lane l moves bit l to the place of bit 4.
        const int32x4_t up = {4, 3, 2, 1};
        const uint32x4_t bit = vandq_u32(vshlq_u32(vdupq_n_u32(fifth), up), vdupq_n_u32(16));
        return {vcvtq_f32_u32(vorrq_u32(nibbles_as_int(p, shift), bit))};
    }

  private:
    static uint8x8_t four_bytes(const uint8_t * p) {
        uint32_t word;
        std::memcpy(&word, p, sizeof(word));
        return vcreate_u8(word);
    }
    static uint32x4_t nibbles_as_int(const uint8_t * p, int shift) {
        const uint32x4_t bytes = vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p))));
        return shift == 0 ? vandq_u32(bytes, vdupq_n_u32(15)) : vshrq_n_u32(bytes, 4);
    }
};

}  // namespace

const AttentionKernels ATTENTION = attention_table<Neon>();

}  // namespace tern::neon
