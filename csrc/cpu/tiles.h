// How ternary weights lie in memory for the kernels: tiles of 8 rows, whatever type the file has.
//
// A tile holds 8 rows of n_in weights as 2-bit codes, interleaved for 256-bit registers, and then the scales:
//
//   codes   [n_in/16][8 rows][4 bytes]   byte i of row r, load j:  codes of the inputs 16j + i + {0, 4, 8, 12}
//   scales  [n_in/group][8 rows] fp16
//
// One 32-byte load is 16 inputs of all 8 rows. Shifted by 0, 2, 4, 6 bits and masked it gives four registers; in each,
// the 32-bit lane of row r has the codes of 4 neighbouring inputs, which meet the same 4 activations broadcast to all
// lanes. The sum of a row builds up inside its lane: no horizontal addition is ever needed.
//
//   bit pair   7-6      5-4      3-2      1-0
//   input     16j+12+i 16j+8+i  16j+4+i  16j+i     of byte i = 0..3
//
// `group` is 64 for Q2_0 and 128 for all other types (those with 256 weights a scale repeat it). The last tile is filled
// up with rows of scale 0.
//
// Weights of the base-3 types may lie in dense tiles instead (dense_tiles.h), which are made into these when they are used.
//
// Before the tiles of a matrix stand TILES_HEADER bytes with a TilesHeader.
#pragma once

#include "../format/ternary_types.h"

#include <cstddef>
#include <cstdint>

namespace tern {

constexpr int TILE_ROWS = 8;
constexpr size_t TILES_HEADER = 64;

struct TilesHeader {
    // Whether this is Q2_0 whose scales come in equal pairs, as they do where a model with groups of 128 was written in that
    // type. It lies in groups of 128, which saves a twentieth of the memory that decode streams through.
    bool paired_scales;
    // Whatever the owner of the memory wants to know of the matrix. pack_tiles() clears it.
    const void * note;
};
static_assert(sizeof(TilesHeader) <= TILES_HEADER);

inline TilesHeader & header_of_tiles(uint8_t * matrix) {
    return *reinterpret_cast<TilesHeader *>(matrix);
}
inline const TilesHeader & header_of_tiles(const uint8_t * matrix) {
    return *reinterpret_cast<const TilesHeader *>(matrix);
}

// The group of a type's tiles, where scales do not come in pairs.
inline int tile_group(const TernaryType & type) {
    return type.block < 128 ? type.block : 128;
}

inline size_t tile_code_bytes(int64_t n_in) {
    return static_cast<size_t>(n_in) / 4 * TILE_ROWS;
}

// Bytes of one tile, a multiple of 64.
inline size_t tile_bytes(int64_t n_in, int group) {
    const size_t scales = static_cast<size_t>(n_in / group) * TILE_ROWS * sizeof(uint16_t);
    return (tile_code_bytes(n_in) + scales + 63) / 64 * 64;
}

inline int64_t tile_count(int64_t n_out) {
    return (n_out + TILE_ROWS - 1) / TILE_ROWS;
}

// n_rows (1 to 8) rows of `type`, row_stride bytes apart, to one tile.
void pack_tile(const TernaryType & type, int group, const uint8_t * rows, size_t row_stride, int n_rows, int64_t n_in,
               uint8_t * tile);

// One row of a tile as codes, one a byte, and scale bits, one per group.
void unpack_tile_row(const uint8_t * tile, int row, int64_t n_in, int group, uint8_t * codes, uint16_t * scales);

// One row of a tile as floats.
void dequantize_tile_row(const uint8_t * tile, int row, int64_t n_in, int group, float * weights);

// How matrices lie in memory. DENSE: those of the base-3 types in dense tiles, which are smaller and take longer to multiply.
enum class TileLayout { FAST, DENSE };

// Whether a matrix of this type lies in dense tiles.
inline bool is_dense(const TernaryType & type, TileLayout layout) {
    return layout == TileLayout::DENSE && type.base_3;
}

// A matrix in tiles.
struct Tiles {
    const uint8_t * first;
    int64_t n_in;
    int64_t n_out;
    int group;
    bool dense;

    int64_t count() const { return tile_count(n_out); }
    size_t stride() const;  // bytes from tile to tile
    const uint8_t * tile(int64_t i) const { return first + static_cast<size_t>(i) * stride(); }
};

// A whole matrix [n_out][n_in] to header and tiles and back. `data` is packed without gaps, as in the file. tiled_bytes is
// enough for either group.
size_t tiled_bytes(const TernaryType & type, TileLayout layout, int64_t n_in, int64_t n_out);
void pack_tiles(const TernaryType & type, TileLayout layout, const uint8_t * data, int64_t n_in, int64_t n_out,
                uint8_t * matrix);
void unpack_tiles(const TernaryType & type, TileLayout layout, const uint8_t * matrix, int64_t n_in, int64_t n_out,
                  uint8_t * data);

// The tiles of a matrix that pack_tiles wrote.
Tiles tiles_of(const TernaryType & type, TileLayout layout, const uint8_t * matrix, int64_t n_in, int64_t n_out);

}  // namespace tern
