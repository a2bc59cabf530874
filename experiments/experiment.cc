#include "experiments/experiment.h"

namespace xpyd::experiments {
namespace {

std::vector<Experiment>& registry() {
  static std::vector<Experiment> all;  // filled before main, read after
  return all;
}

}  // namespace

bool register_experiment(Experiment experiment) {
  registry().push_back(experiment);
  return true;
}
const std::vector<Experiment>& all_experiments() { return registry(); }

#ifndef XPYD_CUDA  // else experiments/cuda/card.cu has them
Result<std::string> cuda_card() { return Error{ErrorCode::unavailable, "no CUDA device (this build has no CUDA)"}; }
Values cuda_peaks() { return {}; }
#endif

}  // namespace xpyd::experiments
