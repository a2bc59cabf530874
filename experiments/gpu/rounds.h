// Timing on a GPU, by the rules of experiments/bench/harness.h: check first, then rounds in which every case is timed
// beside the card's own limits. Shares are medians of per-round ratios. Times are CUDA events around enough repetitions
// to fill a sample.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/cuda/cuda.h"
#include "base/work.h"
#include "experiments/bench/harness.h"
#include "model/cuda/peak_cuda.h"

namespace xpyd::experiments::gpu {

// copy: reads and writes at the copy bandwidth. gemm: the fastest product there is. roofline: the slower of the two.
enum class Limit { copy, gemm, roofline, none };

struct Case {
  std::string name;
  std::function<void()> run;           // enqueues one repetition on Rounds::stream()
  std::function<std::string()> check;  // "" if the result is right
  Work work;
  Limit limit = Limit::none;
  double target = 0;     // share to reach; 0: only reported
  std::string versus;    // another case of the same call; one more row has the ratio of speeds to it
  bool reported = true;  // false: only present as another case's `versus`
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
  // Checks and times all cases, reports them and writes the files. A case with a wrong result is reported and not
  // timed. Returns the seconds of each case, 0 if wrong.
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

// The parts of the report. `tiny` keeps the shapes and shrinks the sizes.
void peaks(Rounds& rounds, const cuda::Card& card, bool tiny);
// `yardsticks`: a CSV with times of other implementations on this card (experiments/gpu/sdpa.py), or "".
void decode_attention(Rounds& rounds, const cuda::Card& card, bool tiny, const std::string& yardsticks);
void prefill_attention(Rounds& rounds, const cuda::Card& card, bool tiny, const std::string& yardsticks);
void products(Rounds& rounds, const cuda::Card& card, bool tiny);
void whole_model(Rounds& rounds, const cuda::Card& card, bool tiny);
void kv_transfer(Rounds& rounds, bool tiny);
void virtual_memory(Rounds& rounds, const cuda::Card& card, bool tiny);

// `xpyd_gpu_report [--tiny] [--yardsticks FILE] [peaks] [decode] [prefill] [products] [model] [transfer] [vmm] [bench
// options]`. --tiny makes it short enough for the interpreter. Returns 0 if every result is right, 1 if one is wrong or
// there is no card, 2 for bad arguments.
int run(int argc, char** argv);

}  // namespace xpyd::experiments::gpu
