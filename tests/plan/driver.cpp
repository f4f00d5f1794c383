// Prints the plan of a made-up graph, whose name is the argument, for test_graph_plan.py. The tensors have addresses and no
// memory: a plan that looked into it would crash.
//
// One line for each node: its kind and name, and what the plan says of it:
//
//   PRODUCT q  ready x (rotation a)  group 0
#include "host/host_api.h"
#include "plan/plan.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

using tern::Plan;
using tern::Rotation;
using tern::Treatment;

constexpr int64_t N_IN = 256;
constexpr int64_t N_OUT = 64;

const Rotation ROTATION_A{N_IN, 64, {}, 0, 0};
const Rotation ROTATION_B{N_IN, 128, {}, 0, 0};
const Treatment PLAIN;
const Treatment ROTATED_A{false, &ROTATION_A};
const Treatment ROTATED_B{false, &ROTATION_B};
const Treatment GATE{true, nullptr};

// By the first letter of the matrix's name.
const Treatment * treatment_of(const ggml_tensor * w) {
    switch (w->name[0]) {
    case 'a': return &ROTATED_A;
    case 'b': return &ROTATED_B;
    case 'g': return &GATE;
    case '?': return nullptr;
    default: return &PLAIN;
    }
}

[[noreturn]] void fail(const std::string & what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

class MadeUpGraph {
  public:
    MadeUpGraph() : context_(ggml_init({size_t{16} << 20, nullptr, /*no_alloc=*/true})) {}

    ggml_context * context() { return context_; }

    // The tensor gets a name and memory of its own.
    ggml_tensor * put(ggml_tensor * tensor, const char * name) { return put_at(tensor, name, next_address_); }

    // ... or that of another, or any.
    ggml_tensor * put_at(ggml_tensor * tensor, const char * name, uintptr_t address) {
        ggml_set_name(tensor, name);
        tensor->data = reinterpret_cast<void *>(address);
        next_address_ = std::max(next_address_, address + (ggml_nbytes(tensor) + 255) / 256 * 256);
        return tensor;
    }

    ggml_tensor * activation(const char * name, int64_t n_cols = 2) {
        return put(ggml_new_tensor_2d(context_, GGML_TYPE_F32, N_IN, n_cols), name);
    }
    ggml_tensor * matrix(const char * name) {
        return put(ggml_new_tensor_2d(context_, GGML_TYPE_TQ2_0, N_IN, N_OUT), name);
    }
    ggml_tensor * experts(const char * name) {
        return put(ggml_new_tensor_3d(context_, GGML_TYPE_TQ2_0, N_IN, N_OUT, 4), name);
    }
    ggml_tensor * ids(int64_t n, int64_t n_tokens) {
        return put(ggml_new_tensor_2d(context_, GGML_TYPE_I32, n, n_tokens), "ids");
    }
    ggml_tensor * product(const char * name, ggml_tensor * w, ggml_tensor * x) {
        return add(put(ggml_mul_mat(context_, w, x), name));
    }
    ggml_tensor * expert_product(const char * name, ggml_tensor * w, ggml_tensor * x, ggml_tensor * ids) {
        return add(put(ggml_mul_mat_id(context_, w, x, ids), name));
    }
    ggml_tensor * relu(const char * name, ggml_tensor * x) { return add(put(ggml_relu(context_, x), name)); }

    // The next node.
    ggml_tensor * add(ggml_tensor * node) {
        node->flags |= GGML_TENSOR_FLAG_COMPUTE;
        nodes_.push_back(node);
        return node;
    }

    const ggml_cgraph * graph() {
        ggml_cgraph * graph = ggml_new_graph(context_);
        for (ggml_tensor * node : nodes_) {
            ggml_graph_add_node(graph, node);
        }
        return graph;
    }

  private:
    ggml_context * context_;
    uintptr_t next_address_ = uintptr_t{1} << 44;  // where nothing is
    std::vector<ggml_tensor *> nodes_;
};

uintptr_t address_of(const ggml_tensor * tensor) {
    return reinterpret_cast<uintptr_t>(tensor->data);
}

// Three products of one activation with other nodes in between; then one of another.
void shared(MadeUpGraph & g) {
    ggml_tensor * x = g.activation("x");
    ggml_tensor * q = g.product("q", g.matrix("wq"), x);
    g.relu("rope_q", q);
    ggml_tensor * k = g.product("k", g.matrix("wk"), x);
    g.relu("rope_k", k);
    g.product("v", g.matrix("gate"), x);
    g.product("other", g.matrix("w"), g.activation("y"));
}

// What stands in between reads, or writes, the memory of the later result.
void taken(MadeUpGraph & g, bool is_written) {
    ggml_tensor * x = g.activation("x");
    ggml_tensor * old = g.activation("old");
    g.product("q", g.matrix("wq"), x);
    ggml_tensor * between = ggml_relu(g.context(), old);
    g.add(is_written ? g.put_at(between, "between", address_of(old)) : g.put(between, "between"));
    g.add(g.put_at(ggml_mul_mat(g.context(), g.matrix("wk"), x), "k", address_of(old)));
    g.product("v", g.matrix("wv"), x);
}

// Matrices that are rotated, not all of them alike.
void rotated(MadeUpGraph & g) {
    ggml_tensor * x = g.activation("x");
    g.product("first", g.matrix("a1"), x);
    g.product("alike", g.matrix("a2"), x);
    g.product("unlike", g.matrix("b1"), x);
    g.product("plain", g.matrix("w"), x);
    g.product("again", g.matrix("a3"), x);
}

// The activation changes between two products.
void changed(MadeUpGraph & g) {
    ggml_tensor * x = g.activation("x");
    g.product("before", g.matrix("w1"), x);
    ggml_tensor * view = ggml_reshape_2d(g.context(), x, 2 * N_IN, 1);
    g.add(g.put_at(view, "view", address_of(x)));
    g.product("still", g.matrix("w2"), x);
    ggml_tensor * inplace = ggml_relu_inplace(g.context(), x);
    g.add(g.put_at(inplace, "inplace", address_of(x)));
    g.product("after", g.matrix("w3"), x);
}

// Experts share an activation with each other, and not with a plain product.
void experts(MadeUpGraph & g) {
    ggml_tensor * x = g.put(ggml_new_tensor_3d(g.context(), GGML_TYPE_F32, N_IN, 1, 5), "x");
    ggml_tensor * ids = g.ids(2, 5);
    g.expert_product("gate", g.experts("g1"), x, ids);
    g.expert_product("up", g.experts("w1"), x, ids);
    g.product("shared", g.matrix("w2"), x);
}

// A table that serves as embedding and head.
void tied(MadeUpGraph & g) {
    ggml_tensor * table = g.matrix("a");
    ggml_tensor * rows =
        ggml_get_rows(g.context(), table, g.put(ggml_new_tensor_1d(g.context(), GGML_TYPE_I32, 3), "ids"));
    g.add(g.put(rows, "embedding"));
    g.product("head", table, g.relu("hidden", rows));
}

// A node that is not to be computed, and a matrix that nobody knows.
void skipped(MadeUpGraph & g) {
    ggml_tensor * x = g.activation("x");
    g.product("skipped", g.matrix("?"), x)->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
    g.product("computed", g.matrix("w"), x);
}
void unknown(MadeUpGraph & g) {
    ggml_tensor * x = g.activation("x");
    g.product("known", g.matrix("w"), x);
    g.product("not known", g.matrix("?"), x);
    g.product("never reached", g.matrix("w"), x);
}

// On devices whose buffers all count their addresses from the same number, equal addresses are not the same memory.
bool is_not_host(ggml_backend_buffer_type_t) {
    return false;
}
void devices(MadeUpGraph & g) {
    static ggml_backend_buffer_type type{};
    type.iface.is_host = is_not_host;
    static ggml_backend_buffer buffers[2] = {};
    buffers[0].buft = buffers[1].buft = &type;
    ggml_tensor * x = g.activation("x");
    ggml_tensor * y = g.activation("y");
    x->buffer = &buffers[0];
    y->buffer = &buffers[1];
    g.product("first", g.matrix("w1"), x)->buffer = &buffers[0];
    ggml_tensor * over_x = ggml_relu(g.context(), y);
    g.add(g.put_at(over_x, "over x", address_of(x)))->buffer = &buffers[1];
    ggml_tensor * over_second = g.relu("over second", y);
    over_second->buffer = &buffers[1];
    ggml_tensor * second = ggml_mul_mat(g.context(), g.matrix("w2"), x);
    g.add(g.put_at(second, "second", address_of(over_second)))->buffer = &buffers[0];
}

const char * name_of(Plan::Kind kind) {
    switch (kind) {
    case Plan::Kind::OTHER: return "OTHER";
    case Plan::Kind::LOOK_UP: return "LOOK_UP";
    case Plan::Kind::PRODUCT: return "PRODUCT";
    case Plan::Kind::EXPERT_PRODUCT: return "EXPERT_PRODUCT";
    }
    return "?";
}

std::string rotation_text(const Rotation * rotation) {
    return rotation == nullptr ? "" : rotation == &ROTATION_A ? " (rotation a)" : " (rotation b)";
}

void print(const Plan & plan) {
    for (size_t i = 0; i < plan.steps.size(); i++) {
        const Plan::Step & step = plan.steps[i];
        std::printf("%s %s", name_of(step.kind), step.node->name);
        if (step.kind == Plan::Kind::LOOK_UP) {
            std::printf("%s", rotation_text(step.treatment->rotation).c_str());
        }
        if (step.activation >= 0) {
            const Plan::Activation & activation = plan.activations.at(static_cast<size_t>(step.activation));
            std::printf("  %s %s%s", step.makes_ready ? "ready" : "uses", activation.x->name,
                        rotation_text(activation.rotation).c_str());
        }
        if (step.group >= 0) {
            const Plan::Group & group = plan.groups.at(static_cast<size_t>(step.group));
            if (std::count(group.steps.begin(), group.steps.end(), static_cast<int>(i)) != 1 ||
                group.activation != step.activation) {
                fail("a group does not know its steps");
            }
            std::printf("  group %d", step.group);
        }
        std::printf("%s\n", step.treatment != nullptr && step.treatment->squared_relu ? "  squared" : "");
    }
    if (plan.unknown != nullptr) {
        std::printf("unknown: %s\n", plan.unknown->name);
    }
}

}  // namespace

int main(int, char ** argv) {
    const std::map<std::string, void (*)(MadeUpGraph &)> graphs = {
        {"shared", shared},
        {"read", [](MadeUpGraph & g) { taken(g, false); }},
        {"written", [](MadeUpGraph & g) { taken(g, true); }},
        {"rotated", rotated},
        {"changed", changed},
        {"experts", experts},
        {"tied", tied},
        {"skipped", skipped},
        {"unknown", unknown},
        {"devices", devices},
    };
    std::string error;
    if (tern::connect_host(reinterpret_cast<const void *>(&ggml_backend_reg_count), error) == nullptr) {
        fail(error);
    }
    MadeUpGraph graph;
    graphs.at(argv[1])(graph);
    print(tern::make_plan(graph.graph(), treatment_of));
    return 0;
}
