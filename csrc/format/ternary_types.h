// The ternary tensor types: how their blocks lie in memory, and the codecs between a block and its plain parts.
//
// A block holds `block` weights that share one fp16 scale d. A weight is stored as a code: 0, 1, 2 stand for -1, 0, +1,
// so its value is (code - 1) * d. Code 3 (+2d) exists in the 2-bit types only; it is read, and never written.
//
//   type     id  weights bytes  bits/weight  layout
//   PQ2_0   142    128     34      2.125     { fp16 d; u8 qs[32] }               code j = qs[j/4] >> 2*(j%4) & 3
//   Q2_0     42     64     18      2.25      { fp16 d; u8 qs[16] }               the same codes
//   PTQ1_0  143    128     28      1.75      { u8 qs[24]; u8 qh[2]; fp16 d }     base 3, see below
//   TQ2_0    35    256     66      2.0625    { u8 qs[64]; fp16 d }               code 128h+32l+m = qs[32h+m] >> 2l & 3
//   TQ1_0    34    256     54      1.6875    { u8 qs[48]; u8 qh[4]; fp16 d }     base 3, see below
//
// Base 3: a byte holds five codes (four in qh, whose fifth digit is 0). Codes that lie side by side sit at the same digit
// of neighbouring bytes, so that one vector instruction decodes them together. With the codes as digits, most
// significant first, of v < 243, the byte is ceil(v * 256 / 243); digit n comes back as (u8(byte * 3^n) * 3) >> 8.
//
// No ggml, no threads here: rows in, rows out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tern {

// Tensor type ids as they stand in GGUF files.
enum TypeId : uint32_t {
    TYPE_TQ1_0 = 34,
    TYPE_TQ2_0 = 35,
    TYPE_Q2_0 = 42,
    TYPE_PQ2_0 = 142,
    TYPE_PTQ1_0 = 143,
};

constexpr int MAX_BLOCK = 256;

struct TernaryType {
    uint32_t id;
    const char * name;
    int block;        // weights that share a scale
    int block_bytes;  // bytes of one block
    bool base_3;      // or else 2 bits a code
    // codes: `block` bytes in 0..3; d: the fp16 scale's bits
    void (*unpack_block)(const uint8_t * data, uint8_t * codes, uint16_t * d);
    void (*pack_block)(const uint8_t * codes, uint16_t d, uint8_t * data);

    size_t row_bytes(int64_t n_in) const { return static_cast<size_t>(n_in / block) * block_bytes; }
};

// The type with this file id, or nullptr when it is not ternary.
const TernaryType * ternary_type(uint32_t id);

// All ternary types, for iteration: types[0..count).
extern const TernaryType * const TERNARY_TYPES;
extern const int TERNARY_TYPE_COUNT;

// One row, n_in weights (a multiple of type.block), to codes and fp16 scale bits (one per block).
void unpack_row(const TernaryType & type, const uint8_t * data, int64_t n_in, uint8_t * codes, uint16_t * scales);
void pack_row(const TernaryType & type, const uint8_t * codes, const uint16_t * scales, int64_t n_in, uint8_t * data);

// One row to floats.
void dequantize_row(const TernaryType & type, const uint8_t * data, int64_t n_in, float * weights);

enum class Transcode {
    OK,
    UNEQUAL_SCALES,  // a block of the target spans source blocks with different scales (those all zero aside)
    RESERVED_CODE,   // code 3 has no base-3 digit
};

// One row from one type to another with the same values, or the reason why it cannot be done. n_in is a multiple of both
// blocks.
Transcode transcode_row(const TernaryType & from, const TernaryType & to, const uint8_t * data, int64_t n_in,
                        uint8_t * out);

}  // namespace tern
