#include "base/wait_word.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "base/spin.h"

namespace xpyd {
namespace {

constexpr double kSpinSeconds = 100e-6;  // about three times what a wake-up of a parked thread costs

double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

static_assert(sizeof(std::atomic<uint32_t>) == 4);

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
  const double now = seconds_now();
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

int allowed_cpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace xpyd
