// Which layout the matrices of a model get (cpu/tiles.h): the fast one where there is memory for it, else the dense one.
//
// TERN_LAYOUT=fast and TERN_LAYOUT=dense decide for all models; the default, auto, decides for each model when its first matrix
// looks for a place, over all its parts.
#pragma once

#include "../cpu/tiles.h"
#include "../model/models.h"

namespace tern {

// The layout for a model; says on stderr when memory leaves no choice. model: nullptr where nothing is known of one.
TileLayout layout_of_model(Model * model);

}  // namespace tern
