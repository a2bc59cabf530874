// A fixed team of threads that runs one function at a time on every member.
//
// Thread safety: one thread, the owner, calls run() and takes part as rank 0. Between calls the other members spin on a
// cache line for about 100 us and then park. Waking a parked thread on another core costs 30 us, a spinning one 0.1 us.
#pragma once

#include <functional>
#include <memory>
#include <vector>

namespace xpyd {

class ThreadTeam {
 public:
  // Requires n_threads >= 1; with 1 no thread is created. `cpus` pins rank i to cpus[i]; the owner is pinned from its
  // first run() until the team is destroyed. If `cpus` is empty, the kernel places the threads.
  explicit ThreadTeam(int n_threads, std::vector<int> cpus = {});
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return n_threads_; }

  // Calls body(rank) once for each rank in [0, size()) and returns when all have finished. Does not allocate.
  template <class Body>
  void run(Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_erased([](void* context, int rank) { (*static_cast<Plain*>(context))(rank); },
               const_cast<std::remove_const_t<Plain>*>(&body));
  }

  // Called inside run()'s body: waits until every member has arrived.
  void barrier();

 private:
  using Call = void (*)(void* context, int rank);
  void run_erased(Call call, void* context);
  struct State;
  int n_threads_;
  std::unique_ptr<State> state_;
};

std::vector<int> usable_cpus();  // the cpus on which the calling thread may run, ascending

// The half-open share of `n` items that belongs to `rank` of `size`, in multiples of `grain`.
struct Range {
  int begin, end;
};
inline Range share(int n, int rank, int size, int grain = 1) {
  int units = (n + grain - 1) / grain;
  int begin = int(long(units) * rank / size) * grain, end = int(long(units) * (rank + 1) / size) * grain;
  return {begin < n ? begin : n, end < n ? end : n};
}

}  // namespace xpyd
