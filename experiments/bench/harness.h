// A benchmark harness for a shared machine. It checks a result before it times it. It times the contestants and the
// machine's own limits in the same rounds, in rotating order, and reports the median of per-round ratios. On a shared
// machine, medians of separate runs differ by more than the things compared.
//
// Thread safety: one thread, the owner of the teams.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/peak/peak.h"
#include "base/thread_team.h"
#include "base/work.h"

namespace xpyd::experiments {

// The limit that a case is compared with in each round.
enum class Limit {
  fma,       // share of the FMA peak: work.flops
  bf16_dot,  // share of the peak of products of bf16 pairs, on CPUs that have them: work.flops
  read,      // share of the streaming-read bandwidth: work.bytes
  copy,      // share of the copy bandwidth: work.bytes
  roofline,  // share of the tighter bound: max(flops / fma, bytes / read)
  none,      // time only
};

struct BenchCase {
  std::string name;                    // "f32 M=512 N=4096 K=4096"
  int n_threads = 1;                   // also the number of threads of the peaks it is compared with
  std::function<void()> run;           // one repetition
  std::function<std::string()> check;  // "" if the result is right, else a description of the error
  Work work;                           // of one repetition
  Limit limit = Limit::roofline;
  double target = 0;                // share (or ratio) to reach; 0 reports only
  std::vector<std::string> versus;  // cases of the same call and thread count;
                                    // `target` is then the ratio of speeds to the fastest of them
};

struct BenchRow {
  std::string group, name;
  int n_threads = 0, rounds = 0;
  double seconds = 0;  // median of one repetition
  double gflops = 0, gbps = 0;
  std::string measure;  // "of FMA peak", "x best of OpenBLAS, BLIS"
  double share = 0, share_p10 = 0, share_p90 = 0;
  double target = 0;
  bool met = true;
  double taken = 0;   // share of all cpus that other processes and the hypervisor had in the counted rounds
  int set_aside = 0;  // rounds that do not count, because that share was above max_taken
  bool cut = false;   // the rounds were ended by row_s
};

inline constexpr int kLeastRounds = 5;

struct BenchOptions {
  int rounds = 15;
  int n_threads = 0;                // most threads of a case; 0: all cpus that this process may use
  double sample_ms = 20;            // within a round, a case is repeated until it took this long
  double settle_ms = 0;             // pause before each sample, until the threads of other libraries stop spinning
  double row_s = 0;                 // seconds for each row of a measurement, of at least kLeastRounds; 0: no limit
  double max_taken = 1;             // largest share of all cpus for the hypervisor (steal) and other processes
  std::string json, csv;            // files to write, or ""
  std::vector<std::string> groups;  // empty = all
};

class Bench {
 public:
  explicit Bench(BenchOptions options);
  ~Bench();

  // Checks every case, then times them all together and prints one row each. A case whose check fails is not timed and
  // makes exit_code() 1. `rounds` = 0 means options().rounds. A round that is set aside is repeated, until more
  // than `rounds` were. After row_s for each case, no further round begins, and the rows say so.
  void measure(const std::vector<BenchCase>& cases, int rounds = 0);

  // Prints and keeps a row that was measured in another way. Fills in its group and `met`.
  void report(BenchRow row);

  // A team pinned to the first n of the allowed cpus. Equal n return the same object.
  ThreadTeam& team(int n_threads);
  const std::vector<int>& cpus() const;  // the cpus that this process may use
  int max_threads() const;               // as BenchOptions say
  const BenchOptions& options() const { return options_; }
  const std::vector<BenchRow>& rows() const { return rows_; }
  int exit_code() const { return wrong_results_ > 0 ? 1 : 0; }  // a missed target is no failure

  // Runs the registered groups that options.groups names, in the order of their names.
  int run_registered();
  void print_conditions() const;
  void write_files() const;  // options.json and options.csv; run_registered() calls it

 private:
  struct State;
  BenchOptions options_;
  std::string group_;
  std::vector<BenchRow> rows_;
  int wrong_results_ = 0;
  std::unique_ptr<State> state_;
};

// GB/s of one second of `iperf3 -l 1M` over loopback; 0 if iperf3 does not run here.
double iperf3_gbps();

// Parses `[names...] [--rounds N] [--threads N] [--sample-ms X] [--json FILE] [--csv FILE]`.
Result<BenchOptions> parse_bench_options(int argc, char** argv);

using BenchGroup = std::function<void(Bench&)>;
bool register_bench(const char* name, BenchGroup group);
std::vector<std::string> registered_benches();

#define XPYD_BENCH_CONCAT2(a, b) a##b
#define XPYD_BENCH_CONCAT(a, b) XPYD_BENCH_CONCAT2(a, b)
// Use REGISTER_BENCH("gemm", bench_gemm) at namespace scope in experiments/bench/gemm_bench.cc.
#define REGISTER_BENCH(name, function)                                    \
  [[maybe_unused]] static const bool XPYD_BENCH_CONCAT(registered_bench_, \
                                                       __LINE__) = ::xpyd::experiments::register_bench(name, function)

}  // namespace xpyd::experiments
