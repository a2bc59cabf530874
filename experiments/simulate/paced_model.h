// A model that computes nothing: its steps take seconds of an instance's own clock. On one stage a step moves the clock
// on; on several, waves are under way, and end when the recurrence of a pipeline says (scheduling notes, section 2.2):
//
//   C[i][s] = max(C[i-1][s], C[i][s-1] + boundary) + t_i
//
// Thread safety: none; the timeline's thread.
#pragma once

#include <memory>

#include "base/clock.h"
#include "disagg/conductor/scoreboard.h"
#include "model/cost/step_cost.h"
#include "model/model.h"

namespace xpyd::disagg {

// What the engine moves: four bytes of KV a token and layer. `n_layers`: as many as all instances' stages divide.
ModelConfig small_shape(int n_layers = 1);
inline KvShape small_kv(int n_layers = 1) { return kv_shape(small_shape(n_layers), Dtype::bf16); }

// An instance's own time, when its step (else its turn) began, its step before that (or what a stage did last of a
// wave), and when another instance was last heard.
struct NodeTime {
  VirtualClock clock;
  double began_s = 0;
  double last_began_s = 0, last_ended_s = 0;
  double heard_s = 0;
  double wave_s = kNever;  // when a wave that is waited for has news
};

struct PacedPipeline {
  int stages = 1, window = 1;
  double boundary_s = 0, boundary_s_per_token = 0;  // from one stage to the next
};

// `terms`: of a step, or of a wave on one stage.
std::unique_ptr<Model> make_paced_model(const StepCost::Terms& terms, const PacedPipeline& pipeline, int n_layers,
                                        NodeTime& time);

}  // namespace xpyd::disagg
