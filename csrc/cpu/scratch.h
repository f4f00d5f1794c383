// Memory that threads work in. It is reserved before the work begins: in the middle of it there would be nobody to tell that
// there is none.
#pragma once

#include "streamed_memory.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

namespace tern {

// The memory of one thread, taken piece by piece, each aligned to a cache line and not cleared. Passed by value: what a
// function takes is free again when it returns.
class Scratch {
  public:
    Scratch(uint8_t * memory, size_t n_bytes) : next_(memory), end_(memory + n_bytes) {}

    template <typename T> T * take(int64_t n) {
        static_assert(std::is_trivial_v<T>);
        const size_t n_bytes = bytes<T>(n);
        if (n_bytes > static_cast<size_t>(end_ - next_)) {
            std::abort();  // too little was reserved
        }
        auto * piece = reinterpret_cast<T *>(next_);
        next_ += n_bytes;
        return piece;
    }

    // What take() takes.
    template <typename T> static constexpr size_t bytes(int64_t n) {
        return (static_cast<size_t>(n) * sizeof(T) + LINE - 1) / LINE * LINE;
    }

  private:
    static constexpr size_t LINE = 64;

    uint8_t * next_;
    uint8_t * end_;
};

// The memory of all threads.
class ThreadScratch {
  public:
    // Enough for n_threads threads, n_bytes each. Throws std::bad_alloc, and then has what it had.
    void reserve(int n_threads, size_t n_bytes) {
        n_bytes = Scratch::bytes<uint8_t>(static_cast<int64_t>(n_bytes));
        if (n_threads <= n_threads_ && n_bytes <= n_bytes_) {
            return;
        }
        n_threads = n_threads > n_threads_ ? n_threads : n_threads_;
        n_bytes = n_bytes > n_bytes_ ? n_bytes : n_bytes_;
        memory_ = allocate_streamed(static_cast<size_t>(n_threads) * n_bytes);
        n_threads_ = n_threads;
        n_bytes_ = n_bytes;
    }

    Scratch of(int thread) const {
        if (thread >= n_threads_) {
            std::abort();
        }
        return {memory_.get() + static_cast<size_t>(thread) * n_bytes_, n_bytes_};
    }

  private:
    StreamedMemory memory_;
    int n_threads_ = 0;
    size_t n_bytes_ = 0;
};

}  // namespace tern
