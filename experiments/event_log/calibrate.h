// Derives the hardware of a simulated instance from an event log of live instances: the seconds of their steps and the
// rate of their transports.
//
// Thread safety: plain functions.
#pragma once

#include <span>
#include <string>

#include "experiments/simulate/hardware.h"

namespace xpyd::disagg {

struct Calibration {
  model::StepCost::Terms step_terms = {};
  model::PredictionError step_error;  // error of these terms over the same steps
  double link_bytes_per_s = 0;        // 0: nothing was transferred
  model::PredictionError link_error;  // over the instances that sent or read KV
};

// Step terms are a least-squares fit of relative errors over all "step" lines. The link rate is the mean of each
// instance's last measured seconds per byte. Errors: those of read_event_logs(); invalid_argument if there is no step.
Result<Calibration> calibrate(std::span<const std::string> logs);
// Returns `calibration` with its errors on `logs`, which are usually other logs than those it was made from.
Result<Calibration> compare(const Calibration& calibration, std::span<const std::string> logs);
// A file for find_hardware(). It has no memory sizes.
std::string hardware_json(const Calibration& calibration);

}  // namespace xpyd::disagg
