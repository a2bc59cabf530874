// Timing on a GPU as experiments/bench/harness.h does it on a CPU: check first, then rounds in
// which every contestant is timed beside the card's own limits; shares are medians of per-round
// ratios. Times are CUDA events around enough repetitions to fill a sample.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/cuda/cuda.h"
#include "base/work.h"
#include "experiments/bench/harness.h"
#include "model/cuda/peak_cuda.h"

namespace xpyd::experiments::gpu {

// roofline: the slower of copy and gemm. copy: read and written; gemm: the fastest there is.
enum class Limit { copy, gemm, roofline, none };

struct Case {
  std::string name;
  std::function<void()> run;           // one repetition, enqueued on Rounds::stream()
  std::function<std::string()> check;  // "" when the result is right
  Work work;
  Limit limit = Limit::none;
  double target = 0;     // share to reach; 0 reports only
  std::string versus;    // another case of the same call: one more row has the ratio of speeds to it
  bool reported = true;  // false: it is here for `versus` of others
};

struct Sizes {
  CudaPeakSizes peak;
  int rounds = 9;
  double sample_seconds = 0.01;
};

class Rounds {
 public:
  Rounds(Bench& bench, const Sizes& sizes);
  cuda::Stream& stream() { return stream_; }
  Bench& bench() { return bench_; }
  // Checks and times all cases, reports them and writes the files; a wrong one is reported and not
  // timed. Seconds of each case, 0: wrong.
  std::vector<double> measure(const std::vector<Case>& cases);
  CudaPeakProbe& probe() { return *probe_; }
  void found_wrong(const std::string& name, const std::string& what);
  bool all_right() const { return all_right_; }

 private:
  Bench& bench_;
  Sizes sizes_;
  cuda::Stream stream_;
  std::unique_ptr<CudaPeakProbe> probe_;
  bool all_right_ = true;
};

// The parts of the report. tiny: the shapes stay, the sizes shrink.
void peaks(Rounds& rounds, const cuda::Card& card, bool tiny);
// yardsticks: a CSV of other implementations' times on this card (experiments/gpu/sdpa.py), or "".
void decode_attention(Rounds& rounds, const cuda::Card& card, bool tiny, const std::string& yardsticks);
void prefill_attention(Rounds& rounds, const cuda::Card& card, bool tiny, const std::string& yardsticks);
void products(Rounds& rounds, const cuda::Card& card, bool tiny);
void whole_model(Rounds& rounds, const cuda::Card& card, bool tiny);
void kv_transfer(Rounds& rounds, bool tiny);
void virtual_memory(Rounds& rounds, const cuda::Card& card, bool tiny);

// `xpyd_gpu_report [--tiny] [--yardsticks FILE] [peaks] [decode] [prefill] [products] [model] [transfer] [vmm]
// [bench options]`;
// --tiny lets the interpreter run it. 0: every result was right; 1: a wrong one, or no card; 2: bad
// arguments.
int run(int argc, char** argv);

}  // namespace xpyd::experiments::gpu
