// The parts of the Python module that have a file of their own; each adds its functions and classes.
#pragma once

#include <pybind11/pybind11.h>

namespace tern {

void bind_attention(pybind11::module_ & m);
void bind_memory(pybind11::module_ & m);
void bind_roofline(pybind11::module_ & m);
void bind_tiled_matrix(pybind11::module_ & m);

}  // namespace tern
