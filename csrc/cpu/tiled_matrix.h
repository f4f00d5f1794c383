// A ternary matrix in tiles (tiles.h), in memory of its own as the plug-in's buffers have it.
#pragma once

#include "streamed_memory.h"
#include "tiles.h"

namespace tern {

class TiledMatrix {
  public:
    // data: n_out rows of n_in weights each, packed without gaps. Throws std::bad_alloc.
    TiledMatrix(const TernaryType & type, const uint8_t * data, int64_t n_in, int64_t n_out)
        : type_(&type), n_in_(n_in), n_out_(n_out), memory_(allocate_streamed(tiled_bytes(type, n_in, n_out))) {
        pack_tiles(type, data, n_in, n_out, memory_.get());
    }

    int64_t n_in() const { return n_in_; }
    int64_t n_out() const { return n_out_; }
    int group() const { return group_of_tiles(*type_, memory_.get()); }
    const uint8_t * tiles() const { return first_tile(memory_.get()); }

    // Bytes of the tiles: what a product with one column reads.
    size_t n_bytes() const { return static_cast<size_t>(tile_count(n_out_)) * tile_bytes(n_in_, group()); }

  private:
    const TernaryType * type_;
    int64_t n_in_;
    int64_t n_out_;
    StreamedMemory memory_;
};

}  // namespace tern
