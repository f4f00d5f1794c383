// The custom operations, and the graph that is made of them: see cpu_steps.h.
#include "cpu_steps.h"

#include "../cpu/product.h"
#include "../cpu/shared_work.h"
#include "../plan/plan.h"
#include "attention.h"
#include "backend.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <new>
#include <vector>

namespace tern {

namespace {

FloatColumns columns_of(const ggml_tensor * x) {
    return {static_cast<const char *>(x->data),
            x->ne[0],
            x->ne[1],
            x->ne[2],
            x->ne[2] * x->ne[3],
            x->nb[1],
            x->nb[2],
            x->nb[3]};
}

// One of the matrices that a weight tensor stacks in its third and fourth dimension.
ProductMatrix matrix_of(const ggml_tensor * w, int64_t i2, int64_t i3) {
    ProductMatrix matrix;
    if (is_tiled(w)) {
        matrix.tiles = tiles_of(w, i3 * w->ne[2] + i2);
    } else {
        matrix.type = ternary_type_of(w->type);
        matrix.tiles = {nullptr, w->ne[0], w->ne[1], tile_group(*matrix.type), false};
        matrix.rows = static_cast<const uint8_t *>(w->data) + i2 * w->nb[2] + i3 * w->nb[3];
        matrix.row_stride = w->nb[1];
    }
    return matrix;
}

float * result_row(const ggml_tensor * node, int64_t i1, int64_t i2, int64_t i3) {
    return reinterpret_cast<float *>(static_cast<char *>(node->data) + i1 * node->nb[1] + i2 * node->nb[2] +
                                     i3 * node->nb[3]);
}

// What the steps of a graph share.
struct Shared {
    SharedWork works[2];  // of the multiplications, in turn
    ThreadScratch scratch;
};

// ---- the data of the custom operations ----

struct Preparation {
    const ReadyColumns & columns;
    const Shared & shared;
};

// Products of one activation that run as one operation.
struct Multiplication {
    WorkInTurn work;
    const Shared & shared;
    std::vector<Product> products = {};
    std::vector<int64_t> first_items = {};  // of each product, among all
    int64_t n_items = 0;

    // The products of a node, one for each slice of x. A matrix serves x->ne[2] / w->ne[2] of them (grouped heads).
    void add(const ggml_tensor * node, const ReadyColumns & columns, bool squared_relu) {
        const ggml_tensor * w = node->src[0];
        const ggml_tensor * x = node->src[1];
        for (int64_t slice = 0; slice < x->ne[2] * x->ne[3]; slice++) {
            const int64_t i2 = slice % x->ne[2];
            const int64_t i3 = slice / x->ne[2];
            ProductMatrix matrix = matrix_of(w, i2 / (x->ne[2] / w->ne[2]), i3 / (x->ne[3] / w->ne[3]));
            matrix.squared_relu = squared_relu;
            products.emplace_back(kernels(), columns, slice, matrix, result_row(node, 0, i2, i3), node->nb[1]);
            first_items.push_back(n_items);
            n_items += products.back().n_items();
        }
    }

    size_t scratch_bytes() const {
        size_t n_bytes = 0;
        for (const Product & product : products) {
            n_bytes = std::max(n_bytes, product.scratch_bytes());
        }
        return n_bytes;
    }
};

// A product with experts is an operation of its own.
struct ExpertMultiplication {
    WorkInTurn work;
    const Shared & shared;
    const ggml_tensor * node;
    const ReadyColumns & columns;
    bool squared_relu;

    int64_t n_experts() const { return node->src[0]->ne[2]; }
    int64_t n_pairs() const { return node->src[2]->ne[0] * node->src[2]->ne[1]; }

    ProductMatrix matrix(int64_t expert) const {
        ProductMatrix matrix = matrix_of(node->src[0], expert, 0);
        matrix.squared_relu = squared_relu;
        return matrix;
    }

    size_t scratch_bytes() const;
};

// Which (slot, token) pairs chose which expert, in order: pairs[begins[e]] to pairs[begins[e + 1]] are those of expert e. Only
// the first n_active of `active` chose any, or rather were chosen.
struct Choices {
    int32_t * experts;  // of each pair, -1 for one that does not exist
    int32_t * pairs;
    int32_t * begins;
    int32_t * active;
    int64_t n_active = 0;

    Choices(const ggml_tensor * ids, int64_t n_experts, Scratch & scratch)
        : experts(scratch.take<int32_t>(ids->ne[0] * ids->ne[1])),
          pairs(scratch.take<int32_t>(ids->ne[0] * ids->ne[1])), begins(scratch.take<int32_t>(n_experts + 1)),
          active(scratch.take<int32_t>(n_experts)) {
        const int64_t n_pairs = ids->ne[0] * ids->ne[1];
        std::fill_n(begins, n_experts + 1, 0);
        for (int64_t pair = 0; pair < n_pairs; pair++) {
            int32_t expert;
            std::memcpy(&expert,
                        static_cast<const char *>(ids->data) + pair % ids->ne[0] * ids->nb[0] +
                            pair / ids->ne[0] * ids->nb[1],
                        sizeof(expert));
            experts[pair] = expert >= 0 && expert < n_experts ? expert : -1;
            if (experts[pair] >= 0) {
                begins[expert + 1]++;
            }
        }
        for (int64_t e = 0; e < n_experts; e++) {
            if (begins[e + 1] > 0) {
                active[n_active++] = static_cast<int32_t>(e);
            }
            begins[e + 1] += begins[e];
        }
        // Filling them moves each begin to its end, which is the next one's begin.
        for (int64_t pair = 0; pair < n_pairs; pair++) {
            if (experts[pair] >= 0) {
                pairs[begins[experts[pair]]++] = static_cast<int32_t>(pair);
            }
        }
        for (int64_t e = n_experts; e > 0; e--) {
            begins[e] = begins[e - 1];
        }
        begins[0] = 0;
    }

    static size_t scratch_bytes(int64_t n_pairs, int64_t n_experts) {
        return 2 * Scratch::bytes<int32_t>(n_pairs) + Scratch::bytes<int32_t>(n_experts + 1) +
               Scratch::bytes<int32_t>(n_experts);
    }
};

size_t ExpertMultiplication::scratch_bytes() const {
    // At worst, all choose the same expert.
    return Choices::scratch_bytes(n_pairs(), n_experts()) + Scratch::bytes<const uint8_t *>(n_pairs()) +
           Scratch::bytes<float *>(n_pairs()) +
           Scratch::bytes<uint8_t>(n_pairs() * static_cast<int64_t>(columns.layout().bytes)) +
           multiply_scratch_bytes(kernels(), matrix(0), n_pairs());
}

struct LookUp {
    const Rotation * rotation;  // or nullptr
    const Shared & shared;
};

// ---- the functions of the custom operations: every thread calls them, ith of nth ----

void prepare(ggml_tensor *, int ith, int nth, void * data) {
    const auto & preparation = *static_cast<const Preparation *>(data);
    preparation.columns.prepare(ith, nth, preparation.shared.scratch.of(ith));
}

void multiply(ggml_tensor *, int ith, int nth, void * data) {
    auto & task = *static_cast<Multiplication *>(data);
    const Scratch scratch = task.shared.scratch.of(ith);
    task.work.run(task.n_items, ith, nth, [&](int64_t begin, int64_t end) {
        for (size_t i = 0; i < task.products.size(); i++) {
            const int64_t first = std::max<int64_t>(begin - task.first_items[i], 0);
            const int64_t last = std::min(end - task.first_items[i], task.products[i].n_items());
            if (first < last) {
                task.products[i].multiply(first, last, scratch);
            }
        }
    });
}

void multiply_experts(ggml_tensor *, int ith, int nth, void * data) {
    auto & task = *static_cast<ExpertMultiplication *>(data);
    const ggml_tensor * x = task.node->src[1];
    const ggml_tensor * ids = task.node->src[2];
    const ColumnLayout & layout = task.columns.layout();

    Scratch scratch = task.shared.scratch.of(ith);
    const Choices choices(ids, task.n_experts(), scratch);  // every thread works this out for itself
    auto ** in = scratch.take<const uint8_t *>(task.n_pairs());
    auto ** out = scratch.take<float *>(task.n_pairs());
    auto * panels = scratch.take<uint8_t>(task.n_pairs() * static_cast<int64_t>(layout.bytes));

    const Items items(kernels(), task.matrix(0).tiles, task.n_pairs() / task.n_experts());  // as if chosen evenly
    int64_t expert = -1;
    int64_t n_cols = 0;
    const auto meet = [&](int64_t chosen) {
        expert = chosen;
        n_cols = 0;
        for (int32_t i = choices.begins[chosen]; i < choices.begins[chosen + 1]; i++) {
            const int64_t slot = choices.pairs[i] % ids->ne[0];
            const int64_t token = choices.pairs[i] / ids->ne[0];
            in[n_cols] = task.columns.column(token * x->ne[1] + slot % x->ne[1]);
            out[n_cols++] = result_row(task.node, slot, token, 0);
        }
        make_panels(kernels(), layout, in, n_cols, panels);
    };
    task.work.run(items.count * choices.n_active, ith, nth, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t chosen = choices.active[begin / items.count];
            const int64_t first = begin % items.count;
            const int64_t last = std::min(items.count, first + end - begin);
            if (chosen != expert) {
                meet(chosen);
            }
            multiply_panels(kernels(), task.matrix(expert), items.tile(first), items.tile(last), layout, panels, n_cols,
                            out, scratch);
            begin += last - first;
        }
    });
}

void look_up(ggml_tensor * dst, int ith, int nth, void * data) {
    const auto & task = *static_cast<const LookUp *>(data);
    const ggml_tensor * w = dst->src[0];
    const ggml_tensor * ids = dst->src[1];
    const int64_t n_rows = ids->ne[0] * ids->ne[1] * ids->ne[2];
    for (int64_t r = n_rows * ith / nth; r < n_rows * (ith + 1) / nth; r++) {
        const int64_t i0 = r % ids->ne[0];
        const int64_t i1 = r / ids->ne[0] % ids->ne[1];
        const int64_t i2 = r / ids->ne[0] / ids->ne[1];
        int32_t row;
        std::memcpy(&row, static_cast<const char *>(ids->data) + i0 * ids->nb[0] + i1 * ids->nb[1] + i2 * ids->nb[2],
                    sizeof(row));
        look_up_row(kernels(), matrix_of(w, i1, i2), task.rotation, row, result_row(dst, i0, i1, i2),
                    task.shared.scratch.of(ith));
    }
}

}  // namespace

struct CpuSteps::State {
    // Of the graph that all of this was built from, if it has one: two graphs with the same are the same, down to the memory
    // of their nodes. In decode most tokens repeat the graph of the one before.
    uint64_t uid = 0;
    std::vector<ggml_tensor *> nodes;
    std::deque<ggml_tensor> replaced;
    std::deque<ReadyColumns> activations;
    std::deque<Preparation> preparations;
    std::deque<Multiplication> multiplications;
    std::deque<ExpertMultiplication> expert_multiplications;
    std::deque<LookUp> look_ups;
    std::deque<AttentionTask> attentions;
    size_t n_works = 0;
    size_t scratch_bytes = 0;  // of a thread
    Shared shared;
    StreamedMemory columns;  // ready, of one activation after the other
    size_t columns_bytes = 0;
    std::vector<float> attention_partials;

    void clear() {
        uid = 0;
        nodes.clear();
        replaced.clear();
        activations.clear();
        preparations.clear();
        multiplications.clear();
        expert_multiplications.clear();
        look_ups.clear();
        attentions.clear();
        n_works = 0;
        scratch_bytes = 0;
    }

    // Before every run.
    void reset_work() {
        for (SharedWork & work : shared.works) {
            work.reset();
        }
        for (AttentionTask & task : attentions) {
            task.work.reset();
        }
    }

    // The node becomes a custom operation whose threads want so much scratch memory.
    void add_custom(const ggml_tensor * node, ggml_custom_op_t function, void * data, size_t scratch) {
        replaced.push_back(*node);
        ggml_tensor & custom = replaced.back();
        custom.op = host().op_custom;
        const ggml_custom_op_params params{function, GGML_N_TASKS_MAX, data};
        std::memset(custom.op_params, 0, sizeof(custom.op_params));
        std::memcpy(custom.op_params, &params, sizeof(params));
        nodes.push_back(&custom);
        scratch_bytes = std::max(scratch_bytes, scratch);
    }

    void build(const Plan & plan) {
        for (const Plan::Activation & a : plan.activations) {
            activations.emplace_back(kernels(), a.rotation, columns_of(a.x), a.for_experts);
        }
        for (const Plan::Step & step : plan.steps) {
            if (step.makes_ready) {
                ReadyColumns & ready = activations[static_cast<size_t>(step.activation)];
                add_custom(step.node, prepare, &preparations.emplace_back(Preparation{ready, shared}),
                           ready.scratch_bytes());
            }
            switch (step.kind) {
            case Plan::Kind::OTHER: add_other(step.node); break;
            case Plan::Kind::LOOK_UP: add_look_up(step); break;
            case Plan::Kind::PRODUCT: add_group(plan, step); break;
            case Plan::Kind::EXPERT_PRODUCT: add_expert_product(step); break;
            }
        }
        lay_out();
    }

    void add_other(ggml_tensor * node) {
        if (!is_our_attention(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            nodes.push_back(node);
            return;
        }
        AttentionTask & task = attentions.emplace_back(node, shared.scratch);
        add_custom(node, attend, &task, task.work.scratch_bytes());
        if (task.work.is_split()) {
            add_custom(node, combine_attention, &task, 0);
        }
    }

    void add_look_up(const Plan::Step & step) {
        LookUp & task = look_ups.emplace_back(LookUp{step.treatment->rotation, shared});
        add_custom(step.node, look_up, &task,
                   look_up_scratch_bytes(matrix_of(step.node->src[0], 0, 0), step.treatment->rotation));
    }

    // All products of the group, where the first one stands.
    void add_group(const Plan & plan, const Plan::Step & step) {
        const Plan::Group & group = plan.groups[static_cast<size_t>(step.group)];
        if (&step != &plan.steps[static_cast<size_t>(group.steps.front())]) {
            return;
        }
        Multiplication & task =
            multiplications.emplace_back(Multiplication{WorkInTurn(shared.works, n_works++), shared});
        for (const int member : group.steps) {
            const Plan::Step & product = plan.steps[static_cast<size_t>(member)];
            task.add(product.node, activations[static_cast<size_t>(group.activation)], product.treatment->squared_relu);
        }
        add_custom(step.node, multiply, &task, task.scratch_bytes());
    }

    void add_expert_product(const Plan::Step & step) {
        ExpertMultiplication & task = expert_multiplications.emplace_back(
            ExpertMultiplication{WorkInTurn(shared.works, n_works++), shared, step.node,
                                 activations[static_cast<size_t>(step.activation)], step.treatment->squared_relu});
        add_custom(step.node, multiply_experts, &task, task.scratch_bytes());
    }

    // Gives the steps the memory that their results lie in.
    void lay_out() {
        size_t needed = 0;
        for (const ReadyColumns & activation : activations) {
            needed = std::max(needed, activation.n_bytes());
        }
        if (needed > columns_bytes) {
            columns = allocate_streamed(needed);
            columns_bytes = needed;
        }
        for (ReadyColumns & activation : activations) {
            activation.lie_in(columns.get());
        }
        size_t n_partials = 0;
        for (const AttentionTask & task : attentions) {
            n_partials = std::max(n_partials, task.work.n_partials());
        }
        if (attention_partials.size() < n_partials) {
            attention_partials.resize(n_partials);
        }
        for (AttentionTask & task : attentions) {
            task.partials = attention_partials.data();
        }
    }
};

CpuSteps::CpuSteps() : state_(std::make_unique<State>()) {}
CpuSteps::~CpuSteps() = default;

ggml_status CpuSteps::compute(ggml_backend_t cpu, const ggml_cgraph * graph, int n_threads) {
    State & state = *state_;
    const uint64_t uid = host().has_graph_uids ? graph->uid : 0;
    try {
        if (uid == 0 || uid != state.uid) {
            state.clear();
            const Plan plan = make_plan(graph, treatment_of);
            if (plan.unknown != nullptr) {
                std::fprintf(
                    stderr,
                    "ggml-tern: tensor %s is not as in any file opened so far, so that its rotation is not known; "
                    "without it the model would talk nonsense\n",
                    quoted(plan.unknown->name).c_str());
                return GGML_STATUS_FAILED;
            }
            state.build(plan);
            state.uid = uid;
        }
        state.shared.scratch.reserve(n_threads, state.scratch_bytes);
    } catch (const std::bad_alloc &) {
        return GGML_STATUS_ALLOC_FAILED;
    }
    state.reset_work();
    ggml_cgraph copy = *graph;
    copy.nodes = state.nodes.data();
    copy.n_nodes = static_cast<int>(state.nodes.size());
    copy.uid = 0;
    return host().ggml_backend_graph_compute(cpu, &copy);
}

}  // namespace tern
