// Making a matrix in tiles of a numpy array, and its product, as the functions of the module have them.
#pragma once

#include "../cpu/kernels.h"
#include "../cpu/tiled_matrix.h"
#include "../format/hadamard.h"

#include <pybind11/numpy.h>

#include <optional>
#include <string>

namespace tern {

// data: uint8 [n_out, row_bytes].
TiledMatrix make_tiled_matrix(uint32_t type_id, const pybind11::array & data, bool dense);

// x: float32 [n_cols, n_in]. Returns float32 [n_cols, n_out].
pybind11::array_t<float> multiply_tiled(const TiledMatrix & matrix, const pybind11::array & x,
                                        const std::optional<std::string> & isa, int n_threads,
                                        const Rotation * rotation);

}  // namespace tern
