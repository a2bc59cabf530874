// Cards and models by their published figures, and the seconds that a step takes on a simulated instance.
//
// Thread safety: plain functions.
#pragma once

#include <span>
#include <string>

#include "base/status.h"
#include "model/cost/step_cost.h"

namespace xpyd::disagg {

// The cards of one instance, which work together (tensor parallel), and its links. The rates are those of one card,
// from its data sheet, for dense bf16 (V100: fp16). `mfu` and `mbu` are the shares of them that are reached.
struct Hardware {
  std::string name;
  int cards = 1;
  double flops_per_s = 0, bytes_per_s = 0, memory_bytes = 0;
  double mfu = 0.44, mbu = 0.7;      // .44 fits Mooncake's prefill times best (section 1.8 of its notes here)
  double step_s = 0.5e-3;            // fixed part of any step: launches, collectives, sampling
  double link_bytes_per_s = 12.5e9;  // of the instance, in each direction
  double link_s = 20e-6;             // latency
  double host_bytes = 0;             // host memory for KV, of the instance
  double host_bytes_per_s = 0;       // between its cards and host memory
  // Measured terms, which replace the terms derived from the model's shape. All zeros: not measured.
  model::StepCost::Terms step_terms = {};
  std::string source;
};

// A model by its published shape. In each layer, attention costs 4 n_heads head_dim FLOPs for each pair of a query
// token and a key token. Everything else costs two FLOPs for each active parameter and token.
struct SimulatedModel {
  std::string name;
  int n_layers = 0, n_heads = 0, head_dim = 0;
  double active_parameters = 0, parameters = 0;
  double kv_elements = 0;  // elements of KV of one token in one layer
  double weight_element_bytes = 2, kv_element_bytes = 2;
  std::string source;

  double kv_token_bytes() const { return kv_elements * kv_element_bytes * n_layers; }
  // Bytes of one token's residual stream, sent from one pipeline stage to the next. Its width is n_heads * head_dim.
  double boundary_bytes() const { return double(n_heads) * head_dim * weight_element_bytes; }
};

std::span<const Hardware> hardware_table();
std::span<const SimulatedModel> model_table();
// Finds a row of the table by `NAME` with a count of cards ("a800x8"), or reads a JSON file with these fields. Errors:
// not_found, which lists the names; the errors of the file.
Result<Hardware> find_hardware(const std::string& name);
Result<SimulatedModel> find_simulated_model(const std::string& name);

// The cost of a step. A step of n tokens of a mixture of experts reads only the weights of the experts that its tokens
// choose; here it reads all weights. With `stages` > 1, the cost of one wave on one of so many pipeline stages, each on
// `hardware` of its own. Measured step_terms are those of one stage.
model::StepCost step_cost(const SimulatedModel& model, const Hardware& hardware, int stages = 1);
// Tokens of KV that fit beside the weights into `share` of the cards' memory; 0 if none fit.
double kv_tokens(const SimulatedModel& model, const Hardware& hardware, int stages = 1, double share = 0.9);

}  // namespace xpyd::disagg
