// The stock nodes of the plan, and the graph that is made of them: see gpu_steps.h.
#include "gpu_steps.h"

#include "../plan/plan.h"
#include "gpu_constants.h"
#include "grafted_device.h"
#include "twin.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <new>
#include <optional>
#include <vector>

namespace tern {

namespace {

// What every backend takes at once; those that take more gain little by it.
constexpr int64_t MAX_HADAMARD = 512;

// Results of our nodes begin at multiples of this.
constexpr size_t ALIGNMENT = 512;

// Why a graph must not be run. The message is for stderr.
struct Refused {
    std::string message;
};

bool is_contiguous(const ggml_tensor * t) {
    size_t expected = sizeof(float);
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        if (t->nb[i] != expected && t->ne[i] != 1) {
            return false;
        }
        expected *= static_cast<size_t>(t->ne[i]);
    }
    return true;
}

// Whether it is the product with a gate of squared ReLU, on this device.
bool is_gate_product(const ggml_tensor * node) {
    if (node == nullptr || node->op != host().op_mul_mat || !is_stored_as_twin(node->src[0])) {
        return false;
    }
    const Treatment * treatment = gpu_treatment_of(node->src[0]);
    return treatment != nullptr && treatment->squared_relu;
}

bool is_silu_of(const ggml_tensor * node, const ggml_tensor * gate) {
    const bool is_silu = node->op == host().op_unary && std::strcmp(host().ggml_op_desc(node), "SILU") == 0;
    const bool is_swiglu = node->op == host().op_glu && std::strcmp(host().ggml_op_desc(node), "SWIGLU") == 0;
    return (is_silu || (is_swiglu && node->src[1] != nullptr)) && node->src[0] == gate && node->src[1] != gate;
}

// Memory on the device for the results of our nodes.
class Scratch {
  public:
    explicit Scratch(ggml_backend_buffer_type_t type) : type_(type) {}
    ~Scratch() { release(); }
    Scratch(const Scratch &) = delete;
    Scratch & operator=(const Scratch &) = delete;

    // Whoever still works in it has to have ended. Throws std::bad_alloc.
    void reserve(size_t n_bytes) {
        release();
        buffer_ = host().ggml_backend_buft_alloc_buffer(type_, n_bytes);
        if (buffer_ == nullptr) {
            throw std::bad_alloc();
        }
    }
    size_t size() const { return buffer_ == nullptr ? 0 : host().ggml_backend_buffer_get_size(buffer_); }
    ggml_backend_buffer_t buffer() const { return buffer_; }
    char * base() const { return static_cast<char *>(host().ggml_backend_buffer_get_base(buffer_)); }

  private:
    void release() {
        if (buffer_ != nullptr) {
            host().ggml_backend_buffer_free(buffer_);
            buffer_ = nullptr;
        }
    }

    ggml_backend_buffer_type_t type_;
    ggml_backend_buffer_t buffer_ = nullptr;
};

}  // namespace

struct GpuSteps::State {
    ggml_backend_t backend;
    GpuConstants constants;
    Scratch scratch;

    // Of the graph that what follows was made from, and of what was made: two graphs with the same are the same, down to the
    // memory of their nodes. In decode most tokens repeat the graph of the one before.
    uint64_t uid = 0;
    uint64_t made_uid = 0;
    std::vector<ggml_tensor *> nodes;
    ggml_context * context = nullptr;
    std::deque<ggml_tensor> twins;
    struct Swap {
        ggml_tensor ** source;  // of a node
        ggml_tensor * original;
        ggml_tensor * replacement;
    };
    std::vector<Swap> swaps;

    // Where results of our nodes lie: the rotation takes turns between two places, squared ReLU has two of its own.
    enum Place { FIRST, SECOND, RELU, SQUARED, PLACES };
    struct Result {
        ggml_tensor * tensor;
        Place place;
    };
    std::vector<Result> results;
    std::vector<ggml_tensor *> views;  // of results or of nodes, each after what it is a view of
    size_t place_bytes[PLACES] = {};

    State(ggml_backend_t backend, ggml_backend_buffer_type_t type) : backend(backend), constants(type), scratch(type) {}
    ~State() { clear(); }

    void clear() {
        uid = 0;
        nodes.clear();
        if (context != nullptr) {
            host().ggml_free(context);
            context = nullptr;
        }
        twins.clear();
        swaps.clear();
        results.clear();
        views.clear();
        std::fill(std::begin(place_bytes), std::end(place_bytes), 0);
    }

    // ---- nodes ----

    // Tensors of our own that a plan can need at most.
    static size_t max_tensors(const Plan & plan) {
        // Of an activation: reshaped, permuted, made contiguous, multiplied; H; two views and two nodes with two views for each
        // doubling of a block, of which there are few; one view for each product.
        constexpr size_t OF_ACTIVATION = 8 + 6 * 24;
        constexpr size_t OF_NODE = 4;
        return plan.activations.size() * OF_ACTIVATION + plan.steps.size() * OF_NODE;
    }

    ggml_tensor * view(ggml_tensor * tensor) {
        views.push_back(tensor);
        return tensor;
    }

    // A node whose result lies in a place of ours.
    ggml_tensor * add(ggml_tensor * node, Place place) {
        node->flags |= GGML_TENSOR_FLAG_COMPUTE;
        nodes.push_back(node);
        results.push_back({node, place});
        place_bytes[place] = std::max(place_bytes[place], host().ggml_nbytes(node));
        return node;
    }

    // A node whose result lies where another's does.
    void add_in_place_of(ggml_tensor * node, const ggml_tensor * other) {
        node->flags |= other->flags | GGML_TENSOR_FLAG_COMPUTE;
        node->buffer = other->buffer;
        node->data = other->data;
        node->view_src = other->view_src;
        node->view_offs = other->view_offs;
        nodes.push_back(node);
    }

    void swap(ggml_tensor *& source, ggml_tensor * replacement) { swaps.push_back({&source, source, replacement}); }

    // Columns of blocks: [size, rest].
    ggml_tensor * blocks_of(ggml_tensor * x, int64_t size) {
        const int64_t n = x->ne[0] * x->ne[1] * x->ne[2] * x->ne[3];
        return view(host().ggml_reshape_4d(context, x, size, n / size, 1, 1));
    }

    // Where x is a norm times its weights, and nobody but products of this activation sees it, its weights can take the factors.
    // Returns whether they did.
    bool fold_factors(const ggml_cgraph * graph, const Plan & plan, int activation, ggml_tensor * factors) {
        ggml_tensor * x = const_cast<ggml_tensor *>(plan.activations[static_cast<size_t>(activation)].x);
        const bool is_norm = x->op == host().op_mul && x->src[0]->op == host().op_rms_norm && x->view_src == nullptr &&
                             (x->flags & GGML_TENSOR_FLAG_OUTPUT) == 0;
        // Without a number of its own a graph may be a piece of one, cut so that somebody can look at the values.
        if (!is_norm || graph->uid == 0 || !host().has_graph_uids) {
            return false;
        }
        ggml_tensor * weights = x->src[1];
        if (weights->op != host().op_none || weights->type != GGML_TYPE_F32 || weights->buffer == nullptr ||
            host().ggml_nbytes(weights) != host().ggml_nbytes(factors) || weights->ne[0] != factors->ne[0]) {
            return false;
        }
        int n_products = 0;
        int index = -1;
        for (size_t i = 0; i < plan.steps.size(); i++) {
            const Plan::Step & step = plan.steps[i];
            if (step.node == x) {
                index = static_cast<int>(i);
            }
            const bool is_product = step.activation == activation && is_stored_as_twin(step.node->src[0]);
            n_products += is_product ? 1 : 0;
        }
        // All that use x in the whole graph, of which this may be a part.
        if (index < 0 || ggml_node_get_use_count(graph, index) != n_products) {
            return false;
        }
        swap(x->src[1], constants.product(weights, factors));
        return true;
    }

    // H(s * P(x)), [n_in, columns], contiguous. factors: see GpuConstants, or nullptr.
    ggml_tensor * rotate(ggml_tensor * x, const Rotation & rotation, ggml_tensor * factors) {
        const int64_t n = std::min(rotation.block, MAX_HADAMARD);
        const int64_t n_cols = x->ne[1] * x->ne[2] * x->ne[3];
        Place place = FIRST;
        const auto other_place = [&] { return place = place == FIRST ? SECOND : FIRST; };
        ggml_tensor * y = x;
        if (!is_contiguous(y) && (factors == nullptr || rotation.n_v != 0)) {
            y = add(host().ggml_cont(context, y), other_place());
        }
        if (rotation.n_v != 0) {
            const int64_t head = rotation.n_in / rotation.n_v;
            y = view(host().ggml_reshape_4d(context, y, head, rotation.n_k, rotation.n_v / rotation.n_k, n_cols));
            y = view(host().ggml_permute(context, y, 0, 2, 1, 3));
            y = factors != nullptr ? host().ggml_mul(context, y, factors) : host().ggml_cont(context, y);
            y = add(y, other_place());
        } else if (factors != nullptr) {
            y = add(host().ggml_mul(context, y, factors), other_place());
        }
        y = host().ggml_mul_mat(context, constants.hadamard(n), blocks_of(y, n));
        y->op_params[1] = GGML_HINT_SRC0_IS_HADAMARD;
        y = add(y, other_place());
        for (int64_t half = n; half < rotation.block; half *= 2) {
            y = join(y, half, other_place());
        }
        return y;
    }

    // Blocks of 2 * half: the sum of the halves of x, and behind it their difference.
    ggml_tensor * join(ggml_tensor * x, int64_t half, Place place) {
        const int64_t n = x->ne[0] * x->ne[1] * x->ne[2] * x->ne[3] / (2 * half);
        const size_t stride = 2 * static_cast<size_t>(half) * sizeof(float);
        const auto half_of = [&](ggml_tensor * whole, int64_t i) {
            return view(host().ggml_view_4d(context, whole, half, n, 1, 1, stride, stride * static_cast<size_t>(n),
                                            stride * static_cast<size_t>(n),
                                            static_cast<size_t>(i * half) * sizeof(float)));
        };
        ggml_tensor * joined = host().ggml_new_tensor_3d(context, GGML_TYPE_F32, x->ne[0], x->ne[1], 1);
        results.push_back({joined, place});
        place_bytes[place] = std::max(place_bytes[place], host().ggml_nbytes(joined));
        for (int i = 0; i < 2; i++) {
            ggml_tensor * a = half_of(x, 0);
            ggml_tensor * b = half_of(x, 1);
            ggml_tensor * result = half_of(joined, i);
            // The view becomes the node that fills it.
            const ggml_tensor * made = i == 0 ? host().ggml_add(context, a, b) : host().ggml_sub(context, a, b);
            result->op = made->op;
            std::memcpy(result->op_params, made->op_params, sizeof(result->op_params));
            std::copy(std::begin(made->src), std::end(made->src), std::begin(result->src));
            result->flags |= GGML_TENSOR_FLAG_COMPUTE;
            nodes.push_back(result);
        }
        return joined;
    }

    // What stands for SILU of a gate's product, or SWIGLU with it.
    void add_squared_relu(ggml_tensor * node) {
        ggml_tensor * relu = add(host().ggml_relu(context, node->src[0]), RELU);
        if (node->op == host().op_unary) {
            add_in_place_of(host().ggml_sqr(context, relu), node);
            return;
        }
        ggml_tensor * squared = add(host().ggml_sqr(context, relu), SQUARED);
        add_in_place_of(host().ggml_mul(context, squared, node->src[1]), node);
    }

    // ---- the graph ----

    // Returns whether anything in it is ours.
    bool build(const ggml_cgraph * graph, const Plan & plan) {
        context = host().ggml_init({max_tensors(plan) * host().ggml_tensor_overhead(), nullptr, /*no_alloc=*/true});
        if (context == nullptr) {
            throw std::bad_alloc();
        }
        std::vector<ggml_tensor *> rotated(plan.activations.size(), nullptr);
        bool any = false;
        for (const Plan::Step & step : plan.steps) {
            ggml_tensor * node = step.node;
            if (step.kind == Plan::Kind::OTHER || !is_stored_as_twin(node->src[0])) {
                any = add_other(node) || any;
                continue;
            }
            any = true;
            ggml_tensor * x = node->src[1];
            if (step.kind != Plan::Kind::LOOK_UP && step.treatment->rotation != nullptr) {
                ggml_tensor *& y = rotated[static_cast<size_t>(step.activation)];
                if (y == nullptr) {
                    const Rotation & rotation = *step.treatment->rotation;
                    ggml_tensor * factors = constants.factors(rotation, std::min(rotation.block, MAX_HADAMARD));
                    if (factors != nullptr && rotation.n_v == 0 &&
                        fold_factors(graph, plan, step.activation, factors)) {
                        factors = nullptr;
                    }
                    y = rotate(x, rotation, factors);
                    y = view(host().ggml_reshape_4d(context, y, x->ne[0], x->ne[1], x->ne[2], x->ne[3]));
                }
                x = y;
            }
            twins.push_back(twin_of(node->src[0]));
            swap(node->src[0], &twins.back());
            swap(node->src[1], x);
            nodes.push_back(node);
        }
        if (any && graph->n_nodes > 0) {
            lay_out();
        }
        return any;
    }

    // Returns whether something else stands for it.
    bool add_other(ggml_tensor * node) {
        const auto gate = std::find_if(std::begin(node->src), std::end(node->src), is_gate_product);
        if (gate == std::end(node->src) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            nodes.push_back(node);
            return false;
        }
        if (!is_silu_of(node, *gate)) {
            throw Refused{quoted(node->name) + " (" + host().ggml_op_desc(node) + ") uses the product with " +
                          quoted((*gate)->src[0]->name) + ", a gate of squared ReLU, otherwise than through SiLU"};
        }
        add_squared_relu(node);
        return true;
    }

    // Gives our results their memory, and views that of what they are views of.
    void lay_out() {
        size_t offsets[PLACES];
        size_t n_bytes = 0;
        for (int place = 0; place < PLACES; place++) {
            offsets[place] = n_bytes;
            n_bytes += (place_bytes[place] + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        }
        if (n_bytes > scratch.size()) {
            host().ggml_backend_synchronize(backend);
            scratch.reserve(n_bytes);
        }
        for (const Result & result : results) {
            result.tensor->buffer = scratch.buffer();
            result.tensor->data = scratch.base() + offsets[result.place];
        }
        for (ggml_tensor * tensor : views) {
            tensor->buffer = tensor->view_src->buffer;
            tensor->data = static_cast<char *>(tensor->view_src->data) + tensor->view_offs;
        }
    }
};

GpuSteps::GpuSteps(ggml_backend_t backend, ggml_backend_buffer_type_t type)
    : state_(std::make_unique<State>(backend, type)) {}
GpuSteps::~GpuSteps() = default;
GpuSteps::GpuSteps(GpuSteps &&) noexcept = default;

ggml_status GpuSteps::compute(ggml_cgraph * graph, const std::function<ggml_status(ggml_cgraph *)> & run) {
    State & state = *state_;
    const uint64_t uid = host().has_graph_uids ? graph->uid : 0;
    try {
        if (uid == 0 || uid != state.uid) {
            state.clear();
            const Plan plan = make_plan(graph, gpu_treatment_of);
            if (plan.unknown != nullptr) {
                throw Refused{"tensor " + quoted(plan.unknown->name) +
                              " is not as in any file opened so far, so that its rotation is not known; without it the "
                              "model would talk nonsense"};
            }
            if (!state.build(graph, plan)) {
                state.clear();
                return run(graph);
            }
            state.uid = uid;
            state.made_uid = uid != 0 && host().ggml_graph_next_uid != nullptr ? host().ggml_graph_next_uid() : 0;
        }
    } catch (const Refused & refused) {
        state.clear();
        std::fprintf(stderr, "ggml-tern: %s\n", refused.message.c_str());
        return GGML_STATUS_FAILED;
    } catch (const std::bad_alloc &) {
        state.clear();
        return GGML_STATUS_ALLOC_FAILED;
    }
    for (const State::Swap & swap : state.swaps) {
        *swap.source = swap.replacement;
    }
    ggml_cgraph made = *graph;
    made.nodes = state.nodes.data();
    made.n_nodes = static_cast<int>(state.nodes.size());
    made.uid = state.made_uid;
    const ggml_status status = run(&made);
    for (const State::Swap & swap : state.swaps) {
        *swap.source = swap.original;
    }
    return status;
}

}  // namespace tern
