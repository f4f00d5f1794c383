// Work that several threads share. Each begins with a range of its own and takes pieces of it in order, so that it reads the
// weights in one long stream; then it helps the others with what is left of theirs, so that uneven cores finish together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tern {

class SharedWork {
  public:
    // Before the work begins, and not while another thread may be in run().
    void reset() {
        for (Range & range : ranges_) {
            range.taken.store(0, std::memory_order_relaxed);
        }
    }

    // Calls work(begin, end) for pieces of [0, n_items), until all are taken. Every thread calls this once, ith of nth.
    template <class Work> void run(int64_t n_items, int ith, int nth, Work && work) {
        const int n_ranges = std::min(nth, MAX_RANGES);
        for (int i = 0; i < n_ranges; i++) {
            const int range = (ith + i) % n_ranges;
            const int64_t begin = n_items * range / n_ranges;
            const int64_t end = n_items * (range + 1) / n_ranges;
            for (;;) {
                const int64_t piece = ranges_[range].taken.fetch_add(1, std::memory_order_relaxed);
                const int64_t left = left_before(piece, end - begin);
                const int64_t left_then = left_before(piece + 1, end - begin);
                if (left == 0) {
                    break;
                }
                if (left_then < left) {
                    work(end - left, end - left_then);
                }
            }
        }
    }

  private:
    static constexpr int MAX_RANGES = 16;

    // Each in a cache line of its own, which its thread takes pieces from without asking the others.
    struct alignas(64) Range {
        std::atomic<int64_t> taken{0};
    };

    // How many of n items piece number `piece` and those after it have: quarters of the range, and at its end halves of
    // what is left, down to a single item, so that the last to finish is not much later than the others.
    static int64_t left_before(int64_t piece, int64_t n) {
        return piece < 2 ? n - n * piece / 4 : piece > 62 ? 0 : n >> (piece - 1);
    }

    Range ranges_[MAX_RANGES];
};

// The work of one of many operations that follow each other, all threads through with one before any begins the next. Two
// SharedWork take turns for all of them and stay in the cache: each operation makes the other ready, which nobody uses then.
class WorkInTurn {
  public:
    // operation: its number. Both must be ready before the first one.
    WorkInTurn(SharedWork (&works)[2], size_t operation)
        : work_(works[operation % 2]), next_(works[(operation + 1) % 2]) {}

    template <class Work> void run(int64_t n_items, int ith, int nth, Work && work) {
        if (ith == 0) {
            next_.reset();
        }
        work_.run(n_items, ith, nth, work);
    }

  private:
    SharedWork & work_;
    SharedWork & next_;
};

}  // namespace tern
