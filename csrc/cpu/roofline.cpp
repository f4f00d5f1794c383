// Measuring bounds and products in a team of threads: see roofline.h.
#include "roofline.h"

#include "product.h"
#include "shared_work.h"
#include "streamed_memory.h"
#include "team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>
#include <utility>

namespace tern {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point begin, Clock::time_point end) {
    return std::chrono::duration<double>(end - begin).count();
}

// Where the threads of a team wait for each other. They spin, as ggml's do: what lies between two barriers takes microseconds.
class Barrier {
  public:
    explicit Barrier(int n_threads) : n_threads_(n_threads) {}

    // Returns when the last thread arrived. A clock that a thread reads after it was let through would be late where the
    // machine has taken its processor away meanwhile, and others have done its work.
    Clock::time_point wait() {
        const int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n_threads_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            const auto now = Clock::now();
            complete_[round % 2] = now;
            round_.store(round + 1, std::memory_order_release);
            return now;
        }
        // With more threads than processors, the one that is waited for may want ours.
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
            if (spins > SPINS) {
                std::this_thread::yield();
            }
            relax();
        }
        return complete_[round % 2];
    }

  private:
    static constexpr int SPINS = 100000;

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    const int n_threads_;
    std::atomic<int> arrived_{0};
    std::atomic<int> round_{0};
    Clock::time_point complete_[2];  // of this round and the one before, which a slow thread may still want to know
};

// Memory that a thread takes at a time; it reads four quarters of it side by side. The processor's prefetcher follows each of
// them, and gets further ahead than with one.
constexpr size_t CHUNK = size_t{256} << 10;
constexpr size_t STREAMS = 4;

// The sum of a chunk as vectors of 64-bit numbers, and of these.
uint64_t sum_of_chunk(const uint8_t * chunk) {
    constexpr size_t N = 8;
    using Vector = uint64_t __attribute__((vector_size(16), may_alias));
    Vector sums[N] = {};
    for (size_t offset = 0; offset < CHUNK / STREAMS; offset += N * sizeof(Vector)) {
        for (size_t stream = 0; stream < STREAMS; stream++) {
            const uint8_t * p = chunk + stream * (CHUNK / STREAMS) + offset;
            for (size_t i = 0; i < N; i++) {
                sums[i] += *reinterpret_cast<const Vector *>(p + i * sizeof(Vector));
            }
        }
    }
    uint64_t sum = 0;
    for (const Vector & v : sums) {
        sum += v[0] + v[1];
    }
    return sum;
}

double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

// Has a team of threads call work(ith) again and again, for so many seconds. Returns the median of the calls' seconds.
double median_seconds(int n_threads, double seconds, const std::function<void(int)> & work) {
    Barrier barrier(n_threads);
    std::atomic<bool> done{false};
    std::vector<double> taken;
    const auto begin = Clock::now();
    run_team(n_threads, [&](int ith) {
        while (!done) {
            const auto call = barrier.wait();
            work(ith);
            const auto end = barrier.wait();
            if (ith == 0) {
                taken.push_back(seconds_between(call, end));
                done = seconds_between(begin, end) >= seconds;
            }
            barrier.wait();
        }
    });
    return median(std::move(taken));
}

// The product of a matrix with columns of its own, in the steps of the plug-in; every thread calls them, ith of nth.
class OwnProduct {
  public:
    OwnProduct(const Kernels & kernels, const TiledMatrix & matrix, int64_t n_cols)
        : x_(static_cast<size_t>(n_cols * matrix.n_in())), y_(static_cast<size_t>(n_cols * matrix.n_out())),
          columns_(kernels, nullptr, columns_of(x_, matrix.n_in(), n_cols)),
          ready_(allocate_streamed(columns_.n_bytes())),
          product_(kernels, columns_, 0, {matrix.tiles()}, y_.data(), matrix.n_out() * sizeof(float)) {
        columns_.lie_in(ready_.get());
        uint32_t state = 1;
        for (float & value : x_) {
            state = state * 1664525u + 1013904223u;
            value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
        }
    }

    size_t scratch_bytes() const { return std::max(columns_.scratch_bytes(), product_.scratch_bytes()); }

    void begin() { work_.reset(); }

    void prepare(int ith, int nth, const Scratch & scratch) const { columns_.prepare(ith, nth, scratch); }

    void multiply(int ith, int nth, const Scratch & scratch) {
        work_.run(product_.n_items(), ith, nth,
                  [&](int64_t begin, int64_t end) { product_.multiply(begin, end, scratch); });
    }

  private:
    static FloatColumns columns_of(const std::vector<float> & x, int64_t n_in, int64_t n_cols) {
        FloatColumns columns{reinterpret_cast<const char *>(x.data()), n_in, n_cols};
        columns.column_stride = static_cast<size_t>(n_in) * sizeof(float);
        return columns;
    }

    std::vector<float> x_;
    std::vector<float> y_;
    ReadyColumns columns_;
    StreamedMemory ready_;
    Product product_;
    SharedWork work_;
};

}  // namespace

double read_bandwidth(int n_threads, size_t n_bytes, double seconds) {
    const size_t n_chunks = std::max<size_t>(1, n_bytes / CHUNK);
    const StreamedMemory memory = allocate_streamed(n_chunks * CHUNK);
    std::memset(memory.get(), 1, n_chunks * CHUNK);
    // Every pass hands out n_chunks numbers, and to each thread one more, by which it knows that there are no chunks left.
    std::atomic<size_t> next{0};
    std::atomic<uint64_t> total{0};
    const size_t numbers_a_pass = n_chunks + static_cast<size_t>(n_threads);
    const double pass = median_seconds(n_threads, seconds, [&](int) {
        uint64_t sum = 0;
        for (size_t i; (i = next.fetch_add(1) % numbers_a_pass) < n_chunks;) {
            sum += sum_of_chunk(memory.get() + i * CHUNK);
        }
        total += sum;
    });
    return static_cast<double>(n_chunks * CHUNK) / pass;
}

double multiply_add_peak(const MultiplyAddLoop & loop, int n_threads, double seconds) {
    // Some milliseconds: long against a barrier, short against what else the machine does.
    const int64_t n_passes = 200'000'000 / loop.multiply_adds_a_pass;
    const double slice = median_seconds(n_threads, seconds, [&](int) { loop.run(n_passes); });
    return static_cast<double>(n_passes * loop.multiply_adds_a_pass * n_threads) / slice;
}

std::vector<ProductTimes> time_products(const Kernels & kernels, const std::vector<const TiledMatrix *> & matrices,
                                        int64_t n_cols, int n_threads, int repeats) {
    std::deque<OwnProduct> products;
    ThreadScratch scratch;
    for (const TiledMatrix * matrix : matrices) {
        products.emplace_back(kernels, *matrix, n_cols);
        scratch.reserve(n_threads, products.back().scratch_bytes());
    }
    Barrier barrier(n_threads);
    std::vector<ProductTimes> times(repeats);
    run_team(n_threads, [&](int ith) {
        for (int pass = -1; pass < repeats; pass++) {
            ProductTimes taken{};
            for (OwnProduct & product : products) {
                if (ith == 0) {
                    product.begin();
                }
                const auto begin = barrier.wait();
                product.prepare(ith, n_threads, scratch.of(ith));
                const auto prepared = barrier.wait();
                product.multiply(ith, n_threads, scratch.of(ith));
                const auto multiplied = barrier.wait();
                taken.prepare += seconds_between(begin, prepared);
                taken.multiply += seconds_between(prepared, multiplied);
            }
            if (ith == 0 && pass >= 0) {
                times[pass] = taken;
            }
        }
    });
    return times;
}

}  // namespace tern
