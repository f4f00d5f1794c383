// What single matrices of a model need beside their product, and how that finds its way from the file to the tensor.
//
// The header of a file tells it: the gates of a BitNet want squared ReLU, rotated weights want their rotation. The tensor
// that llama.cpp makes of such a matrix has a special type id (type_slots.h), so that nobody can mistake it for a plain one;
// which treatment it is that it needs is asked here when its bytes arrive. The answer goes by name, type, shape and the
// first and last bytes. So it does not matter which models are loaded, in what order, in which thread, how often; and what
// is not recognised is never computed.
#pragma once

#include "../format/hadamard.h"

#include <cstdint>
#include <string_view>

namespace tern {

struct Treatment {
    bool squared_relu = false;            // the product passes through squared ReLU (cpu/squared_relu.h)
    const Rotation * rotation = nullptr;  // of the activation

    bool is_none() const { return !squared_relu && rotation == nullptr; }
};

// Keeps a rotation for as long as the process lives; equal ones are kept once, so that pointers can be compared.
const Rotation * keep_rotation(const Rotation & rotation);

// Remembers the treatment of a tensor. data: of the tensor, as in the file. type: as in the file, with PQ2_0 for the blocks
// that legacy files call Q2_0. Throws FormatError where another file has the very same tensor with another treatment, so that
// nothing would tell the two apart.
void remember_treatment(const GgufTensor & tensor, std::string_view data, const Treatment & treatment);

// The treatment of a tensor of a special type, or nullptr if none is known. It lives as long as the process.
const Treatment * find_treatment(std::string_view name, uint32_t file_type, const int64_t * shape,
                                 std::string_view data);

}  // namespace tern
