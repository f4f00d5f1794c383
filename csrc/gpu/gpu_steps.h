// Carrying out the plan of a graph on a stock GPU backend: its steps become stock nodes, and the backend runs the whole list in
// one call.
//
//   the graph       ... RMS_NORM  MUL                            MUL_MAT(wq, x)     ROPE  MUL_MAT(wk, x)     ROPE ...
//   what is run     ... RMS_NORM  MUL  MUL(signs)  MUL_MAT(H)    MUL_MAT(wq', x')   ROPE  MUL_MAT(wk', x')   ROPE ...
//
// A product's sources are swapped for the twin of its matrix (twin.h) and the rotated activation, and swapped back when the
// backend has been given its work: the nodes themselves stay, since stock backends count by node who uses what, and fuse
// accordingly. Matrices that share an activation are given the very same tensor, which fusing asks for too.
//
// The rotation H(s * P(x)) is made of stock nodes:
//
//   s * P(x)   MUL with a constant; P is a view of x with two dimensions swapped. Where x is a norm that nobody else sees, its
//              weights take the signs, and there is no node.
//   H          MUL_MAT with a constant Hadamard matrix of up to 512, and the hint by which backends know that it is one. The
//              matrix is there, so that those who do not know the hint multiply all the same.
//   H(2n)      of larger blocks: ADD and SUB of the two halves of H(n); what is lacking of 1/sqrt(2) is in s
//
// Squared ReLU of gates (model/bitnet_gates.h): what the graph does with a gate's product becomes RELU and SQR.
#pragma once

#include "../host/host_api.h"

#include <functional>
#include <memory>

namespace tern {

// Turns graphs into ones that a stock GPU backend can run, and runs them.
class GpuSteps {
  public:
    // Memory is taken from buffers of `type`.
    GpuSteps(ggml_backend_t backend, ggml_backend_buffer_type_t type);
    ~GpuSteps();
    GpuSteps(GpuSteps &&) noexcept;

    // Gives `run`, which does not wait for the end, a graph that computes what `graph` does. GGML_STATUS_ALLOC_FAILED where
    // there is no memory; GGML_STATUS_FAILED for what must not be computed, which is said on stderr.
    ggml_status compute(ggml_cgraph * graph, const std::function<ggml_status(ggml_cgraph *)> & run);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace tern
