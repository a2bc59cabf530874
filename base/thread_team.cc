#include "base/thread_team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <string>
#include <thread>

#include "base/status.h"

namespace xpyd {
namespace {

constexpr double kSpinSeconds =
    100e-6;  // about three times what a wake-up of a parked thread costs
constexpr size_t kCacheLine = 64;

double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A 32-bit word that threads wait on, with a count of those that sleep in the kernel. A writer pays
// a system call only when somebody sleeps: it stores the word, then reads `sleepers`; a waiter adds
// itself to `sleepers`, then has the kernel compare the word. All four are sequentially consistent,
// so at least one of the two sees the other.
struct alignas(kCacheLine) WaitWord {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  void wake_all() {
    if (sleepers.load() > 0)
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
              nullptr, 0);
  }

  // Returns once done(value) holds. `crowded`: more threads than cores, so give the core away.
  template <class Done>
  void wait(Done done, bool crowded) {
    double deadline = 0;
    for (int i = 0;; ++i) {
      if (done(value.load(std::memory_order_acquire))) return;
      if (crowded)
        sched_yield();
      else
        relax();
      if (i % 32 == 31) {
        double now = seconds_now();
        if (deadline == 0) deadline = now + kSpinSeconds;
        if (now > deadline) break;
      }
    }
    for (;;) {
      sleepers.fetch_add(1);
      uint32_t seen = value.load();
      if (!done(seen))
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT_PRIVATE, seen, nullptr,
                nullptr, 0);
      sleepers.fetch_sub(1);
      if (done(value.load())) return;
    }
  }
};
static_assert(sizeof(std::atomic<uint32_t>) == 4);

int allowed_cpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  XPYD_CHECK(sched_setaffinity(0, sizeof set, &set) == 0,
             "cannot pin to cpu " + std::to_string(cpu));
}

}  // namespace

struct ThreadTeam::State {
  WaitWord epoch;       // one more for every run
  WaitWord unfinished;  // members, the owner aside, that have not finished this run
  WaitWord barrier;     // one more each time that all have arrived
  alignas(kCacheLine) std::atomic<int> arrived{0};
  // Written by the owner before `epoch`, read by members after it.
  alignas(kCacheLine) Call call = nullptr;
  void* context = nullptr;
  bool stop = false;
  bool crowded = false;
  bool owner_pinned = false;
  cpu_set_t owner_before;  // the owner's affinity before it was pinned
  pthread_t owner;
  std::vector<int> cpus;
  std::vector<std::thread> threads;
};

ThreadTeam::ThreadTeam(int n_threads, std::vector<int> cpus)
    : n_threads_(n_threads), state_(std::make_unique<State>()) {
  XPYD_CHECK(n_threads >= 1, "n_threads = " + std::to_string(n_threads));
  XPYD_CHECK(cpus.empty() || int(cpus.size()) >= n_threads,
             std::to_string(cpus.size()) + " cpus for " + std::to_string(n_threads) + " threads");
  State& s = *state_;
  s.crowded = n_threads > allowed_cpus();
  s.cpus = std::move(cpus);
  for (int rank = 1; rank < n_threads; ++rank) {
    s.threads.emplace_back([&s, rank] {
      if (!s.cpus.empty()) pin_to(s.cpus[size_t(rank)]);
      for (uint32_t last = 0;;) {
        s.epoch.wait([last](uint32_t now) { return now != last; }, s.crowded);
        ++last;  // the owner starts no run before this one has ended
        if (s.stop) return;
        s.call(s.context, rank);
        if (s.unfinished.value.fetch_sub(1) == 1) s.unfinished.wake_all();
      }
    });
  }
}

ThreadTeam::~ThreadTeam() {
  state_->stop = true;
  state_->epoch.value.fetch_add(1);
  state_->epoch.wake_all();
  for (std::thread& thread : state_->threads) thread.join();
  if (state_->owner_pinned && pthread_equal(state_->owner, pthread_self()))
    sched_setaffinity(0, sizeof state_->owner_before, &state_->owner_before);
}

void ThreadTeam::run_erased(Call call, void* context) {
  State& s = *state_;
  if (!s.owner_pinned && !s.cpus.empty()) {
    XPYD_CHECK(sched_getaffinity(0, sizeof s.owner_before, &s.owner_before) == 0);
    pin_to(s.cpus[0]);
    s.owner = pthread_self();
    s.owner_pinned = true;
  }
  if (n_threads_ == 1) return call(context, 0);
  s.call = call;
  s.context = context;
  s.unfinished.value.store(uint32_t(n_threads_ - 1), std::memory_order_relaxed);
  s.epoch.value.fetch_add(1);
  s.epoch.wake_all();
  call(context, 0);
  s.unfinished.wait([](uint32_t left) { return left == 0; }, s.crowded);
}

void ThreadTeam::barrier() {
  if (n_threads_ == 1) return;
  State& s = *state_;
  uint32_t round = s.barrier.value.load();
  if (s.arrived.fetch_add(1) == n_threads_ - 1) {
    s.arrived.store(0);
    s.barrier.value.fetch_add(1);
    s.barrier.wake_all();
    return;
  }
  s.barrier.wait([round](uint32_t now) { return now != round; }, s.crowded);
}

}  // namespace xpyd
