// What a simulated instance is, from an event log of live ones: the seconds of their steps, and the rate of their
// wires.
//
// Thread safety: plain functions.
#pragma once

#include <span>
#include <string>

#include "experiments/simulate/hardware.h"

namespace xpyd::disagg {

struct Calibration {
  model::StepCost::Terms step_terms = {};
  model::PredictionError step_error;  // of these terms, over the same steps
  double link_bytes_per_s = 0;        // 0: nothing was transferred
  model::PredictionError link_error;  // … over the instances that posted
};

// Least squares of relative errors over all "step" lines; of wires the mean of what a byte cost each instance last.
// Errors: read_event_logs(); invalid_argument: there is no step.
Result<Calibration> calibrate(std::span<const std::string> logs);
// Of these logs as predicted by a calibration that comes from others: only its errors differ.
Result<Calibration> compare(const Calibration& calibration, std::span<const std::string> logs);
// A file for find_hardware(). It says nothing of memory.
std::string hardware_json(const Calibration& calibration);

}  // namespace xpyd::disagg
