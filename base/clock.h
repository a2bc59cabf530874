// Time is an argument: seconds since an arbitrary origin, monotonic. Thread safety: RealClock any thread, VirtualClock
// one.
#pragma once

#include <time.h>

namespace xpyd {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual double now() = 0;  // seconds
  // Sleeps for `seconds`. What the caller waits for may come from another thread, so callers sleep, look and sleep
  // again.
  virtual void sleep(double seconds) {
    const timespec t{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
    nanosleep(&t, nullptr);
  }
};

class RealClock final : public Clock {
 public:
  double now() override {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
  }
};

class VirtualClock final : public Clock {
 public:
  double now() override { return seconds; }
  void sleep(double more) override { seconds += more; }
  double seconds = 0;
};

}  // namespace xpyd
