// A model that computes nothing: a step takes seconds of an instance's own clock. With one stage, a step moves the
// clock forward. With several stages, waves are under way and end by the recurrence of a pipeline (scheduling notes,
// section 2.2):
//
//   C[i][s] = max(C[i-1][s], C[i][s-1] + boundary) + t_i
//
// Thread safety: none; the timeline's thread.
#pragma once

#include <memory>

#include "base/clock.h"
#include "disagg/conductor/cluster_state.h"
#include "model/cost/step_cost.h"
#include "model/model.h"

namespace xpyd::disagg {

// The shape that the engine sees: four bytes of KV for each token and layer. `n_layers` must be a multiple of the
// number of stages of every instance.
ModelConfig small_shape(int n_layers = 1);
inline KvShape small_kv(int n_layers = 1) { return kv_shape(small_shape(n_layers), Dtype::bf16); }

// An instance's clock and the times that its transfers depend on. `began_s` is the start of the current step (outside a
// step: of the turn). `last_began_s` and `last_ended_s` belong to the previous step, or to the last wave that a stage
// ended. `heard_s` is when another instance's message last arrived.
struct NodeTime {
  VirtualClock clock;
  double began_s = 0;
  double last_began_s = 0, last_ended_s = 0;
  double heard_s = 0;
  double wave_s = kNever;  // when the wave that the engine waits for may change
};

struct PacedPipeline {
  int stages = 1, window = 1;
  double boundary_s = 0, boundary_s_per_token = 0;  // time from one stage to the next
};

// `terms` are those of a step, or of a wave on one stage.
std::unique_ptr<Model> make_paced_model(const StepCost::Terms& terms, const PacedPipeline& pipeline, int n_layers,
                                        NodeTime& time);

}  // namespace xpyd::disagg
