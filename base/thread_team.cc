#include "base/thread_team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/status.h"
#include "base/wait_word.h"

namespace xpyd {
namespace {

constexpr double kSpinSeconds = 100e-6;  // about three times the cost of waking a parked thread

static_assert(sizeof(std::atomic<uint32_t>) == 4);

void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  XPYD_CHECK(sched_setaffinity(0, sizeof set, &set) == 0, "cannot pin to cpu " + std::to_string(cpu));
}

}  // namespace

void WaitWord::wake_all() {
  if (sleepers.load() > 0)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void WaitWord::sleep(uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

bool WaitWord::spent(int turn, bool crowded, double& deadline) {
  if (crowded)
    sched_yield();
  else
    cpu_relax();
  if (turn % 32 != 31) return false;
  const double now = RealClock().now();
  if (deadline == 0) deadline = now + kSpinSeconds;
  return now > deadline;
}

void Barrier::wait() {
  if (n_threads_ == 1) return;
  const uint32_t round = rounds_.value.load();
  if (arrived_.fetch_add(1) == n_threads_ - 1) {
    arrived_.store(0);
    rounds_.add(1);
    return;
  }
  rounds_.wait([round](uint32_t now) { return now != round; }, crowded_);
}

std::vector<int> usable_cpus() {
  cpu_set_t set;
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

int allowed_cpus() { return std::max(1, int(usable_cpus().size())); }

struct ThreadTeam::State {
  explicit State(int n_threads) : barrier(n_threads, n_threads > allowed_cpus()), crowded(n_threads > allowed_cpus()) {}
  WaitWord epoch;       // the number of runs so far
  WaitWord unfinished;  // members other than the owner that have not finished this run
  Barrier barrier;
  // Written by the owner before `epoch`, read by members after it.
  alignas(kCacheLine) Call call = nullptr;
  void* context = nullptr;
  bool stop = false;
  const bool crowded;
  bool owner_pinned = false;
  cpu_set_t owner_before;  // the owner's affinity before it was pinned
  pthread_t owner;
  std::vector<int> cpus;
  std::vector<std::thread> threads;
};

ThreadTeam::ThreadTeam(int n_threads, std::vector<int> cpus)
    : n_threads_(n_threads), state_(std::make_unique<State>(n_threads)) {
  XPYD_CHECK(n_threads >= 1, "n_threads = " + std::to_string(n_threads));
  XPYD_CHECK(cpus.empty() || int(cpus.size()) >= n_threads,
             std::to_string(cpus.size()) + " cpus for " + std::to_string(n_threads) + " threads");
  State& s = *state_;
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

void ThreadTeam::barrier() { state_->barrier.wait(); }

}  // namespace xpyd
