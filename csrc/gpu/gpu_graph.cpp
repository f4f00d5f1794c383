// The stock nodes of a plan, and the graph that is made of them.
#include "gpu_graph.h"

#include "grafted_device.h"
#include "twin.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace tern {

namespace {

// What every backend takes at once; those that take more gain little by it.
constexpr int64_t MAX_HADAMARD = 512;

// Results of our nodes begin at multiples of this.
constexpr size_t ALIGNMENT = 512;

size_t aligned(size_t n_bytes) {
    return (n_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

// Tensors of our own that a plan can need at most.
size_t max_tensors(const Plan & plan) {
    constexpr size_t OF_NODE = 4;
    size_t n = plan.steps.size() * OF_NODE;
    for (const Plan::Activation & activation : plan.activations) {
        // Made contiguous, reshaped, permuted, multiplied, in blocks, H, reshaped again.
        n += 8;
        for (int64_t half = MAX_HADAMARD; activation.rotation != nullptr && half < activation.rotation->block;
             half *= 2) {
            n += 9;  // what joins the halves: a result, six views, a sum, a difference
        }
    }
    return n;
}

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

}  // namespace

void GpuScratch::reserve(size_t n_bytes) {
    release();
    buffer_ = host().ggml_backend_buft_alloc_buffer(type_, n_bytes);
    if (buffer_ == nullptr) {
        throw std::bad_alloc();
    }
}

void GpuScratch::release() {
    if (buffer_ != nullptr) {
        host().ggml_backend_buffer_free(buffer_);
        buffer_ = nullptr;
    }
}

ggml_tensor * GpuGraph::view(ggml_tensor * tensor) {
    views_.push_back(tensor);
    return tensor;
}

// A node whose result lies in a place of ours.
ggml_tensor * GpuGraph::add(ggml_tensor * node, Place place) {
    node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    nodes_.push_back(node);
    results_.push_back({node, place});
    place_bytes_[place] = std::max(place_bytes_[place], host().ggml_nbytes(node));
    return node;
}

// A node whose result lies where another's does.
void GpuGraph::add_in_place_of(ggml_tensor * node, const ggml_tensor * other) {
    node->flags |= other->flags | GGML_TENSOR_FLAG_COMPUTE;
    node->buffer = other->buffer;
    node->data = other->data;
    node->view_src = other->view_src;
    node->view_offs = other->view_offs;
    nodes_.push_back(node);
}

void GpuGraph::swap(ggml_tensor *& source, ggml_tensor * replacement) {
    swaps_.push_back({&source, source, replacement});
}

// Columns of blocks: [size, rest].
ggml_tensor * GpuGraph::blocks_of(ggml_tensor * x, int64_t size) {
    const int64_t n = x->ne[0] * x->ne[1] * x->ne[2] * x->ne[3];
    return view(host().ggml_reshape_4d(context_.get(), x, size, n / size, 1, 1));
}

// Where x is a norm times its weights, and nobody but products of this activation sees it, its weights can take the factors.
// Returns whether they did.
bool GpuGraph::fold_factors(const ggml_cgraph * graph, const Plan & plan, int activation, ggml_tensor * factors) {
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
    swap(x->src[1], constants_.product(weights, factors));
    return true;
}

// H(s * P(x)), [n_in, columns], contiguous. factors: see GpuConstants, or nullptr.
ggml_tensor * GpuGraph::rotate(ggml_tensor * x, const Rotation & rotation, ggml_tensor * factors) {
    const int64_t n = std::min(rotation.block, MAX_HADAMARD);
    const int64_t n_cols = x->ne[1] * x->ne[2] * x->ne[3];
    Place place = FIRST;
    const auto other_place = [&] { return place = place == FIRST ? SECOND : FIRST; };
    ggml_tensor * y = x;
    if (!is_contiguous(y) && (factors == nullptr || rotation.n_v != 0)) {
        y = add(host().ggml_cont(context_.get(), y), other_place());
    }
    if (rotation.n_v != 0) {
        const int64_t head = rotation.n_in / rotation.n_v;
        y = view(host().ggml_reshape_4d(context_.get(), y, head, rotation.n_k, rotation.n_v / rotation.n_k, n_cols));
        y = view(host().ggml_permute(context_.get(), y, 0, 2, 1, 3));
        y = factors != nullptr ? host().ggml_mul(context_.get(), y, factors) : host().ggml_cont(context_.get(), y);
        y = add(y, other_place());
    } else if (factors != nullptr) {
        y = add(host().ggml_mul(context_.get(), y, factors), other_place());
    }
    y = host().ggml_mul_mat(context_.get(), constants_.hadamard(n), blocks_of(y, n));
    y->op_params[1] = GGML_HINT_SRC0_IS_HADAMARD;
    y = add(y, other_place());
    for (int64_t half = n; half < rotation.block; half *= 2) {
        y = join(y, half, other_place());
    }
    return y;
}

// Blocks of 2 * half: the sum of the halves of x, and behind it their difference.
ggml_tensor * GpuGraph::join(ggml_tensor * x, int64_t half, Place place) {
    const int64_t n = x->ne[0] * x->ne[1] * x->ne[2] * x->ne[3] / (2 * half);
    const size_t stride = 2 * static_cast<size_t>(half) * sizeof(float);
    const auto half_of = [&](ggml_tensor * whole, int64_t i) {
        return view(host().ggml_view_4d(context_.get(), whole, half, n, 1, 1, stride, stride * static_cast<size_t>(n),
                                        stride * static_cast<size_t>(n),
                                        static_cast<size_t>(i * half) * sizeof(float)));
    };
    ggml_tensor * joined = host().ggml_new_tensor_3d(context_.get(), GGML_TYPE_F32, x->ne[0], x->ne[1], 1);
    results_.push_back({joined, place});
    place_bytes_[place] = std::max(place_bytes_[place], host().ggml_nbytes(joined));
    for (int i = 0; i < 2; i++) {
        ggml_tensor * a = half_of(x, 0);
        ggml_tensor * b = half_of(x, 1);
        ggml_tensor * result = half_of(joined, i);
        // The view becomes the node that fills it.
        const ggml_tensor * made =
            i == 0 ? host().ggml_add(context_.get(), a, b) : host().ggml_sub(context_.get(), a, b);
        result->op = made->op;
        std::memcpy(result->op_params, made->op_params, sizeof(result->op_params));
        std::copy(std::begin(made->src), std::end(made->src), std::begin(result->src));
        result->flags |= GGML_TENSOR_FLAG_COMPUTE;
        nodes_.push_back(result);
    }
    return joined;
}

// What stands for SILU of a gate's product, or SWIGLU with it.
void GpuGraph::add_squared_relu(ggml_tensor * node) {
    ggml_tensor * relu = add(host().ggml_relu(context_.get(), node->src[0]), RELU);
    if (node->op == host().op_unary) {
        add_in_place_of(host().ggml_sqr(context_.get(), relu), node);
        return;
    }
    ggml_tensor * squared = add(host().ggml_sqr(context_.get(), relu), SQUARED);
    add_in_place_of(host().ggml_mul(context_.get(), squared, node->src[1]), node);
}

// Returns whether something else stands for it.
bool GpuGraph::add_other(ggml_tensor * node) {
    const auto gate = std::find_if(std::begin(node->src), std::end(node->src), is_gate_product);
    if (gate == std::end(node->src) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
        nodes_.push_back(node);
        return false;
    }
    if (!is_silu_of(node, *gate)) {
        throw Refused{quoted(node->name) + " (" + host().ggml_op_desc(node) + ") uses the product with " +
                      quoted((*gate)->src[0]->name) + ", a gate of squared ReLU, otherwise than through SiLU"};
    }
    add_squared_relu(node);
    return true;
}

// What products of a step multiply with: the activation, rotated.
ggml_tensor * GpuGraph::rotated_activation(const ggml_cgraph * graph, const Plan & plan, const Plan::Step & step) {
    ggml_tensor * x = step.node->src[1];
    const Rotation & rotation = *step.treatment->rotation;
    ggml_tensor * factors = constants_.factors(rotation, std::min(rotation.block, MAX_HADAMARD));
    if (factors != nullptr && rotation.n_v == 0 && fold_factors(graph, plan, step.activation, factors)) {
        factors = nullptr;
    }
    ggml_tensor * y = rotate(x, rotation, factors);
    return view(host().ggml_reshape_4d(context_.get(), y, x->ne[0], x->ne[1], x->ne[2], x->ne[3]));
}

void GpuGraph::build(const ggml_cgraph * graph, const Plan & plan) {
    context_.reset(host().ggml_init({max_tensors(plan) * host().ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    if (context_ == nullptr) {
        throw std::bad_alloc();
    }
    std::vector<ggml_tensor *> rotated(plan.activations.size(), nullptr);
    for (const Plan::Step & step : plan.steps) {
        ggml_tensor * node = step.node;
        if (step.kind == Plan::Kind::OTHER || !is_stored_as_twin(node->src[0])) {
            is_ours_ = add_other(node) || is_ours_;
            continue;
        }
        is_ours_ = true;
        if (step.kind != Plan::Kind::LOOK_UP && step.treatment->rotation != nullptr) {
            ggml_tensor *& y = rotated[static_cast<size_t>(step.activation)];
            if (y == nullptr) {
                y = rotated_activation(graph, plan, step);
            }
            swap(node->src[1], y);
        }
        twins_.push_back(twin_of(node->src[0]));
        swap(node->src[0], &twins_.back());
        nodes_.push_back(node);
    }
}

GpuGraph::GpuGraph(const ggml_cgraph * graph, GpuConstants & constants) : constants_(constants) {
    const Plan plan = make_plan(graph, gpu_treatment_of);
    if (plan.unknown != nullptr) {
        throw Refused{"tensor " + quoted(plan.unknown->name) +
                      " is not as in any file opened so far, so that its rotation is not known; without it the model "
                      "would talk nonsense"};
    }
    build(graph, plan);
}

GpuGraph::~GpuGraph() = default;

size_t GpuGraph::scratch_bytes() const {
    size_t n_bytes = 0;
    for (const size_t of_place : place_bytes_) {
        n_bytes += aligned(of_place);
    }
    return n_bytes;
}

void GpuGraph::lie_in(const GpuScratch & scratch) {
    char * places[PLACES];
    char * next = scratch.size() > 0 ? scratch.base() : nullptr;
    for (int place = 0; place < PLACES; place++) {
        places[place] = next;
        next += aligned(place_bytes_[place]);
    }
    for (const Result & result : results_) {
        result.tensor->buffer = scratch.buffer();
        result.tensor->data = places[result.place];
    }
    for (ggml_tensor * tensor : views_) {
        tensor->buffer = tensor->view_src->buffer;
        tensor->data = static_cast<char *>(tensor->view_src->data) + tensor->view_offs;
    }
    // CUDA graphs that were captured with another memory are of another graph.
    uid_ = host().ggml_graph_next_uid != nullptr ? host().ggml_graph_next_uid() : 0;
}

GpuGraph::Swapped::Swapped(GpuGraph & graph, const ggml_cgraph * original) : made(*original), graph_(graph) {
    for (const Swap & swap : graph.swaps_) {
        *swap.source = swap.replacement;
    }
    made.nodes = graph.nodes_.data();
    made.n_nodes = static_cast<int>(graph.nodes_.size());
    made.uid = original->uid != 0 ? graph.uid_ : 0;
}

GpuGraph::Swapped::~Swapped() {
    for (const Swap & swap : graph_.swaps_) {
        *swap.source = swap.original;
    }
}

}  // namespace tern
