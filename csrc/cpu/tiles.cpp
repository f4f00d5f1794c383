// Packing rows into tiles and back; the layout is drawn in tiles.h.
#include "tiles.h"

#include "../format/float16.h"
#include "dense_tiles.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tern {

namespace {

uint32_t load_u32(const uint8_t * p) {
    uint32_t v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

// Whether the matrix is Q2_0 and every block of even number has the scale of the next.
bool has_paired_scales(const TernaryType & type, const uint8_t * data, int64_t n_in, int64_t n_out) {
    if (type.id != TYPE_Q2_0 || n_in % 128 != 0) {
        return false;
    }
    const uint8_t * const end = data + static_cast<size_t>(n_out) * type.row_bytes(n_in);
    for (; data < end; data += 2 * type.block_bytes) {
        // A block begins with its scale.
        if (std::memcmp(data, data + type.block_bytes, sizeof(uint16_t)) != 0) {
            return false;
        }
    }
    return true;
}

}  // namespace

void pack_tile(const TernaryType & type, int group, const uint8_t * rows, size_t row_stride, int n_rows, int64_t n_in,
               uint8_t * tile) {
    uint8_t * scales = tile + tile_code_bytes(n_in);
    std::memset(tile, 0, tile_bytes(n_in, group));

    uint8_t codes[MAX_BLOCK];
    for (int row = 0; row < n_rows; row++) {
        const uint8_t * data = rows + row * row_stride;
        for (int64_t first = 0; first < n_in; first += type.block, data += type.block_bytes) {
            uint16_t d;
            type.unpack_block(data, codes, &d);
            for (int i = 0; i < type.block; i += 16) {
                const uint32_t lane = load_u32(codes + i) | load_u32(codes + i + 4) << 2 |
                                      load_u32(codes + i + 8) << 4 | load_u32(codes + i + 12) << 6;
                std::memcpy(tile + (first + i) / 16 * 32 + row * 4, &lane, sizeof(lane));
            }
            for (int i = 0; i < type.block; i += group) {
                std::memcpy(scales + ((first + i) / group * TILE_ROWS + row) * 2, &d, sizeof(d));
            }
        }
    }
}

void unpack_tile_row(const uint8_t * tile, int row, int64_t n_in, int group, uint8_t * codes, uint16_t * scales) {
    for (int64_t i = 0; i < n_in; i += 16) {
        const uint32_t lane = load_u32(tile + i / 16 * 32 + row * 4);
        for (int k = 0; k < 4; k++) {
            const uint32_t quad = lane >> 2 * k & 0x03030303u;
            std::memcpy(codes + i + 4 * k, &quad, sizeof(quad));
        }
    }
    const uint8_t * tile_scales = tile + tile_code_bytes(n_in);
    for (int64_t g = 0; g < n_in / group; g++) {
        std::memcpy(scales + g, tile_scales + (g * TILE_ROWS + row) * 2, sizeof(uint16_t));
    }
}

void dequantize_tile_row(const uint8_t * tile, int row, int64_t n_in, int group, float * weights) {
    const uint8_t * scales = tile + tile_code_bytes(n_in);
    for (int64_t first = 0; first < n_in; first += group) {
        uint16_t bits;
        std::memcpy(&bits, scales + (first / group * TILE_ROWS + row) * 2, sizeof(bits));
        const float d = fp32_from_fp16(bits);
        for (int64_t i = first; i < first + group; i += 16) {
            const uint8_t * lane = tile + i / 16 * 32 + row * 4;
            for (int k = 0; k < 16; k++) {
                weights[i + k] = static_cast<float>((lane[k % 4] >> 2 * (k / 4) & 3) - 1) * d;
            }
        }
    }
}

size_t Tiles::stride() const {
    return dense ? dense_tile_bytes(n_in) : tile_bytes(n_in, group);
}

size_t tiled_bytes(const TernaryType & type, TileLayout layout, int64_t n_in, int64_t n_out) {
    const Tiles tiles{nullptr, n_in, n_out, tile_group(type), is_dense(type, layout)};
    return TILES_HEADER + static_cast<size_t>(tiles.count()) * tiles.stride();
}

Tiles tiles_of(const TernaryType & type, TileLayout layout, const uint8_t * matrix, int64_t n_in, int64_t n_out) {
    const int group = header_of_tiles(matrix).paired_scales ? 128 : tile_group(type);
    return {matrix + TILES_HEADER, n_in, n_out, group, is_dense(type, layout)};
}

void pack_tiles(const TernaryType & type, TileLayout layout, const uint8_t * data, int64_t n_in, int64_t n_out,
                uint8_t * matrix) {
    const size_t row_bytes = type.row_bytes(n_in);
    std::memset(matrix, 0, TILES_HEADER);
    header_of_tiles(matrix).paired_scales = has_paired_scales(type, data, n_in, n_out);
    const Tiles tiles = tiles_of(type, layout, matrix, n_in, n_out);
    std::vector<uint8_t> expanded(tiles.dense ? tile_bytes(n_in, tiles.group) : 0);
    uint8_t * tile = matrix + TILES_HEADER;
    for (int64_t row = 0; row < n_out; row += TILE_ROWS, tile += tiles.stride()) {
        const int n_rows = static_cast<int>(std::min<int64_t>(TILE_ROWS, n_out - row));
        uint8_t * packed = tiles.dense ? expanded.data() : tile;
        pack_tile(type, tiles.group, data + row * row_bytes, row_bytes, n_rows, n_in, packed);
        if (tiles.dense) {
            condense_tile(packed, n_in, tile);
        }
    }
}

void unpack_tiles(const TernaryType & type, TileLayout layout, const uint8_t * matrix, int64_t n_in, int64_t n_out,
                  uint8_t * data) {
    const Tiles tiles = tiles_of(type, layout, matrix, n_in, n_out);
    std::vector<uint8_t> expanded(tiles.dense ? tile_bytes(n_in, tiles.group) : 0);
    std::vector<uint8_t> codes(n_in);
    std::vector<uint16_t> scales(n_in / tiles.group);
    for (int64_t row = 0; row < n_out; row++) {
        const uint8_t * tile = tiles.tile(row / TILE_ROWS);
        if (tiles.dense) {
            if (row % TILE_ROWS == 0) {
                expand_tile(tile, n_in, expanded.data());
            }
            tile = expanded.data();
        }
        unpack_tile_row(tile, static_cast<int>(row % TILE_ROWS), n_in, tiles.group, codes.data(), scales.data());
        for (int64_t b = 0; b < n_in / type.block; b++) {
            type.pack_block(codes.data() + b * type.block, scales[b * type.block / tiles.group], data);
            data += type.block_bytes;
        }
    }
}

}  // namespace tern
