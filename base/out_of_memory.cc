#include "base/out_of_memory.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

namespace xpyd {
namespace {

constexpr size_t kReserve = 1 << 20;  // bytes; to end requests and say goodbye
std::atomic<void*> reserve = nullptr;
std::atomic<bool> happened = false;

void say(size_t bytes, const char* more) {
  char line[80], room[32] = "";
  if (bytes) std::snprintf(room, sizeof room, " for %zu bytes", bytes);
  const int n = std::snprintf(line, sizeof line, "xpyd: no memory%s%s\n", room, more);
  [[maybe_unused]] const ssize_t written = write(2, line, size_t(n));  // a full pipe: as it is
}

}  // namespace

void prepare_for_out_of_memory() {
  void* bytes = std::malloc(kReserve);
  if (bytes) std::memset(bytes, 1, kReserve);
  reserve = bytes;
  std::set_new_handler([] { out_of_memory(0); });
  // Libraries that call malloc() themselves throw without asking the handler, from any thread.
  static const std::terminate_handler otherwise = std::set_terminate([] {
    try {
      if (std::current_exception()) throw;
    } catch (const std::bad_alloc&) {
      say(0, "");
      _exit(1);
    } catch (...) {
    }
    otherwise();
  });
}

void out_of_memory(size_t bytes) {
  happened = true;
  sigset_t blocked;
  pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  void* kept = reserve.exchange(nullptr);
  if (!kept || !sigismember(&blocked, SIGTERM)) {
    say(bytes, "");
    _exit(1);
  }
  say(bytes, ": ending");
  std::free(kept);
  kill(getpid(), SIGTERM);
}

bool was_out_of_memory() { return happened; }

}  // namespace xpyd
