// One graph, made of stock nodes: see gpu_steps.h.
#pragma once

#include "../plan/plan.h"
#include "gpu_constants.h"

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace tern {

// Why a graph must not be run. The message is for stderr.
struct Refused {
    std::string message;
};

// Memory on the device for the results of our nodes. All graphs of a backend share it: they run one after the other.
class GpuScratch {
  public:
    explicit GpuScratch(ggml_backend_buffer_type_t type) : type_(type) {}
    ~GpuScratch() { release(); }
    GpuScratch(const GpuScratch &) = delete;
    GpuScratch & operator=(const GpuScratch &) = delete;

    // Whoever still works in it has to have ended. Throws std::bad_alloc.
    void reserve(size_t n_bytes);
    size_t size() const { return buffer_ == nullptr ? 0 : host().ggml_backend_buffer_get_size(buffer_); }
    ggml_backend_buffer_t buffer() const { return buffer_; }
    char * base() const { return static_cast<char *>(host().ggml_backend_buffer_get_base(buffer_)); }

  private:
    void release();

    ggml_backend_buffer_type_t type_;
    ggml_backend_buffer_t buffer_ = nullptr;
};

class GpuGraph {
  public:
    // Throws Refused for what must not be computed, std::bad_alloc where there is no memory.
    GpuGraph(const ggml_cgraph * graph, GpuConstants & constants);
    ~GpuGraph();
    GpuGraph(const GpuGraph &) = delete;
    GpuGraph & operator=(const GpuGraph &) = delete;

    // Whether anything in it is ours: else the graph can run as it is.
    bool is_ours() const { return is_ours_; }
    size_t n_nodes() const { return nodes_.size(); }

    // The bytes that it needs of the scratch memory, and giving it that memory.
    size_t scratch_bytes() const;
    void lie_in(const GpuScratch & scratch);

    // While this lives, the graph's own nodes have other sources, and `made` is to be run.
    class Swapped {
      public:
        Swapped(GpuGraph & graph, const ggml_cgraph * original);
        ~Swapped();
        Swapped(const Swapped &) = delete;
        Swapped & operator=(const Swapped &) = delete;
        ggml_cgraph made;

      private:
        GpuGraph & graph_;
    };

  private:
    struct Swap {
        ggml_tensor ** source;  // of a node
        ggml_tensor * original;
        ggml_tensor * replacement;
    };
    // Where results of our nodes lie: the rotation takes turns between two places, squared ReLU has two of its own.
    enum Place { FIRST, SECOND, RELU, SQUARED, PLACES };
    struct Result {
        ggml_tensor * tensor;
        Place place;
    };

    ggml_tensor * view(ggml_tensor * tensor);
    ggml_tensor * add(ggml_tensor * node, Place place);
    void add_in_place_of(ggml_tensor * node, const ggml_tensor * other);
    void swap(ggml_tensor *& source, ggml_tensor * replacement);
    ggml_tensor * blocks_of(ggml_tensor * x, int64_t size);
    bool fold_factors(const ggml_cgraph * graph, const Plan & plan, int activation, ggml_tensor * factors);
    ggml_tensor * rotate(ggml_tensor * x, const Rotation & rotation, ggml_tensor * factors);
    ggml_tensor * join(ggml_tensor * x, int64_t half, Place place);
    ggml_tensor * rotated_activation(const ggml_cgraph * graph, const Plan & plan, const Plan::Step & step);
    void add_squared_relu(ggml_tensor * node);
    bool add_other(ggml_tensor * node);
    void build(const ggml_cgraph * graph, const Plan & plan);

    GpuConstants & constants_;
    bool is_ours_ = false;
    uint64_t uid_ = 0;  // of what is run
    struct Freed {
        void operator()(ggml_context * context) const { host().ggml_free(context); }
    };
    std::unique_ptr<ggml_context, Freed> context_;  // of our tensors
    std::deque<ggml_tensor> twins_;
    std::vector<ggml_tensor *> nodes_;
    std::vector<Swap> swaps_;
    std::vector<Result> results_;
    std::vector<ggml_tensor *> views_;  // of results or of nodes, each after what it is a view of
    size_t place_bytes_[PLACES] = {};
};

}  // namespace tern
