// Dense tiles in plain C++; the layout is drawn in dense_tiles.h.
#include "dense_tiles.h"

#include "tiles.h"

#include <cstring>

namespace tern {

namespace {

constexpr int REGISTERS = 16;                    // of two codes, in a group
constexpr int REGISTER = 32;                     // bytes
constexpr int AT_A_TIME = 5;                     // registers that share their words
constexpr int POWERS[] = {6561, 729, 81, 9, 1};  // of 9: what two codes weigh that come off first, second, ...

// Two codes a, b as they stand in half a byte, from 3a + b.
constexpr uint8_t HALF_BYTES[] = {0, 4, 8, 1, 5, 9, 2, 6, 10};

size_t scales_offset(int64_t n_in) {
    return static_cast<size_t>(n_in / DENSE_GROUP) * DENSE_WORDS * sizeof(uint16_t);
}

size_t scale_bytes(int64_t n_in) {
    return static_cast<size_t>(n_in / DENSE_GROUP) * TILE_ROWS * sizeof(uint16_t);
}

// The word that byte i of register r is in, and how many registers or bytes come off it before.
struct Place {
    int word;
    int before;

    Place(int r, int i) {
        if (r < REGISTERS - 1) {
            word = r / AT_A_TIME * REGISTER + i / 16 * 8 + i / 8 % 2 * 16 + i % 8;
            before = r % AT_A_TIME;
        } else {
            word = DENSE_WORDS - 8 + i % 8;
            before = i / 8;
        }
    }
};

}  // namespace

size_t dense_tile_bytes(int64_t n_in) {
    return (scales_offset(n_in) + scale_bytes(n_in) + 63) / 64 * 64;
}

void condense_tile(const uint8_t * tile, int64_t n_in, uint8_t * dense) {
    std::memset(dense, 0, dense_tile_bytes(n_in));
    std::memcpy(dense + scales_offset(n_in), tile + tile_code_bytes(n_in), scale_bytes(n_in));
    for (int64_t begin = 0; begin < n_in; begin += DENSE_GROUP) {
        uint32_t values[DENSE_WORDS] = {};
        for (int r = 0; r < REGISTERS; r++) {
            for (int i = 0; i < REGISTER; i++) {
                const int half = tile[r / 2 * REGISTER + i] >> 4 * (r % 2) & 15;
                const Place place(r, i);
                values[place.word] += static_cast<uint32_t>((half & 3) * 3 + (half >> 2)) * POWERS[place.before];
            }
        }
        for (const uint32_t value : values) {
            const auto word = static_cast<uint16_t>((value * 65536 + 59048) / 59049);
            std::memcpy(dense, &word, sizeof(word));
            dense += sizeof(word);
        }
        tile += DENSE_GROUP * 2;
    }
}

void expand_tile(const uint8_t * dense, int64_t n_in, uint8_t * tile) {
    std::memcpy(tile + tile_code_bytes(n_in), dense + scales_offset(n_in), scale_bytes(n_in));
    for (int64_t begin = 0; begin < n_in; begin += DENSE_GROUP) {
        uint16_t words[DENSE_WORDS];
        std::memcpy(words, dense, sizeof(words));
        for (int r = 0; r < REGISTERS; r++) {
            for (int i = 0; i < REGISTER; i++) {
                uint16_t & word = words[Place(r, i).word];
                const uint32_t product = word * 9u;
                word = static_cast<uint16_t>(product);
                const uint8_t half = HALF_BYTES[product >> 16];
                uint8_t & byte = tile[r / 2 * REGISTER + i];
                byte = r % 2 == 0 ? half : byte | half << 4;
            }
        }
        dense += sizeof(words);
        tile += DENSE_GROUP * 2;
    }
}

}  // namespace tern
