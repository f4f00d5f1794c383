// Which operations of a graph are ternary.
#pragma once

#include "../host/host_api.h"
#include "../host/type_slots.h"

namespace tern {

// Whether the node is a MUL_MAT, MUL_MAT_ID or GET_ROWS of a ternary matrix.
inline bool is_ternary_op(const ggml_tensor * node) {
    return (node->op == host().op_mul_mat || node->op == host().op_mul_mat_id || node->op == host().op_get_rows) &&
           ternary_type_of(node->src[0]->type) != nullptr;
}

}  // namespace tern
