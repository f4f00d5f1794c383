// Starting and joining threads: see team.h.
#include "team.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace tern {

namespace {

class Team {
  public:
    // Starts up to n threads, which wait. `why` tells why there are fewer, if there are.
    Team(int n, const std::function<void(int)> & work) : work_(work) {
        try {
            threads_.reserve(static_cast<size_t>(n));
            for (int i = 0; i < n; i++) {
                threads_.emplace_back([this, i] { wait_and_work(i + 1); });
            }
        } catch (const std::exception & error) {
            why_ = error.what();
        }
    }
    ~Team() { send_home(); }
    Team(const Team &) = delete;
    Team & operator=(const Team &) = delete;

    int size() const { return static_cast<int>(threads_.size()); }
    const std::string & why() const { return why_; }

    // Lets them work, and works with them as number 0. Throws what one of them threw.
    void work() {
        tell(Order::WORK);
        call(0);
        join();
        if (failure_ != nullptr) {
            std::rethrow_exception(failure_);
        }
    }

    // Lets them go without any work.
    void send_home() {
        tell(Order::GO_HOME);
        join();
    }

  private:
    enum class Order { WAIT, WORK, GO_HOME };

    void wait_and_work(int ith) {
        std::unique_lock<std::mutex> lock(mutex_);
        told_.wait(lock, [&] { return order_ != Order::WAIT; });
        const bool works = order_ == Order::WORK;
        lock.unlock();
        if (works) {
            call(ith);
        }
    }

    void call(int ith) {
        try {
            work_(ith);
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (failure_ == nullptr) {
                failure_ = std::current_exception();
            }
        }
    }

    void tell(Order order) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            order_ = order;
        }
        told_.notify_all();
    }

    void join() {
        for (std::thread & thread : threads_) {
            thread.join();
        }
        threads_.clear();
    }

    const std::function<void(int)> & work_;
    std::string why_;
    std::mutex mutex_;
    std::condition_variable told_;
    Order order_ = Order::WAIT;
    std::exception_ptr failure_;
    std::vector<std::thread> threads_;
};

}  // namespace

void run_team(int n_threads, const std::function<void(int)> & work) {
    Team team(n_threads - 1, work);
    if (team.size() < n_threads - 1) {
        throw std::runtime_error("only " + std::to_string(team.size() + 1) + " of " + std::to_string(n_threads) +
                                 " threads can be started (" + team.why() + "); ask for fewer with n_threads");
    }
    team.work();
}

void parallel(int64_t n, int n_threads, const std::function<void(int64_t, int64_t)> & work) {
    n_threads = static_cast<int>(std::min<int64_t>(n_threads, n));
    if (n_threads <= 1) {
        work(0, n);
        return;
    }
    const int64_t part = std::max<int64_t>(1, n / (n_threads * 8));
    std::atomic<int64_t> next{0};
    const std::function<void(int)> take_parts = [&](int) {
        try {
            for (int64_t begin; (begin = next.fetch_add(part)) < n;) {
                work(begin, std::min(begin + part, n));
            }
        } catch (...) {
            next = n;
            throw;
        }
    };
    Team(n_threads - 1, take_parts).work();
}

void for_each_thread(int n_threads, const std::function<void(int)> & work) {
    parallel(n_threads, n_threads, [&](int64_t begin, int64_t end) {
        for (int64_t ith = begin; ith < end; ith++) {
            work(static_cast<int>(ith));
        }
    });
}

}  // namespace tern
