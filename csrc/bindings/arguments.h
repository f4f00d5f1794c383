// What the functions of the Python module do with their arguments: checks, which raise ValueError or TypeError with a line that
// says what was found and what is wanted.
#pragma once

#include "../cpu/isa.h"
#include "../format/ternary_types.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>

namespace tern {

using Bytes = pybind11::array_t<uint8_t>;

// The number of threads that an argument n_threads asks for: 0 stands for as many as the machine has.
int thread_count(int n_threads);

const TernaryType & require_type(uint32_t id);
// Raises TypeError for an array in the other byte order.
void require_native_order(const pybind11::array & array, const char * name);
void require_matrix(const pybind11::array & array, const char * name);
void require_dtype(const pybind11::array & array, const char * name, char kind, pybind11::ssize_t size,
                   const char * wanted);
void require_whole_blocks(const TernaryType & type, int64_t n_in, const char * name);

// Rows of packed bytes: returns n_in.
int64_t require_packed(const TernaryType & type, const pybind11::array & data, const char * name);

// The instruction set of that name; the plug-in's choice without one.
const Isa & isa_by_name(const std::optional<std::string> & name);

}  // namespace tern
