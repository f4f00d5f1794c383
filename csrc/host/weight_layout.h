// Which layout the matrices of a model get (cpu/tiles.h): the fast one where there is memory for it, else the dense one.
//
// TERN_LAYOUT=fast and TERN_LAYOUT=dense decide for all models; the default, auto, decides when the header of a file is read,
// for the model that is loaded next.
#pragma once

#include "../cpu/tiles.h"
#include "../format/gguf_header.h"

namespace tern {

// Decides for the file with this header, and says on stderr when memory leaves no choice. name: of the file.
void choose_layout(const char * name, const GgufHeader & header);

// What was decided last.
TileLayout chosen_layout();

}  // namespace tern
