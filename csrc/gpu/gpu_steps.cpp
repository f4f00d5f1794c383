// Keeping the graphs that were made, and running them: see gpu_steps.h.
#include "gpu_steps.h"

#include "gpu_graph.h"

#include <cstdio>
#include <map>
#include <new>

namespace tern {

namespace {

// Graphs are kept while all of them together have so many nodes. A whole model has some thousands; one whose experts stay on the
// CPU has two graphs a layer.
constexpr size_t MAX_NODES = 16384;

}  // namespace

struct GpuSteps::State {
    struct Kept {
        std::unique_ptr<GpuGraph> graph;
        uint64_t last_used = 0;
        bool lies = false;     // whether it was given its memory
        uint64_t scratch = 0;  // and which, by its number
    };

    ggml_backend_t backend;
    GpuConstants constants;
    GpuScratch scratch;
    uint64_t scratch_number = 0;
    // By the numbers of the graphs that they were made from: two graphs with the same are the same, down to the memory of their
    // nodes. In decode most tokens repeat the graphs of the one before. 0: of the last one without a number.
    std::map<uint64_t, Kept> kept;
    size_t n_nodes = 0;
    uint64_t n_runs = 0;

    State(ggml_backend_t backend, ggml_backend_buffer_type_t type) : backend(backend), constants(type), scratch(type) {}

    void forget(std::map<uint64_t, Kept>::iterator entry) {
        n_nodes -= entry->second.graph->n_nodes();
        kept.erase(entry);
    }

    GpuGraph & graph_of(const ggml_cgraph * original) {
        const uint64_t uid = host().has_graph_uids ? original->uid : 0;
        auto entry = kept.find(uid);
        if (entry != kept.end() && uid == 0) {
            forget(entry);
            entry = kept.end();
        }
        if (entry == kept.end()) {
            auto made = std::make_unique<GpuGraph>(original, constants);
            while (!kept.empty() && n_nodes + made->n_nodes() > MAX_NODES) {
                auto oldest = kept.begin();
                for (auto other = kept.begin(); other != kept.end(); ++other) {
                    oldest = other->second.last_used < oldest->second.last_used ? other : oldest;
                }
                forget(oldest);
            }
            n_nodes += made->n_nodes();
            entry = kept.emplace(uid, Kept{std::move(made)}).first;
        }
        Kept & found = entry->second;
        found.last_used = ++n_runs;
        const size_t n_bytes = found.graph->scratch_bytes();
        if (n_bytes > scratch.size()) {
            host().ggml_backend_synchronize(backend);  // what was given to it before works there
            scratch.reserve(n_bytes);
            scratch_number++;
        }
        if (!found.lies || found.scratch != scratch_number) {
            found.graph->lie_in(scratch);
            found.lies = true;
            found.scratch = scratch_number;
        }
        return *found.graph;
    }
};

GpuSteps::GpuSteps(ggml_backend_t backend, ggml_backend_buffer_type_t type)
    : state_(std::make_unique<State>(backend, type)) {}
GpuSteps::~GpuSteps() = default;
GpuSteps::GpuSteps(GpuSteps &&) noexcept = default;

ggml_status GpuSteps::compute(ggml_cgraph * graph, const std::function<ggml_status(ggml_cgraph *)> & run) {
    try {
        GpuGraph & of_nodes = state_->graph_of(graph);
        if (!of_nodes.is_ours()) {
            return run(graph);
        }
        GpuGraph::Swapped swapped(of_nodes, graph);
        return run(&swapped.made);
    } catch (const Refused & refused) {
        std::fprintf(stderr, "ggml-tern: %s\n", refused.message.c_str());
        return GGML_STATUS_FAILED;
    } catch (const std::bad_alloc &) {
        return GGML_STATUS_ALLOC_FAILED;
    }
}

}  // namespace tern
