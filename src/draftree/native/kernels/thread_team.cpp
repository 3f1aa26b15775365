#include "thread_team.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace draftree {
namespace {

using Work = void (*)(void*, int, int);

struct Region {
  Work work;
  void* context;
};

void (*openmp_fork)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
int (*openmp_thread)() = nullptr;
int (*openmp_threads)() = nullptr;

void run_member(void* data) {
  const auto* region = static_cast<const Region*>(data);
  region->work(region->context, openmp_thread(), openmp_threads());
}

// Threads of our own, for platforms whose torch brings no libgomp. They look for work for a while,
// then sleep.
class Pool {
 public:
  void run(int threads, Work work, void* context) {
    std::lock_guard<std::mutex> turn(turn_);
    while (static_cast<int>(members_.size()) < threads - 1) {
      const int number = static_cast<int>(members_.size()) + 1;
      members_.emplace_back([this, number, seen = round_.load()] { serve(number, seen); });
    }
    work_ = work;
    context_ = context;
    threads_ = threads;
    busy_.store(static_cast<int>(members_.size()), std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(sleep_);
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work(context, 0, threads);
    while (busy_.load(std::memory_order_acquire) > 0) yield_thread();
  }

 private:
  void serve(int number, int64_t seen) {
    for (;;) {
      for (int looks = 0; looks < 20000 && round_.load(std::memory_order_acquire) == seen;
           looks++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
      if (round_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(sleep_);
        wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
      }
      seen++;
      if (number < threads_) work_(context_, number, threads_);
      busy_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::mutex turn_, sleep_;
  std::condition_variable wake_;
  std::vector<std::thread> members_;
  std::atomic<int64_t> round_{0};
  std::atomic<int> busy_{0};
  Work work_ = nullptr;
  void* context_ = nullptr;
  int threads_ = 0;
};

Pool* pool = new Pool;  // never deleted: its threads outlive static destructors

#if !defined(_WIN32)
// A child process has none of its parent's threads, neither ours nor OpenMP's: it uses a pool of
// its own.
void forget_threads() {
  openmp_fork = nullptr;
  pool = new Pool;
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, forget_threads);
#endif

}  // namespace

void run_team(int threads, Work work, void* context) {
  if (threads < 2) return work(context, 0, 1);
  if (openmp_fork == nullptr) return pool->run(threads, work, context);
  Region region{work, context};
  openmp_fork(run_member, &region, static_cast<unsigned>(threads), 0);
}

void use_openmp(void* fork, void* thread_number, void* thread_count) {
  openmp_fork = reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(fork);
  openmp_thread = reinterpret_cast<int (*)()>(thread_number);
  openmp_threads = reinterpret_cast<int (*)()>(thread_count);
}

void yield_thread() { std::this_thread::yield(); }

}  // namespace draftree
