// Making the plan of a graph: one walk over its nodes. See plan.h.
#include "plan.h"

#include "ternary_nodes.h"

#include <algorithm>
#include <iterator>

namespace tern {

namespace {

ggml_backend_buffer_t buffer_of(const ggml_tensor * t) {
    return t->view_src != nullptr ? t->view_src->buffer : t->buffer;
}

bool is_host(ggml_backend_buffer_t buffer) {
    return host().ggml_backend_buft_is_host(buffer->buft);
}

// Addresses on a device may be numbers that every buffer counts anew.
bool in_different_memories(const ggml_tensor * a, const ggml_tensor * b) {
    const ggml_backend_buffer_t buffer_a = buffer_of(a);
    const ggml_backend_buffer_t buffer_b = buffer_of(b);
    return buffer_a != nullptr && buffer_b != nullptr && buffer_a != buffer_b &&
           !(is_host(buffer_a) && is_host(buffer_b));
}

bool overlap(const ggml_tensor * a, const ggml_tensor * b) {
    const auto begin_a = reinterpret_cast<uintptr_t>(a->data);
    const auto begin_b = reinterpret_cast<uintptr_t>(b->data);
    return begin_a < begin_b + host().ggml_nbytes(b) && begin_b < begin_a + host().ggml_nbytes(a) &&
           !in_different_memories(a, b);
}

// Whether the node reads or writes memory of `result`.
bool touches(const ggml_tensor * node, const ggml_tensor * result) {
    if (overlap(node, result)) {
        return true;
    }
    return std::any_of(std::begin(node->src), std::end(node->src),
                       [&](const ggml_tensor * src) { return src != nullptr && overlap(src, result); });
}

bool moves_no_data(ggml_op op) {
    return op == host().op_none || op == host().op_view || op == host().op_reshape || op == host().op_permute ||
           op == host().op_transpose;
}

class Planner {
  public:
    Planner(const ggml_cgraph * graph, TreatmentOf treatment_of) : graph_(graph), treatment_of_(treatment_of) {}

    Plan make() {
        plan_.steps.reserve(static_cast<size_t>(graph_->n_nodes));
        for (int i = 0; i < graph_->n_nodes && plan_.unknown == nullptr; i++) {
            ggml_tensor * node = graph_->nodes[i];
            plan_.steps.push_back(step_of(node));
            if (is_ready_ && !moves_no_data(node->op) && overlap(node, plan_.activations.back().x)) {
                is_ready_ = false;
            }
        }
        return std::move(plan_);
    }

  private:
    Plan::Step step_of(ggml_tensor * node) {
        Plan::Step step{Plan::Kind::OTHER, node};
        if (!is_ternary_op(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            return step;
        }
        step.treatment = treatment_of_(node->src[0]);
        if (step.treatment == nullptr) {
            plan_.unknown = node->src[0];
        } else if (node->op == host().op_get_rows) {
            step.kind = Plan::Kind::LOOK_UP;
        } else {
            const bool for_experts = node->op == host().op_mul_mat_id;
            step.kind = for_experts ? Plan::Kind::EXPERT_PRODUCT : Plan::Kind::PRODUCT;
            step.makes_ready = make_ready({node->src[1], step.treatment->rotation, for_experts});
            step.activation = static_cast<int>(plan_.activations.size()) - 1;
            if (!for_experts) {
                step.group = join_group(node);
            }
        }
        return step;
    }

    // Whether the activation was not ready, as it is from now on.
    bool make_ready(const Plan::Activation & wanted) {
        if (is_ready_) {
            const Plan::Activation & ready = plan_.activations.back();
            if (ready.x == wanted.x && ready.rotation == wanted.rotation && ready.for_experts == wanted.for_experts) {
                return false;
            }
        }
        plan_.activations.push_back(wanted);
        is_ready_ = true;
        return true;
    }

    // The group of the product that is the next step: the last one, if it may be computed there, or a new one.
    int join_group(const ggml_tensor * node) {
        const int activation = static_cast<int>(plan_.activations.size()) - 1;
        const auto next = static_cast<int>(plan_.steps.size());
        const bool joins = !plan_.groups.empty() && plan_.groups.back().activation == activation &&
                           std::none_of(plan_.steps.begin() + plan_.groups.back().steps.front() + 1, plan_.steps.end(),
                                        [&](const Plan::Step & step) { return touches(step.node, node); });
        if (!joins) {
            plan_.groups.push_back({activation, {}});
        }
        plan_.groups.back().steps.push_back(next);
        return static_cast<int>(plan_.groups.size()) - 1;
    }

    const ggml_cgraph * graph_;
    TreatmentOf treatment_of_;
    Plan plan_;
    bool is_ready_ = false;  // whether the last activation may be used as it was made ready
};

}  // namespace

Plan make_plan(const ggml_cgraph * graph, TreatmentOf treatment_of) {
    return Planner(graph, treatment_of).make();
}

}  // namespace tern
