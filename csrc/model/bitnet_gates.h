// Which gate matrices of a file are to pass through squared ReLU (cpu/squared_relu.h).
//
// llama.cpp's graph of BitNet has SiLU where the released model has squared ReLU. A file says which one it was trained with
// under the key bitnet.hidden_activation, which that graph does not read.
#pragma once

#include "../format/gguf_header.h"
#include "process_types.h"

#include <string>
#include <string_view>

namespace tern {

// The key that names the activation.
constexpr std::string_view ACTIVATION_KEY = "bitnet.hidden_activation";

// Whether the tensor is the gate matrix of a block.
bool is_gate(const GgufTensor & tensor);

// Whether the gates should pass through squared ReLU. Throws FormatError for an activation that cannot be computed.
bool wants_squared_relu(const GgufHeader & header);

// What keeps the gates of this file from squared ReLU, in a few words, or nothing.
std::string obstacle_to_squared_relu(const GgufHeader & header, const ProcessTypes & types);

// Throws FormatError for an adapter that would be added to the product with a gate, before squared ReLU.
void refuse_adapter_of_gates(const GgufHeader & header);

}  // namespace tern
