// The cost of passing activations from one pipeline stage to the next: from the end of one stage's computation until
// the other stage sees all rows. Stages are threads, or processes of one host.
//
// Expected, threads: the rows stay in place. A store and a thread that is woken take 5 to 20 us, or below 2 us while
// the thread still spins.
// Expected, processes over shm: the [tokens, hidden] rows of f32 are copied once. The receiver looks for them between
// naps (ranks::Naps) of at most 50 us, so it is 25 us late on average, plus what the system adds to a nap. One token (4
// KiB) is copied in post(). 256 tokens (1 MiB) are copied by the transport's thread: 10 us to wake it, and 90 us of
// copying at 12 GB/s.
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "base/wait_word.h"
#include "disagg/chunked_pp/boundary.h"
#include "experiments/bench/harness.h"
#include "experiments/bench/on_cpus.h"
#include "experiments/stats.h"

namespace xpyd::experiments {
namespace {

constexpr int kRounds = 200, kHidden = 1024;
constexpr double kComputes = 1e-3;  // seconds that the stage before computes, while the next one waits

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return percentile(times, 50);
}

double between_threads() {
  WaitWord posted, seen;
  std::vector<double> times, begun(kRounds);
  RealClock clock;
  std::thread next([&] {
    for (uint32_t round = 0; round < kRounds; ++round) {
      posted.wait([round](uint32_t n) { return n > round; }, false);
      times.push_back(clock.now() - begun[round]);
      seen.add(1);
    }
  });
  for (uint32_t round = 0; round < kRounds; ++round) {
    clock.sleep(kComputes);
    begun[round] = clock.now();
    posted.add(1);
    seen.wait([round](uint32_t n) { return n > round; }, false);
  }
  next.join();
  return median(times);
}

template <class T>
void put(int to, const T* values, size_t n) {
  XPYD_CHECK(write(to, values, n * sizeof(T)) == ssize_t(n * sizeof(T)));
}
template <class T>
void get(int from, T* values, size_t n) {
  XPYD_CHECK(recv(from, values, n * sizeof(T), MSG_WAITALL) == ssize_t(n * sizeof(T)));
}

struct Hello {
  char address[512] = {};
};

std::unique_ptr<KvTransport> connected(const char* transport, int socket, PeerId self, const ranks::BoundaryIn& in,
                                       Clock& clock) {
  auto made =
      find_transport(transport)
          ->make({.regions = {in.region()}, .queue = &cpu_queue(), .clock = &clock, .self = self, .connections = 1})
          .value();
  Hello hello;
  made->address().copy(hello.address, sizeof hello.address - 1);
  put(socket, &hello, 1);
  get(socket, &hello, 1);
  while (!made->connect(1 - self, hello.address).value()) clock.sleep(1e-4);
  return made;
}

// The next stage, in a process of its own. It reports how long each wave took to arrive.
void follow(const char* transport, int socket, size_t floats) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_TIMERSLACK, 1000ul);
  RealClock clock;
  ranks::BoundaryIn in = ranks::BoundaryIn::make(*find_transport(transport), 2, floats).value();
  const auto own = connected(transport, socket, 1, in, clock);
  const std::vector<RemoteKey> registrations = in.open(*own, 0).value();
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    put(socket, &registrations[size_t(round % 2)], 1);
    for (ranks::Naps naps; !in.arrived(*own, round % 2);) naps.nap();
    const double now = clock.now();
    in.take(round % 2);
    double begun;
    get(socket, &begun, 1);
    times.push_back(now - begun);
  }
  put(socket, times.data(), times.size());
}

double between_processes(const char* transport, int tokens) {
  const size_t floats = size_t(tokens) * kHidden;
  int sockets[2];
  XPYD_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  const pid_t child = fork();
  if (child == 0) {
    follow(transport, sockets[1], floats);
    _exit(0);
  }
  RealClock clock;
  ranks::BoundaryIn in = ranks::BoundaryIn::make(*find_transport(transport), 1, 16).value();
  const auto own = connected(transport, sockets[0], 0, in, clock);
  ranks::BoundaryOut out(*own, clock, 1, floats);
  const std::vector<float> rows(floats, 1.0f);
  for (int round = 0; round < kRounds; ++round) {
    RemoteKey key;
    get(sockets[0], &key, 1);
    clock.sleep(kComputes);
    const double begun = clock.now();
    out.post(0, rows.data(), floats, round % 2, key);
    while (!out.left(0).value()) clock.sleep(1e-5);
    put(sockets[0], &begun, 1);
  }
  std::vector<double> times(kRounds);
  get(sockets[0], times.data(), times.size());
  waitpid(child, nullptr, 0);
  for (int socket : sockets) close(socket);
  return median(times);
}

void bench_boundary(Bench& bench) {
  const OnCpus all(bench.cpus());  // a team has pinned this thread to one cpu
  const auto report = [&](const std::string& name, double seconds, double budget_us) {
    BenchRow row{.group = {}, .name = name, .n_threads = 2, .rounds = kRounds};
    row.seconds = seconds;
    row.measure = "of a budget of " + std::to_string(int(budget_us)) + " us (budget / time)";
    row.share = row.share_p10 = row.share_p90 = 1e-6 * budget_us / seconds;
    row.target = 1;
    bench.report(row);
  };
  report("from thread to thread", between_threads(), 20);
  report("from process to process by shm, 1 token", between_processes("shm", 1), 60);
  report("from process to process by tcp, 1 token", between_processes("tcp", 1), 120);
  report("from process to process by shm, 256 tokens", between_processes("shm", 256), 250);
}

REGISTER_BENCH("boundary", bench_boundary);

}  // namespace
}  // namespace xpyd::experiments
