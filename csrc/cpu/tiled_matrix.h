// A ternary matrix in tiles (tiles.h), in memory of its own as the plug-in's buffers have it.
#pragma once

#include "streamed_memory.h"
#include "tiles.h"

namespace tern {

class TiledMatrix {
  public:
    // data: n_out rows of n_in weights each, packed without gaps. Throws std::bad_alloc.
    TiledMatrix(const TernaryType & type, TileLayout layout, const uint8_t * data, int64_t n_in, int64_t n_out)
        : memory_(allocate_streamed(tiled_bytes(type, layout, n_in, n_out))) {
        pack_tiles(type, layout, data, n_in, n_out, memory_.get());
        tiles_ = tiles_of(type, layout, memory_.get(), n_in, n_out);
    }

    const Tiles & tiles() const { return tiles_; }
    int64_t n_in() const { return tiles_.n_in; }
    int64_t n_out() const { return tiles_.n_out; }

    // Bytes of the tiles: what a product with one column reads.
    size_t n_bytes() const { return static_cast<size_t>(tiles_.count()) * tiles_.stride(); }

  private:
    StreamedMemory memory_;
    Tiles tiles_;
};

}  // namespace tern
