// Threads that compute a pass together, and the barrier at which they meet.
#pragma once
#include <atomic>
#include <cstdint>

namespace draftree {

// Run work(context, thread, threads) in each of up to `threads` threads, this one among them, and
// wait for all.
void run_team(int threads, void (*work)(void* context, int thread, int threads), void* context);

// Use the threads of an OpenMP runtime: `fork` is GOMP_parallel, the others omp_get_thread_num and
// omp_get_num_threads.
void use_openmp(void* fork, void* thread_number, void* thread_count);

void yield_thread();

namespace {  // not shared between the instruction sets that include this

// Let `threads` threads wait for each other.
class Barrier {
 public:
  void wait(int threads) {
    if (threads < 2) return;
    const int64_t awaited =
        (arrived_.fetch_add(1, std::memory_order_acq_rel) / threads + 1) * threads;
    for (int looks = 0; arrived_.load(std::memory_order_acquire) < awaited; looks++) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      __asm__ __volatile__("yield");
#endif
      if (looks > 2000) yield_thread();  // more threads than processors
    }
  }

 private:
  alignas(64) std::atomic<int64_t> arrived_{0};
};

}  // namespace

}  // namespace draftree
