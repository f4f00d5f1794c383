// The plan of a graph: what its ternary operations need, in what order, and what they can share. It is the same for every kind
// of device; who carries it out is another matter (backend/cpu_steps.h: custom operations inside the stock CPU backend;
// gpu/gpu_steps.h: nodes that a stock GPU backend knows).
//
// A product y = W x with a ternary matrix takes two steps. First the activation x is made ready: rotated, where the matrix
// is rotated, and brought into the form that the device multiplies with. Then it is multiplied. Matrices that want the same
// activation, rotated alike, share the first step. Of the second they can make one where the graph has other nodes in between:
//
//   the graph    RMS_NORM  MUL  MUL_MAT(wq)          ROPE  MUL_MAT(wk)  ROPE  MUL_MAT(wv)  ...
//   the plan     .         .    PRODUCT              .     PRODUCT      .     PRODUCT
//     activation                0, to be made ready        0                  0
//     group                     0                          0                  0
//
// All products of a group may be computed where the first one stands: nothing in between reads or writes what they write.
// On the CPU every operation ends in a barrier, of which decode has so many that they count, so there a group is one
// operation. A device that launches kernels one after the other may as well leave each product where it is.
//
// One activation is ready at a time. Its form may lie in one piece of memory for the whole graph: whoever uses it stands before
// the step that makes the next one ready.
//
// The plan holds pointers to nodes and looks at their addresses and sizes to see what overlaps, but never at what is in their
// memory, which may be a GPU's.
#pragma once

#include "../host/host_api.h"
#include "../model/models.h"

#include <vector>

namespace tern {

struct Plan {
    enum class Kind {
        OTHER,           // not ours: as it is
        LOOK_UP,         // GET_ROWS; the rows are rotated back where treatment->rotation says so
        PRODUCT,         // MUL_MAT
        EXPERT_PRODUCT,  // MUL_MAT_ID
    };

    struct Activation {
        const ggml_tensor * x;
        const Rotation * rotation;  // or nullptr
        bool for_experts;           // who choose among its columns
    };

    // What becomes of a node. Numbers are indices, and -1 where there is nothing.
    struct Step {
        Kind kind;
        ggml_tensor * node;
        const Treatment * treatment = nullptr;  // of the matrix, for all but OTHER
        int activation = -1;                    // of a product
        bool makes_ready = false;               // whether the activation has to be made ready before it
        int group = -1;                         // of a PRODUCT
    };

    // Products with one activation. `steps`: indices, ascending.
    struct Group {
        int activation;
        std::vector<int> steps;
    };

    std::vector<Step> steps;  // one for each node, in the graph's order
    std::vector<Activation> activations;
    std::vector<Group> groups;
    // A matrix whose treatment nobody knows, if there is one: then the plan ends there, and must not be carried out.
    const ggml_tensor * unknown = nullptr;
};

// Tells the treatment of a matrix, nullptr where it is not known.
using TreatmentOf = const Treatment * (*)(const ggml_tensor * w);

// Throws std::bad_alloc.
Plan make_plan(const ggml_cgraph * graph, TreatmentOf treatment_of);

}  // namespace tern
