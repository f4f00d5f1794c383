// Work that several threads share. Each begins with a range of its own and takes the units of it in order, so that it reads
// the weights in one long stream; then it helps the others with what is left of theirs, so that uneven cores finish together.
// Against one counter for all, whose threads leap over each other, decode gained a tenth.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace tern {

class SharedWork {
  public:
    // Calls work(unit) for units of [0, n_units), until all are taken. Every thread calls this once, ith of nth.
    template <class Work> void run(int64_t n_units, int ith, int nth, Work && work) {
        const int n_ranges = std::min(nth, MAX_RANGES);
        for (int i = 0; i < n_ranges; i++) {
            const int range = (ith + i) % n_ranges;
            const int64_t begin = n_units * range / n_ranges;
            const int64_t end = n_units * (range + 1) / n_ranges;
            for (;;) {
                const int64_t unit = begin + taken_[range].fetch_add(1, std::memory_order_relaxed);
                if (unit >= end) {
                    break;
                }
                work(unit);
            }
        }
    }

  private:
    static constexpr int MAX_RANGES = 16;
    std::atomic<int64_t> taken_[MAX_RANGES] = {};
};

}  // namespace tern
