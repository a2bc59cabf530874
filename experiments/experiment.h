// An experiment: the points at which its question is asked, and what is found at one of them.
//
// experiments/run.py names the points one by one, and owns everything around: which are missing, repetitions in turn,
// the CSV and its stamp. Question, source and expected range stand in experiments/claims.py. A new experiment is one
// file here and one row there. What has other columns is a part of it, EXPERIMENT/PART, with a row and a CSV of its
// own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "experiments/values.h"

namespace xpyd::experiments {

struct Setting {
  std::string device = "cpu";  // cpu | cuda
  uint64_t seed = 0;
  bool tiny = false;   // the same code at sizes for a test or an interpreter; no figure to quote
  std::string traces;  // folder of the Mooncake traces; "" where there is none
};

// `wrong`: what was computed is not right, so nothing was timed.
struct Finding {
  std::vector<Values> rows;
  std::string wrong;
};
using Measure = std::function<Result<Finding>(const Values& point)>;

struct Experiment {
  const char* name;
  const char* device;  // "cpu", "cuda"; "any": the same code runs on both
  std::vector<Values> (*points)(const Setting& setting);
  // What it keeps from point to point (weights, a calibration) is inside the function that it returns.
  Measure (*open)(const Setting& setting);
};

// `open` of an experiment whose points know nothing of each other.
template <Result<Finding> (*run)(const Values& point, const Setting& setting)>
Measure each(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

bool register_experiment(Experiment experiment);
const std::vector<Experiment>& all_experiments();

#define XPYD_EXPERIMENT_CONCAT2(a, b) a##b
#define XPYD_EXPERIMENT_CONCAT(a, b) XPYD_EXPERIMENT_CONCAT2(a, b)
// REGISTER_EXPERIMENT("waste", "cpu", points, open) at namespace scope.
#define REGISTER_EXPERIMENT(...)                             \
  [[maybe_unused]] static const bool XPYD_EXPERIMENT_CONCAT( \
      registered_experiment_, __LINE__) = ::xpyd::experiments::register_experiment({__VA_ARGS__})

// What the card in use is; the error says what is missing. Builds without CUDA have none.
Result<std::string> cuda_card();
// Its measured limits: copy_gbps, bf16_gemm_tflops.
Values cuda_peaks();

}  // namespace xpyd::experiments
