// Codecs of the ternary tensor types; the layouts are drawn in ternary_types.h.
#include "ternary_types.h"

#include "float16.h"

#include <cstring>

namespace tern {

namespace {

// ---- 2-bit types ----

// Four codes, one a byte of `quad`, into one byte: the shifted copies meet in the lowest byte.
inline uint8_t pack_quad(const uint8_t * codes) {
    uint32_t quad;
    std::memcpy(&quad, codes, sizeof(quad));
    return static_cast<uint8_t>(quad | quad >> 6 | quad >> 12 | quad >> 18);
}

// And back: first the two halves of the byte part, then the two codes of each half.
inline void unpack_quad(uint32_t byte, uint8_t * codes) {
    const uint32_t halves = (byte | byte << 12) & 0x000f000fu;
    const uint32_t quad = (halves | halves << 6) & 0x03030303u;
    std::memcpy(codes, &quad, sizeof(quad));
}

template <int BLOCK> void unpack_sequential(const uint8_t * data, uint8_t * codes, uint16_t * d) {
    std::memcpy(d, data, 2);
    for (int j = 0; j < BLOCK / 4; j++) {
        unpack_quad(data[2 + j], codes + 4 * j);
    }
}

template <int BLOCK> void pack_sequential(const uint8_t * codes, uint16_t d, uint8_t * data) {
    std::memcpy(data, &d, 2);
    for (int j = 0; j < BLOCK / 4; j++) {
        data[2 + j] = pack_quad(codes + 4 * j);
    }
}

void unpack_tq2_0(const uint8_t * data, uint8_t * codes, uint16_t * d) {
    for (int half = 0; half < 2; half++) {
        for (int l = 0; l < 4; l++) {
            for (int m = 0; m < 32; m++) {
                codes[128 * half + 32 * l + m] = data[32 * half + m] >> 2 * l & 3;
            }
        }
    }
    std::memcpy(d, data + 64, 2);
}

void pack_tq2_0(const uint8_t * codes, uint16_t d, uint8_t * data) {
    for (int half = 0; half < 2; half++) {
        const uint8_t * c = codes + 128 * half;
        for (int m = 0; m < 32; m++) {
            data[32 * half + m] = static_cast<uint8_t>(c[m] | c[32 + m] << 2 | c[64 + m] << 4 | c[96 + m] << 6);
        }
    }
    std::memcpy(data + 64, &d, 2);
}

// ---- base-3 types ----

// `bytes` neighbouring bytes, `digits` codes in each: code digit*bytes + m is the digit of byte m.
template <int BYTES, int DIGITS> void unpack_base3(const uint8_t * data, uint8_t * codes) {
    for (int m = 0; m < BYTES; m++) {
        uint8_t fraction = data[m];
        for (int n = 0; n < DIGITS; n++) {
            codes[n * BYTES + m] = static_cast<uint8_t>(fraction * 3 >> 8);
            fraction = static_cast<uint8_t>(fraction * 3);
        }
    }
}

template <int BYTES, int DIGITS> void pack_base3(const uint8_t * codes, uint8_t * data) {
    for (int m = 0; m < BYTES; m++) {
        uint32_t v = 0;
        for (int n = 0; n < 5; n++) {
            v = 3 * v + (n < DIGITS ? codes[n * BYTES + m] : 0);
        }
        data[m] = static_cast<uint8_t>((v * 256 + 242) / 243);
    }
}

void unpack_ptq1_0(const uint8_t * data, uint8_t * codes, uint16_t * d) {
    unpack_base3<16, 5>(data, codes);
    unpack_base3<8, 5>(data + 16, codes + 80);
    unpack_base3<2, 4>(data + 24, codes + 120);
    std::memcpy(d, data + 26, 2);
}

void pack_ptq1_0(const uint8_t * codes, uint16_t d, uint8_t * data) {
    pack_base3<16, 5>(codes, data);
    pack_base3<8, 5>(codes + 80, data + 16);
    pack_base3<2, 4>(codes + 120, data + 24);
    std::memcpy(data + 26, &d, 2);
}

void unpack_tq1_0(const uint8_t * data, uint8_t * codes, uint16_t * d) {
    unpack_base3<32, 5>(data, codes);
    unpack_base3<16, 5>(data + 32, codes + 160);
    unpack_base3<4, 4>(data + 48, codes + 240);
    std::memcpy(d, data + 52, 2);
}

void pack_tq1_0(const uint8_t * codes, uint16_t d, uint8_t * data) {
    pack_base3<32, 5>(codes, data);
    pack_base3<16, 5>(codes + 160, data + 32);
    pack_base3<4, 4>(codes + 240, data + 48);
    std::memcpy(data + 52, &d, 2);
}

const TernaryType TYPES[] = {
    {TYPE_PQ2_0, "PQ2_0", 128, 34, /*base_3=*/false, unpack_sequential<128>, pack_sequential<128>},
    {TYPE_PTQ1_0, "PTQ1_0", 128, 28, /*base_3=*/true, unpack_ptq1_0, pack_ptq1_0},
    {TYPE_Q2_0, "Q2_0", 64, 18, /*base_3=*/false, unpack_sequential<64>, pack_sequential<64>},
    {TYPE_TQ2_0, "TQ2_0", 256, 66, /*base_3=*/false, unpack_tq2_0, pack_tq2_0},
    {TYPE_TQ1_0, "TQ1_0", 256, 54, /*base_3=*/true, unpack_tq1_0, pack_tq1_0},
};

bool has_reserved_code(const uint8_t * codes, int n) {
    uint8_t found = 0;
    for (int i = 0; i < n; i++) {
        found |= codes[i] == 3;
    }
    return found != 0;
}

// Whether a group decodes to zeros only, so that another scale would do as well.
bool is_zero_group(const uint8_t * codes, int n, uint16_t d) {
    const bool finite = (d & 0x7c00u) != 0x7c00u;
    uint8_t difference = 0;
    for (int i = 0; i < n; i++) {
        difference |= codes[i] ^ 1;
    }
    return (d & 0x7fffu) == 0 || (finite && difference == 0);
}

// Finds the scale that `n_groups` neighbouring groups of `group` weights can share, and writes the codes of zero groups
// as zeros, which are right under any scale. False if the groups that are not zero differ in their scales.
bool merge_groups(uint8_t * codes, const uint16_t * scales, int n_groups, int group, uint16_t * merged) {
    bool found = false;
    *merged = scales[0];
    for (int g = 0; g < n_groups; g++) {
        if (is_zero_group(codes + g * group, group, scales[g])) {
            std::memset(codes + g * group, 1, group);
        } else if (!found) {
            *merged = scales[g];
            found = true;
        } else if (scales[g] != *merged) {
            return false;
        }
    }
    return true;
}

}  // namespace

const TernaryType * const TERNARY_TYPES = TYPES;
const int TERNARY_TYPE_COUNT = static_cast<int>(sizeof(TYPES) / sizeof(TYPES[0]));

const TernaryType * ternary_type(uint32_t id) {
    for (const TernaryType & type : TYPES) {
        if (type.id == id) {
            return &type;
        }
    }
    return nullptr;
}

void unpack_row(const TernaryType & type, const uint8_t * data, int64_t n_in, uint8_t * codes, uint16_t * scales) {
    for (int64_t b = 0; b < n_in / type.block; b++) {
        type.unpack_block(data + b * type.block_bytes, codes + b * type.block, scales + b);
    }
}

void pack_row(const TernaryType & type, const uint8_t * codes, const uint16_t * scales, int64_t n_in, uint8_t * data) {
    for (int64_t b = 0; b < n_in / type.block; b++) {
        type.pack_block(codes + b * type.block, scales[b], data + b * type.block_bytes);
    }
}

void dequantize_row(const TernaryType & type, const uint8_t * data, int64_t n_in, float * weights) {
    uint8_t codes[MAX_BLOCK];
    for (int64_t b = 0; b < n_in / type.block; b++) {
        uint16_t scale;
        type.unpack_block(data + b * type.block_bytes, codes, &scale);
        const float d = fp32_from_fp16(scale);
        for (int i = 0; i < type.block; i++) {
            weights[b * type.block + i] = static_cast<float>(codes[i] - 1) * d;
        }
    }
}

Transcode transcode_row(const TernaryType & from, const TernaryType & to, const uint8_t * data, int64_t n_in,
                        uint8_t * out) {
    // One step spans whole blocks of both: all blocks are powers of two.
    const int span = from.block > to.block ? from.block : to.block;
    uint8_t codes[MAX_BLOCK];
    uint16_t scales[MAX_BLOCK / 64];
    for (int64_t i = 0; i < n_in; i += span) {
        unpack_row(from, data, span, codes, scales);
        data += from.row_bytes(span);
        if (to.base_3 && has_reserved_code(codes, span)) {
            return Transcode::RESERVED_CODE;
        }
        if (to.block > from.block && !merge_groups(codes, scales, to.block / from.block, from.block, scales)) {
            return Transcode::UNEQUAL_SCALES;
        }
        for (int j = 0; j < span; j += to.block) {
            to.pack_block(codes + j, scales[j / from.block], out);
            out += to.block_bytes;
        }
    }
    return Transcode::OK;
}

}  // namespace tern
