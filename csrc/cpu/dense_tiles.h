// Tiles in the room that base 3 leaves them: 1.75 bits a weight with the scales, where the tiles of tiles.h take 2.125.
//
// A dense tile is expanded into a tile, into the first-level cache, right before that is multiplied. It holds the same 8
// rows, with ten codes in 16 bits, for weights that have no code 3 and one scale for each group of 128:
//
//   words   [n_in/128][104] uint16
//   scales  [n_in/128][8] fp16       as in a tile
//
// With ten codes as the base-3 digits of v < 3^10 = 59049, most significant first, the word is ceil(v * 65536 / 59049). Two
// codes a, b come off it at a time: 3a + b = word * 9 >> 16, and the lower half of word * 9 holds the rest. What was rounded
// up grows to less than 9^5 / 65536 = 0.9 of a unit by the fifth time, so it never shows.
//
// Which codes share a word follows from 256-bit registers. A group takes 256 bytes in a tile, 8 loads of 32, four codes to
// a byte. Numbered by half bytes, lower ones first, that is 16 registers of two codes each:
//
//   words   0..31    registers 0 to 4, one after the other; byte i of each is in word 8 * (i/16) + 16 * (i/8 % 2) + i % 8,
//   words  32..63    registers 5 to 9,                      which is how vpackuswb brings 2 * 16 words together
//   words  64..95    registers 10 to 14
//   words  96..103   register 15, eight codes to a word: bytes 0..7, 8..15, 16..23, 24..31 one after the other
#pragma once

#include <cstddef>
#include <cstdint>

namespace tern {

constexpr int DENSE_GROUP = 128;
constexpr int DENSE_WORDS = 104;  // of a group

// Bytes of one dense tile. n_in: a multiple of 128.
size_t dense_tile_bytes(int64_t n_in);

// A tile with groups of 128 and without code 3 to a dense one.
void condense_tile(const uint8_t * tile, int64_t n_in, uint8_t * dense);

// And back; the portable version of Kernels::expand.
void expand_tile(const uint8_t * dense, int64_t n_in, uint8_t * tile);

}  // namespace tern
