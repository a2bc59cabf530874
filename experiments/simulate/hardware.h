// What a simulated instance is: cards and a model, each by published figures, and the seconds that a step takes there.
//
// Thread safety: plain functions.
#pragma once

#include <span>
#include <string>

#include "base/status.h"
#include "model/cost/step_cost.h"

namespace xpyd::disagg {

// The cards of one instance, which work as one (tensor parallel), and its links. Rates are of one card and from its
// data sheet, dense bf16 (V100: fp16); what is reached of them is `mfu` and `mbu`.
struct Hardware {
  std::string name;
  int cards = 1;
  double flops_per_s = 0, bytes_per_s = 0, memory_bytes = 0;
  double mfu = 0.44, mbu = 0.7;      // Mooncake's prefill times are met best by .44 (section 1.8 of its notes here)
  double step_s = 0.5e-3;            // of any step: launches, collectives, sampling
  double link_bytes_per_s = 12.5e9;  // of the instance, each way
  double link_s = 20e-6;             // latency
  double host_bytes = 0;             // for KV, of the instance
  double host_bytes_per_s = 0;       // between its cards and host memory
  // Of the model that was measured there, in place of what its shape says; zeros: not measured.
  model::StepCost::Terms step_terms = {};
  std::string source;
};

// A model by its published shape. Attention costs 4 n_heads head_dim FLOPs for each token and each that it looks at, in
// each layer; everything else two for each active parameter.
struct SimulatedModel {
  std::string name;
  int n_layers = 0, n_heads = 0, head_dim = 0;
  double active_parameters = 0, parameters = 0;
  double kv_elements = 0;  // of one token in one layer
  double weight_element_bytes = 2, kv_element_bytes = 2;
  std::string source;

  double kv_token_bytes() const { return kv_elements * kv_element_bytes * n_layers; }
  // Of a token's residual stream, from one pipeline stage to the next; as wide as its heads together.
  double boundary_bytes() const { return double(n_heads) * head_dim * weight_element_bytes; }
};

std::span<const Hardware> hardware_table();
std::span<const SimulatedModel> model_table();
// NAME of the table with a count of cards ("a800x8"), or a JSON file with these fields. Errors: not_found, with the
// names that there are; those of the file.
Result<Hardware> find_hardware(const std::string& name);
Result<SimulatedModel> find_simulated_model(const std::string& name);

// Of a mixture of experts a step of n tokens reads the share of the weights that n tokens choose; here, all of them.
// `stages`: of a wave on one of so many pipeline stages, each on such hardware (what was measured there is of one
// stage).
model::StepCost step_cost(const SimulatedModel& model, const Hardware& hardware, int stages = 1);
// Tokens of KV that fit beside the weights into `share` of the cards' memory; 0: none.
double kv_tokens(const SimulatedModel& model, const Hardware& hardware, int stages = 1, double share = 0.9);

}  // namespace xpyd::disagg
