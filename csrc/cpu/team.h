// Threads for those who have none of ggml's: the Python module and the measurements.
#pragma once

#include <cstdint>
#include <functional>

namespace tern {

// Calls work(ith) for 0 <= ith < n_threads, all of them at the same time; the first is the caller's own thread. What one of them
// throws is thrown here, when all are through. Throws std::runtime_error, and calls nothing, where not all threads can be
// started.
void run_team(int n_threads, const std::function<void(int)> & work);

// Calls work(begin, end) for parts of [0, n) on up to n_threads threads: on fewer where no more can be started. What a call
// throws is thrown here, when all threads are through; parts that nobody has begun by then are left out.
void parallel(int64_t n, int n_threads, const std::function<void(int64_t, int64_t)> & work);

// Calls work(ith) for 0 <= ith < n_threads as parallel() does: at the same time where it can be, one after the other where not.
void for_each_thread(int n_threads, const std::function<void(int)> & work);

}  // namespace tern
