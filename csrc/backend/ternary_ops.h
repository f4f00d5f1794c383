// Which ternary operations our kernels can do.
#pragma once

#include "../host/host_api.h"

namespace tern {

bool supports_ternary_op(const ggml_tensor * node);

}  // namespace tern
