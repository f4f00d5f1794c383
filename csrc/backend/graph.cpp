// Running a graph: our operations become custom operations in a copy of the node list, and the stock CPU backend runs
// the whole list in one call. Our kernels thereby run in ggml's own threads, with ggml's barriers between the nodes.
//
//   the graph:       ... RMS_NORM  MUL  MUL_MAT(wq)             ROPE   MUL_MAT(wk)   ROPE ...
//   what is run:     ... RMS_NORM  MUL  prepare  multiply(wq, wk)  ROPE                ROPE ...
//
// The quantized columns of an activation serve all the matrices that it meets in a row and that want it rotated alike, and
// these are multiplied in one go where nothing in between touches the memory of the later results: every operation ends in a
// barrier, and in decode there are so many that the barriers count. A replaced node is a copy of the original with another
// operation: its flags and its memory stay, and what consumes it still reads the original.
#include "../cpu/shared_work.h"
#include "attention.h"
#include "backend.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <new>

namespace tern {

namespace {

// An activation, how it is rotated, and where its quantized columns lie: column (i1, i2, i3) has index
// (i3*ne[2] + i2)*ne[1] + i1. The columns with one (i2, i3), a slice, are dealt out to panels. Where experts choose among
// the columns, each is a panel of its own.
struct Activation {
    const ggml_tensor * x;
    const Rotation * rotation;  // or nullptr
    bool for_experts;
    ColumnLayout layout;
    Panels panels;  // of a slice
    uint8_t * columns = nullptr;

    Activation(const ggml_tensor * x, const Rotation * rotation, bool for_experts)
        : x(x), rotation(rotation), for_experts(for_experts), layout(x->ne[0]),
          panels(x->ne[1], for_experts ? 1 : kernels().max_columns) {}

    bool serves(const ggml_tensor * x, const Rotation * rotation, bool for_experts) const {
        return this->x == x && this->rotation == rotation && this->for_experts == for_experts;
    }
    int64_t n_slices() const { return x->ne[2] * x->ne[3]; }
    size_t bytes() const { return static_cast<size_t>(n_slices() * x->ne[1]) * layout.bytes; }
    uint8_t * column(int64_t index) const { return columns + index * layout.bytes; }
};

// One matrix multiplication, or one with experts.
struct Multiplication {
    const ggml_tensor * node;
    const Activation * activation;
    bool squared_relu;  // whether the products pass through squared ReLU
};

// One of the matrices that a weight tensor stacks in its third and fourth dimension: in tiles, or in plain rows.
struct WeightMatrix {
    const TernaryType & type;
    Tiles tiles;           // of plain rows, the shape and the group alone
    const uint8_t * rows;  // or nullptr
    size_t row_stride;

    WeightMatrix(const ggml_tensor * w, int64_t i2, int64_t i3)
        : type(*ternary_type_of(w->type)), tiles{nullptr, w->ne[0], w->ne[1], tile_group(type), false}, rows(nullptr),
          row_stride(w->nb[1]) {
        if (is_tiled(w)) {
            tiles = tiles_of(w, i3 * w->ne[2] + i2);
        } else {
            rows = static_cast<const uint8_t *>(w->data) + i2 * w->nb[2] + i3 * w->nb[3];
        }
    }
};

// A matrix that meets the columns of a slice. It serves x->ne[2] / w->ne[2] slices (grouped heads).
struct Product {
    Multiplication task;
    int64_t slice;
    WeightMatrix matrix;
    Items items;
    int64_t first_item;  // among those of its group

    Product(const Multiplication & task, int64_t slice, int64_t first_item)
        : task(task), slice(slice), matrix(matrix_of_slice(task.node, slice)),
          items(kernels(), matrix.tiles, task.node->ne[1]), first_item(first_item) {}

  private:
    static WeightMatrix matrix_of_slice(const ggml_tensor * node, int64_t slice) {
        const ggml_tensor * w = node->src[0];
        const ggml_tensor * x = node->src[1];
        return WeightMatrix(w, slice % x->ne[2] / (x->ne[2] / w->ne[2]), slice / x->ne[2] / (x->ne[3] / w->ne[3]));
    }
};

// Multiplications of one activation that run as one operation.
struct MultiplicationGroup {
    const Activation * activation;
    WorkInTurn work;
    std::vector<Product> products;
    int64_t n_items = 0;

    MultiplicationGroup(const Activation * activation, WorkInTurn work) : activation(activation), work(work) {}

    void add(const Multiplication & task) {
        for (int64_t slice = 0; slice < activation->n_slices(); slice++) {
            products.emplace_back(task, slice, n_items);
            n_items += products.back().items.count;
        }
    }
};

// One with experts is an operation of its own.
struct ExpertMultiplication {
    Multiplication task;
    WorkInTurn work;
};

// The columns that meet one matrix, and where their results go.
struct Columns {
    const uint8_t * panels = nullptr;
    std::vector<float *> out;

    int64_t count() const { return static_cast<int64_t>(out.size()); }
};

float * result_row(const ggml_tensor * node, int64_t i1, int64_t i2, int64_t i3) {
    return reinterpret_cast<float *>(static_cast<char *>(node->data) + i1 * node->nb[1] + i2 * node->nb[2] +
                                     i3 * node->nb[3]);
}

// Plain rows are put into a tile as they come.
void multiply_plain_rows(const WeightMatrix & w, int64_t tile_begin, int64_t tile_end, const ColumnLayout & layout,
                         const Columns & columns) {
    thread_local std::vector<uint8_t> memory;
    thread_local std::vector<float *> out;
    memory.resize(w.tiles.stride());
    Tiles tile = w.tiles;
    tile.first = memory.data();
    for (int64_t t = tile_begin; t < tile_end; t++) {
        const int64_t row = t * TILE_ROWS;
        tile.n_out = std::min<int64_t>(TILE_ROWS, w.tiles.n_out - row);
        pack_tile(w.type, tile.group, w.rows + row * w.row_stride, w.row_stride, static_cast<int>(tile.n_out),
                  tile.n_in, memory.data());
        out.clear();
        for (float * result : columns.out) {
            out.push_back(result + row);
        }
        multiply_panels(kernels(), tile, 0, 1, layout, columns.panels, columns.count(), out.data());
    }
}

void multiply_tiles(const Multiplication & task, const WeightMatrix & w, int64_t tile_begin, int64_t tile_end,
                    const Columns & columns) {
    const ColumnLayout & layout = task.activation->layout;
    if (w.rows == nullptr) {
        multiply_panels(kernels(), w.tiles, tile_begin, tile_end, layout, columns.panels, columns.count(),
                        columns.out.data());
    } else {
        multiply_plain_rows(w, tile_begin, tile_end, layout, columns);
    }
    if (task.squared_relu) {
        const int64_t begin = tile_begin * TILE_ROWS;
        const int64_t end = std::min(tile_end * TILE_ROWS, w.tiles.n_out);
        for (float * result : columns.out) {
            kernels().squared_relu_for_silu(result + begin, end - begin);
        }
    }
}

// ---- the functions of the custom operations: every thread calls them, ith of nth ----

void prepare_activation(ggml_tensor *, int ith, int nth, void * data) {
    const Activation & activation = *static_cast<const Activation *>(data);
    const ggml_tensor * x = activation.x;
    const Panels & panels = activation.panels;
    const int64_t unit = rotation_unit(activation.rotation);
    const int64_t n_units = activation.layout.n_groups / unit;  // of a panel; a block divides the column
    const int64_t total = activation.n_slices() * panels.count * n_units;
    const int64_t end = total * (ith + 1) / nth;
    thread_local std::vector<const float *> values;
    for (int64_t u = total * ith / nth; u < end;) {
        const int64_t panel = u / n_units % panels.count;
        const int64_t slice = u / n_units / panels.count;
        const int64_t first = u % n_units;
        const int64_t last = std::min(n_units, first + end - u);
        values.clear();
        for (int64_t i1 = panels.begin(panel); i1 < panels.begin(panel + 1); i1++) {
            values.push_back(reinterpret_cast<const float *>(static_cast<const char *>(x->data) + i1 * x->nb[1] +
                                                             slice % x->ne[2] * x->nb[2] +
                                                             slice / x->ne[2] * x->nb[3]));
        }
        prepare_panel(kernels(), activation.rotation, activation.layout, values.data(), panels.width(panel),
                      first * unit, last * unit, activation.column(slice * x->ne[1] + panels.begin(panel)));
        u += last - first;
    }
}

void multiply(ggml_tensor *, int ith, int nth, void * data) {
    auto & group = *static_cast<MultiplicationGroup *>(data);
    const Activation & activation = *group.activation;
    const ggml_tensor * x = activation.x;
    thread_local Columns columns;
    const Product * met = nullptr;
    group.work.run(group.n_items, ith, nth, [&](int64_t begin, int64_t end) {
        for (const Product & product : group.products) {
            const Items & items = product.items;
            const int64_t first = std::max<int64_t>(begin - product.first_item, 0);
            const int64_t last = std::min(end - product.first_item, items.count);
            if (first >= last) {
                continue;
            }
            if (met != &product) {
                met = &product;
                columns.panels = activation.column(product.slice * x->ne[1]);
                columns.out.clear();
                for (int64_t i1 = 0; i1 < x->ne[1]; i1++) {
                    columns.out.push_back(
                        result_row(product.task.node, i1, product.slice % x->ne[2], product.slice / x->ne[2]));
                }
            }
            multiply_tiles(product.task, product.matrix, items.tile(first), items.tile(last), columns);
        }
    });
}

void multiply_experts(ggml_tensor *, int ith, int nth, void * data) {
    auto & experts = *static_cast<ExpertMultiplication *>(data);
    const Multiplication & task = experts.task;
    const ggml_tensor * node = task.node;
    const ggml_tensor * w = node->src[0];
    const ggml_tensor * x = node->src[1];
    const ggml_tensor * ids = node->src[2];
    const Activation & activation = *task.activation;
    const int64_t n_experts = w->ne[2];

    // Which (slot, token) pairs chose which expert, in order; every thread works this out for itself.
    thread_local std::vector<std::vector<int64_t>> chosen;
    thread_local std::vector<int64_t> active;
    chosen.resize(n_experts);
    for (auto & pairs : chosen) {
        pairs.clear();
    }
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t slot = 0; slot < ids->ne[0]; slot++) {
            int32_t expert;
            std::memcpy(&expert, static_cast<const char *>(ids->data) + slot * ids->nb[0] + token * ids->nb[1],
                        sizeof(expert));
            if (expert >= 0 && expert < n_experts) {
                chosen[expert].push_back(token * ids->ne[0] + slot);
            }
        }
    }
    active.clear();
    for (int64_t e = 0; e < n_experts; e++) {
        if (!chosen[e].empty()) {
            active.push_back(e);
        }
    }

    const int64_t n_cols = ids->ne[0] * ids->ne[1] / n_experts;  // as if chosen evenly
    const Items items(kernels(), WeightMatrix(w, 0, 0).tiles, n_cols);
    thread_local Columns columns;
    thread_local std::vector<const uint8_t *> in;
    thread_local std::vector<uint8_t> panels;
    int64_t expert = -1;
    const auto meet = [&](int64_t chosen_expert) {
        expert = chosen_expert;
        in.clear();
        columns.out.clear();
        for (const int64_t pair : chosen[expert]) {
            const int64_t slot = pair % ids->ne[0];
            const int64_t token = pair / ids->ne[0];
            in.push_back(activation.column(token * x->ne[1] + slot % x->ne[1]));
            columns.out.push_back(result_row(node, slot, token, 0));
        }
        panels.resize(in.size() * activation.layout.bytes);
        make_panels(kernels(), activation.layout, in.data(), columns.count(), panels.data());
        columns.panels = panels.data();
    };
    experts.work.run(items.count * static_cast<int64_t>(active.size()), ith, nth, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t chosen_expert = active[begin / items.count];
            const int64_t first = begin % items.count;
            const int64_t last = std::min(items.count, first + end - begin);
            if (chosen_expert != expert) {
                meet(chosen_expert);
            }
            multiply_tiles(task, WeightMatrix(w, expert, 0), items.tile(first), items.tile(last), columns);
            begin += last - first;
        }
    });
}

// data: the rotation of the matrix, or nullptr.
void get_rows(ggml_tensor * dst, int ith, int nth, void * data) {
    const auto * rotation = static_cast<const Rotation *>(data);
    thread_local std::vector<float> rotated;
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
        const WeightMatrix matrix(w, i1, i2);
        float * result = result_row(dst, i0, i1, i2);
        float * out = result;
        if (rotation != nullptr) {
            rotated.resize(static_cast<size_t>(w->ne[0]));
            out = rotated.data();
        }
        if (row < 0 || row >= w->ne[1]) {
            std::memset(out, 0, static_cast<size_t>(w->ne[0]) * sizeof(float));
        } else if (matrix.rows != nullptr) {
            dequantize_row(matrix.type, matrix.rows + row * matrix.row_stride, w->ne[0], out);
        } else {
            dequantize_row(kernels(), matrix.tiles, row, out);
        }
        if (rotation != nullptr) {
            unrotate_row(kernels(), *rotation, out, result);
        }
    }
}

bool overlap(const ggml_tensor * a, const ggml_tensor * b) {
    const auto begin_a = reinterpret_cast<uintptr_t>(a->data);
    const auto begin_b = reinterpret_cast<uintptr_t>(b->data);
    return begin_a < begin_b + host().ggml_nbytes(b) && begin_b < begin_a + host().ggml_nbytes(a);
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

}  // namespace

bool is_ternary_op(const ggml_tensor * node) {
    return (node->op == host().op_mul_mat || node->op == host().op_mul_mat_id || node->op == host().op_get_rows) &&
           ternary_type_of(node->src[0]->type) != nullptr;
}

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

struct GraphRunner::State {
    // Of the graph that all of this was built from, if it has one: two graphs with the same are the same, down to the memory
    // of their nodes. In decode most tokens repeat the graph of the one before.
    uint64_t uid = 0;
    std::vector<ggml_tensor *> nodes;
    std::deque<ggml_tensor> replaced;
    std::deque<Activation> activations;
    std::deque<MultiplicationGroup> multiplications;
    std::deque<ExpertMultiplication> expert_multiplications;
    SharedWork works[2];  // of the multiplications
    size_t n_works = 0;
    std::deque<AttentionTask> attentions;
    std::vector<float> attention_scratch;
    uint8_t * scratch = nullptr;
    size_t scratch_bytes = 0;

    ~State() { std::free(scratch); }

    void reserve_scratch(size_t bytes) {
        if (bytes > scratch_bytes) {
            std::free(scratch);
            scratch_bytes = 0;
            scratch = static_cast<uint8_t *>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
            if (scratch == nullptr) {
                throw std::bad_alloc();
            }
            scratch_bytes = bytes;
        }
    }

    // Before every run.
    void reset_work() {
        for (SharedWork & work : works) {
            work.reset();
        }
        for (AttentionTask & task : attentions) {
            task.work.reset();
        }
    }

    void add_custom(const ggml_tensor * node, ggml_custom_op_t function, void * data) {
        replaced.push_back(*node);
        ggml_tensor & custom = replaced.back();
        custom.op = host().op_custom;
        const ggml_custom_op_params params{function, GGML_N_TASKS_MAX, data};
        std::memset(custom.op_params, 0, sizeof(custom.op_params));
        std::memcpy(custom.op_params, &params, sizeof(params));
        nodes.push_back(&custom);
    }

    // False if a matrix needs a treatment and nobody knows which.
    bool build(const ggml_cgraph * graph) {
        nodes.clear();
        replaced.clear();
        activations.clear();
        multiplications.clear();
        expert_multiplications.clear();
        n_works = 0;
        attentions.clear();
        size_t n_attention_scratch = 0;
        Activation * current = nullptr;  // whose quantized columns the scratch memory holds at this point
        size_t needed = 0;
        int group_begin = 0;  // where in the graph the last of the multiplications stands
        for (int i = 0; i < graph->n_nodes; i++) {
            ggml_tensor * node = graph->nodes[i];
            if (is_our_attention(node) && (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0) {
                AttentionTask & task = attentions.emplace_back(node);
                n_attention_scratch = std::max(n_attention_scratch, task.work.n_scratch());
                add_custom(node, attend, &task);
                if (task.work.is_split()) {
                    add_custom(node, combine_attention, &task);
                }
                forget_if_overwritten(current, node);
                continue;
            }
            if (!is_ternary_op(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
                nodes.push_back(node);
                forget_if_overwritten(current, node);
                continue;
            }
            const Treatment * treatment = treatment_of(node->src[0]);
            if (treatment == nullptr) {
                std::fprintf(
                    stderr,
                    "ggml-tern: tensor %s is not as in any file opened so far, so that its rotation is not known; "
                    "without it the model would talk nonsense\n",
                    quoted(node->src[0]->name).c_str());
                return false;
            }
            if (node->op == host().op_get_rows) {
                add_custom(node, get_rows, const_cast<Rotation *>(treatment->rotation));
            } else {
                const ggml_tensor * x = node->src[1];
                const bool for_experts = node->op == host().op_mul_mat_id;
                if (current == nullptr || !current->serves(x, treatment->rotation, for_experts)) {
                    current = &activations.emplace_back(x, treatment->rotation, for_experts);
                    needed = std::max(needed, current->bytes());
                    add_custom(node, prepare_activation, current);
                }
                const Multiplication task{node, current, treatment->squared_relu};
                if (for_experts) {
                    expert_multiplications.push_back({task, WorkInTurn(works, n_works++)});
                    add_custom(node, multiply_experts, &expert_multiplications.back());
                } else if (!joins_group(graph, group_begin, i, task)) {
                    multiplications.emplace_back(current, WorkInTurn(works, n_works++)).add(task);
                    add_custom(node, multiply, &multiplications.back());
                    group_begin = i;
                }
            }
            forget_if_overwritten(current, node);
        }
        if (attention_scratch.size() < n_attention_scratch) {
            attention_scratch.resize(n_attention_scratch);
        }
        for (AttentionTask & task : attentions) {
            task.scratch = attention_scratch.data();
        }
        reserve_scratch(needed);
        for (Activation & activation : activations) {
            activation.columns = scratch;
        }
        return true;
    }

    // Puts the node at `position` into the last group, which stands at `group_begin`, if it may be computed there.
    bool joins_group(const ggml_cgraph * graph, int group_begin, int position, const Multiplication & task) {
        if (multiplications.empty() || multiplications.back().activation != task.activation) {
            return false;
        }
        for (int i = group_begin + 1; i < position; i++) {
            if (touches(graph->nodes[i], task.node)) {
                return false;
            }
        }
        multiplications.back().add(task);
        return true;
    }

    static void forget_if_overwritten(Activation *& current, const ggml_tensor * node) {
        if (current != nullptr && !moves_no_data(node->op) && overlap(node, current->x)) {
            current = nullptr;
        }
    }
};

GraphRunner::GraphRunner() : state_(std::make_unique<State>()) {}
GraphRunner::~GraphRunner() = default;

ggml_status GraphRunner::compute(ggml_backend_t cpu, const ggml_cgraph * graph) {
    State & state = *state_;
    const uint64_t uid = host().has_graph_uids ? graph->uid : 0;
    if (uid == 0 || uid != state.uid) {
        state.uid = 0;
        try {
            if (!state.build(graph)) {
                return GGML_STATUS_FAILED;
            }
        } catch (const std::bad_alloc &) {
            return GGML_STATUS_ALLOC_FAILED;
        }
        state.uid = uid;
    }
    state.reset_work();
    ggml_cgraph copy = *graph;
    copy.nodes = state.nodes.data();
    copy.n_nodes = static_cast<int>(state.nodes.size());
    copy.uid = 0;
    return host().ggml_backend_graph_compute(cpu, &copy);
}

}  // namespace tern
