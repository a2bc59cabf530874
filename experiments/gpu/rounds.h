// Timing on a GPU as base/bench.h does it on a CPU: check first, then rounds in which every
// contestant is timed beside the card's own limits; shares are medians of per-round ratios. Times
// are CUDA events around enough repetitions to fill a sample.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/bench.h"
#include "base/cuda.h"
#include "base/work.h"
#include "model/gemm_cuda.h"

namespace xpyd::gpu {

enum class Limit { copy, gemm, roofline, none };  // roofline: the slower of both

struct Case {
  std::string name;
  std::function<void()> run;           // one repetition, enqueued on Rounds::stream()
  std::function<std::string()> check;  // "" when the result is right
  Work work;
  Limit limit = Limit::none;
  double target = 0;  // share (or ratio) to reach; 0 reports only
  std::string
      versus;  // another case of the same call: the target is then for the ratio of speeds to it
};

struct Sizes {
  size_t copy_bytes = size_t(1) << 30;
  int gemm_n = 8192;
  int rounds = 9;
  double sample_seconds = 0.01;
};

class Rounds {
 public:
  Rounds(Bench& bench, const Sizes& sizes);
  cuda::Stream& stream() { return stream_; }
  // Checks and times all cases; a wrong one is reported and not timed.
  void measure(const std::vector<Case>& cases);
  // Seconds of one repetition.
  double time(const std::function<void()>& run, int repetitions);
  double copy_gbps();    // device to device, bytes read and written
  double gemm_tflops();  // bf16, n^3, through cuBLASLt, random data
  void found_wrong(const std::string& name, const std::string& what);
  bool all_right() const { return all_right_; }

 private:
  Bench& bench_;
  Sizes sizes_;
  cuda::Stream stream_;
  cuda::Event begin_{true}, end_{true};
  cuda::Memory from_, to_;
  cuda::Memory a_, b_, c_;
  CudaGemm gemm_;
  CudaGemmArgs product_;
  bool all_right_ = true;
};

// The whole report: `xpyd_gpu_report [--tiny] [bench options]`; --tiny keeps the shapes and shrinks
// the sizes, so that the interpreter can run it. 0: every result was right; 1: a wrong one, or no
// card; 2: bad arguments.
int run(int argc, char** argv);

}  // namespace xpyd::gpu
