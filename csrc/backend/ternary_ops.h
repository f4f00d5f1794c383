// Which operations of a graph are ternary, and which of these our kernels can do.
#pragma once

#include "../host/host_api.h"

namespace tern {

// Whether the node is a MUL_MAT, MUL_MAT_ID or GET_ROWS of a ternary matrix.
bool is_ternary_op(const ggml_tensor * node);

// Whether our kernels can do this ternary operation.
bool supports_ternary_op(const ggml_tensor * node);

}  // namespace tern
