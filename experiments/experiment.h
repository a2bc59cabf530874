// An experiment: the points at which it measures, and a function that measures one point.
//
// experiments/run.py names the points one by one and does everything around: it finds the missing ones, interleaves
// repetitions, and writes the CSV and its stamp. experiments/claims.py has question, source and expected range. A new
// experiment is one file here and one row there. Results with other columns are a part of it, EXPERIMENT/PART, with a
// row and a CSV of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "experiments/values.h"

namespace xpyd::experiments {

struct Setting {
  std::string device = "cpu";  // "cpu" or "cuda"
  uint64_t seed = 0;
  bool tiny = false;   // runs the same code at sizes for a test or the interpreter; its figures are not results
  std::string traces;  // folder of the Mooncake traces; "" if there is none
};

// `wrong` is not empty if a computed result is not right. Nothing is timed then.
struct Finding {
  std::vector<Values> rows;
  std::string wrong;
};
using Measure = std::function<Result<Finding>(const Values& point)>;

struct Experiment {
  const char* name;
  const char* device;  // "cpu" or "cuda"; "any": the same code runs on both
  std::vector<Values> (*points)(const Setting& setting);
  // Returns the function that measures a point. State kept between points (weights, a calibration) is inside it.
  Measure (*open)(const Setting& setting);
};

// `open` for an experiment whose points share no state.
template <Result<Finding> (*run)(const Values& point, const Setting& setting)>
Measure each(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

bool register_experiment(Experiment experiment);
const std::vector<Experiment>& all_experiments();

#define XPYD_EXPERIMENT_CONCAT2(a, b) a##b
#define XPYD_EXPERIMENT_CONCAT(a, b) XPYD_EXPERIMENT_CONCAT2(a, b)
// Use REGISTER_EXPERIMENT("waste", "cpu", points, open) at namespace scope.
#define REGISTER_EXPERIMENT(...)                             \
  [[maybe_unused]] static const bool XPYD_EXPERIMENT_CONCAT( \
      registered_experiment_, __LINE__) = ::xpyd::experiments::register_experiment({__VA_ARGS__})

// A description of the card in use. The error says what is missing. Builds without CUDA have no card.
Result<std::string> cuda_card();
// The card's measured limits: copy_gbps, bf16_gemm_tflops.
Values cuda_peaks();

}  // namespace xpyd::experiments
