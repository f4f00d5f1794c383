// The pools of threads that llama.cpp makes of --threads, --cpu-mask, --cpu-strict, --prio and --poll.
//
// It gives a pool to its own CPU backend alone, right before a graph is computed, through a function that it asks the CPU
// backend's registry for; then it tells every backend its number of threads. We stand in that registry, and see the pool pass by.
#pragma once

#include "host_api.h"

#include <optional>
#include <string>

namespace tern {

// Begins to watch. Calling it again does nothing. Returns false and puts one line that says why into `error` where the host does
// not let us.
bool watch_thread_pools(std::string & error);

// The pool, or nullptr for none, that this thread has given to the CPU backend for the graph that comes; nothing where it has not
// said.
std::optional<ggml_threadpool_t> given_thread_pool();

}  // namespace tern
