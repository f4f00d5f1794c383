// The graft: the host's own GPU backends learn our types.
//
// A stock GPU backend runs all of llama.cpp but our types and rotations. It keeps the functions that say so in tables in memory,
// of which we take over a few, for every device of every other registry in the process:
//
//   the device's supports_op     knows our types too, in memory of ours
//   the device's init_backend    and in each backend that it makes, graph_compute (gpu_steps.h) and free
//   the registry's get_proc_address, for ggml_backend_dev_get_extra_bufts: offers memory of ours to llama.cpp
//
// That memory is the stock one, of a buffer type that is a copy of the stock one's but for the size of a tensor, and whose buffers
// translate a tensor of our types to its twin (twin.h) when its bytes arrive. Everything else stays the stock backend's own: the
// names, the devices, what it thinks of them. A device is left as it is where it has no kernels for Q2_0, where its tables are
// not what we know, or where its self-test fails (self_test.h); when a model of ours is opened, one line on stderr says so.
//
// Devices appear at any time: an RPC server when the command line is read, a backend when it is loaded. So whoever is asked for
// something before a model is opened calls graft_gpus().
#pragma once

#include "../host/host_api.h"
#include "../model/models.h"

#include <string>
#include <string_view>
#include <vector>

namespace tern {

// What the models say that were opened so far.
struct ModelFacts {
    // The treatment of a tensor by its bytes, nullptr where none is known: see Models::find().
    const Treatment * (*find_treatment)(std::string_view name, uint32_t file_type, const int64_t * shape,
                                        std::string_view data);
    // All rotations of their weights.
    std::vector<const Rotation *> (*rotations)();
};

// Takes over the GPUs that are there and not taken over yet. ours: our own registry, which is left alone. Safe from any thread,
// and cheap when there is nothing to do.
void graft_gpus(ggml_backend_reg_t ours, const ModelFacts & facts);

// What became of each GPU.
struct GpuStatus {
    std::string name;
    std::string description;
    std::string refusal;  // why it is left alone; empty where it is not
    bool told = false;    // whether the user was
    size_t n_tests = 0;   // of its self-test, so far
    double test_ms = 0;   // what they took
};
std::vector<GpuStatus> gpu_statuses();

// Says on stderr which GPUs are left alone and why, each once: to be called for a model that they would have been of use for.
void tell_refusals();

// Has every GPU that was taken over prove what it computes (self_test.h), without a model.
void test_gpus();

}  // namespace tern
