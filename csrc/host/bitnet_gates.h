// Which gate matrices of a file are to pass through squared ReLU (cpu/squared_relu.h).
//
// llama.cpp's graph of BitNet has SiLU where the released model has squared ReLU. A file says which one it was trained with
// under the key bitnet.hidden_activation, which that graph does not read.
#pragma once

#include "../format/gguf_header.h"

#include <string>

namespace tern {

// Whether the tensor is the gate matrix of a block.
bool is_gate(const GgufTensor & tensor);

// Whether the gates of this file pass through squared ReLU. If they should and cannot, `obstacle` says in a line why, and
// the model will compute SiLU. A later part of a split model, which has no keys of its own, is answered like the first
// part, which llama.cpp reads just before in the same thread.
// Throws FormatError for another activation, and for an adapter to add to a gate when a model with squared ReLU was loaded.
bool gates_have_squared_relu(const GgufHeader & header, std::string & obstacle);

}  // namespace tern
