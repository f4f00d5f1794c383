// The shapes, types and strides of ternary operations: see ternary_ops.h.
#include "ternary_ops.h"

#include "backend.h"

namespace tern {

bool supports_ternary_op(const ggml_tensor * node) {
    const ggml_tensor * w = node->src[0];
    const ggml_tensor * other = node->src[1];
    if (node->type != GGML_TYPE_F32 || node->nb[0] != sizeof(float)) {
        return false;
    }
    const TernaryType & type = *ternary_type_of(w->type);
    if (w->nb[0] != static_cast<size_t>(type.block_bytes) || w->nb[1] < type.row_bytes(w->ne[0])) {
        return false;  // transposed
    }
    if (is_tiled(w) && w->view_src != nullptr &&
        (w->view_offs != 0 || w->ne[0] != w->view_src->ne[0] || w->ne[1] != w->view_src->ne[1])) {
        return false;  // a part of a matrix, whose tiles do not follow its rows
    }
    if (node->op == host().op_get_rows) {
        return other->type == GGML_TYPE_I32;
    }
    if (other->type != GGML_TYPE_F32 || other->nb[0] != sizeof(float)) {
        return false;
    }
    if (node->op == host().op_mul_mat_id) {
        return w->ne[3] == 1 && other->ne[3] == 1 && node->src[2]->type == GGML_TYPE_I32;
    }
    return other->ne[2] % w->ne[2] == 0 && other->ne[3] % w->ne[3] == 0;
}

}  // namespace tern
