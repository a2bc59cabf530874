// How the threads of one computation wait for each other: they spin first, because most waits are shorter than a
// wake-up, and then they sleep in the kernel.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace xpyd {

// Tells the core that the thread spins on a word that another thread will write.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline constexpr size_t kCacheLine = 64;

// A 32-bit word on which threads wait, with a count of those that sleep in the kernel. A writer pays a system call only
// if a thread sleeps. A writer stores the word and then reads `sleepers`. A waiter increments `sleepers`, and then the
// kernel compares the word. All four are sequentially consistent, so at least one of the two sees the other.
struct alignas(kCacheLine) WaitWord {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  void wake_all();  // after a store to `value`
  void add(uint32_t n) {
    value.fetch_add(n);
    wake_all();
  }

  // Returns when done(value) holds. `crowded`: there are more threads than cores, so spinning yields the core.
  template <class Done>
  void wait(Done done, bool crowded) {
    double deadline = 0;
    for (int i = 0;; ++i) {
      if (done(value.load(std::memory_order_acquire))) return;
      if (spent(i, crowded, deadline)) break;
    }
    sleep_until(done);
  }
  // The same without spinning, for waits that are longer than a wake-up while other threads want the core.
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
  // Spins once. Returns true when it has spun long enough.
  static bool spent(int turn, bool crowded, double& deadline);
  void sleep(uint32_t seen);  // returns when `value` may differ from `seen`
};

// A barrier of n threads that can be used again and again.
class Barrier {
 public:
  explicit Barrier(int n_threads, bool crowded) : n_threads_(n_threads), crowded_(crowded) {}
  void wait();

 private:
  const int n_threads_;
  const bool crowded_;
  WaitWord rounds_;  // the number of times that all have arrived
  alignas(kCacheLine) std::atomic<int> arrived_{0};
};

int allowed_cpus();  // the number of cpus on which this process may run

}  // namespace xpyd
