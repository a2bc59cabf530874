// How threads of one computation wait for each other: first they spin, as the wait is mostly
// shorter than a wake-up, then they sleep in the kernel.
//
// Thread safety: any number of writers and waiters.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace xpyd {

// What a thread says to its core between two looks at a word that another thread will write.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline constexpr size_t kCacheLine = 64;

// A 32-bit word that threads wait on, with a count of those that sleep in the kernel. A writer pays a system call only
// when somebody sleeps: it stores the word, then reads `sleepers`; a waiter adds itself to `sleepers`, then has the
// kernel compare the word. All four are sequentially consistent, so at least one of the two sees the other.
struct alignas(kCacheLine) WaitWord {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  void wake_all();  // after a store to `value`
  void add(uint32_t n) {
    value.fetch_add(n);
    wake_all();
  }

  // Returns once done(value) holds. `crowded`: more threads than cores, so give the core away.
  template <class Done>
  void wait(Done done, bool crowded) {
    double deadline = 0;
    for (int i = 0;; ++i) {
      if (done(value.load(std::memory_order_acquire))) return;
      if (spent(i, crowded, deadline)) break;
    }
    sleep_until(done);
  }
  // The same without spinning: what is waited for takes longer than a wake-up, and others want the core.
  template <class Done>
  void sleep_until(Done done) {
    for (;;) {
      sleepers.fetch_add(1);
      uint32_t seen = value.load();
      if (!done(seen)) sleep(seen);
      sleepers.fetch_sub(1);
      if (done(value.load())) return;
    }
  }

 private:
  // One turn of spinning; true: long enough.
  static bool spent(int turn, bool crowded, double& deadline);
  void sleep(uint32_t seen);  // returns when `value` may differ from `seen`
};

// Where n threads wait for each other, again and again.
class Barrier {
 public:
  explicit Barrier(int n_threads, bool crowded) : n_threads_(n_threads), crowded_(crowded) {}
  void wait();

 private:
  const int n_threads_;
  const bool crowded_;
  WaitWord rounds_;  // one more each time that all have arrived
  alignas(kCacheLine) std::atomic<int> arrived_{0};
};

int allowed_cpus();  // that this process may run on

}  // namespace xpyd
