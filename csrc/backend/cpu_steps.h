// Carrying out the plan of a graph on the CPU: its steps become custom operations in a copy of the node list, and the stock CPU
// backend runs the whole list in one call. Our kernels thereby run in ggml's own threads, with ggml's barriers between the
// nodes.
//
//   the graph       ... RMS_NORM  MUL           MUL_MAT(wq)       ROPE  MUL_MAT(wk)  ROPE ...
//   what is run     ... RMS_NORM  MUL  prepare  multiply(wq, wk)  ROPE               ROPE ...
//
// A node that replaces another is a copy of it with another operation: its flags and its memory stay, and what consumes the
// original still reads that. The attention that our kernels take (attention.h) becomes custom operations the same way.
#pragma once

#include "../host/host_api.h"

#include <memory>

namespace tern {

// Turns graphs into ones that the stock CPU backend can run, and runs them.
class CpuSteps {
  public:
    CpuSteps();
    ~CpuSteps();

    // Runs `graph` on `cpu`, a stock CPU backend, which has n_threads threads. All memory that the threads work in is reserved
    // before they begin: GGML_STATUS_ALLOC_FAILED where there is none, GGML_STATUS_FAILED for a matrix that must not be
    // computed, which is said on stderr.
    ggml_status compute(ggml_backend_t cpu, const ggml_cgraph * graph, int n_threads);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace tern
