// While an OnCpus exists, the calling thread and threads that it starts run on `cpus`.
#pragma once

#include <sched.h>

#include <span>
#include <string>

#include "base/status.h"

namespace xpyd {

class OnCpus {
 public:
  explicit OnCpus(std::span<const int> cpus) {
    XPYD_CHECK(sched_getaffinity(0, sizeof before_, &before_) == 0);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus) CPU_SET(cpu, &set);
    XPYD_CHECK(sched_setaffinity(0, sizeof set, &set) == 0, "cannot pin to cpu " + std::to_string(cpus[0]));
  }
  ~OnCpus() { sched_setaffinity(0, sizeof before_, &before_); }
  OnCpus(const OnCpus&) = delete;

 private:
  cpu_set_t before_;
};

}  // namespace xpyd
