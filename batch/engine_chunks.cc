// Before the batching policy is asked, the chunk policy is: how many tokens the step has, and how many of each prompt.
#include "batch/engine_chunks.h"

#include <algorithm>
#include <cmath>

#include "base/log.h"
#include "batch/engine.h"

namespace xpyd::batch {

void EngineChunks::arrived(double tokens, double now_s) {
  arrived_tokens = arrived_tokens * std::exp(-std::max(0.0, now_s - arrived_s) / kArrivalWindow) + tokens;
  arrived_s = now_s;
}

void Engine::know_cost(const StepCost::Terms& cost, double steps_seen) {
  chunks_.cost = cost;
  chunks_.steps_seen = steps_seen;
}

// Of a step: the prompts that may run in it, and where their views are told what they get.
int Engine::choose_chunks(const KvStats& kv) {
  EngineChunks& c = chunks_;
  // What was decided last did not run: what was searched for its first prompt holds all the same.
  if (std::exchange(c.decided, false)) c.state.head = c.choice.state.head, c.state.wave_s = c.choice.state.wave_s;
  if (!c.decides()) return options_.step_tokens;
  c.prompts.clear();
  c.in_flight.clear();
  ChunkView& v = c.view = {};
  std::vector<SequenceView*> of;  // [prompt]
  const double now = clock_.now();
  const auto strictest = [](double& least, double own, double server) {
    const double wanted = own > 0 ? own : server;
    if (wanted > 0 && (least == 0 || wanted < least)) least = wanted;
  };
  const auto add = [&](const Sequence& s, SequenceView& view) {
    const Request& request = *s.request;
    if (view.most() < 1) return;  // its token is being computed, or another wave takes it
    if (view.pending() == 1) {
      ++v.decodes, v.decode_context += view.n_tokens;
      strictest(v.tbt_s, request.slo_tbt_s, c.options.tbt_s);
      return;
    }
    const double before = v.ttft_s;
    strictest(v.ttft_s, request.slo_ttft_s, c.options.ttft_s);
    if (const double own = request.slo_ttft_s > 0 ? request.slo_ttft_s : c.options.ttft_s; own > 0) {
      const double slack = request.arrival_s + own - now;
      v.slack_s = before == 0 ? slack : std::min(v.slack_s, slack);
    }
    c.prompts.push_back({request.id, view.n_computed, view.pending()});
    of.push_back(&view);
  };
  for (size_t i = 0; i < running_views_.size(); ++i) add(*running_[size_t(runnable_[i])], running_views_[i]);
  for (size_t i = 0; i < waiting_views_.size(); ++i) add(*waiting_[size_t(admissible_[i])], waiting_views_[i]);
  if (c.prompts.empty()) return options_.step_tokens;  // decodes alone: nobody is asked, nothing is remembered
  for (const auto& step : under_way_)
    for (const Entry& entry : step->entries)
      if (entry.n_tokens > 1) c.in_flight.push_back(entry.n_tokens);
  if (stats_.steps > c.counted_steps) {
    const double s = (stats_.step_seconds - c.counted_s) / double(stats_.steps - c.counted_steps);
    c.step_s = c.counted_steps == 0 ? s : 0.75 * c.step_s + 0.25 * s;
    c.counted_steps = stats_.steps, c.counted_s = stats_.step_seconds;
  }
  c.arrived(0, now);
  v.prompts = c.prompts;
  v.in_flight = c.in_flight;
  v.budget = options_.step_tokens;
  v.base = c.options.request_tokens > 0 ? std::min(c.options.request_tokens, v.budget) : v.budget;
  v.block_tokens = kv.block_tokens < v.budget ? kv.block_tokens : 1;  // a slot is no reason to end a chunk
  v.minimum = chunk_minimum(*c.options.policy, c.options.minimum, v.base, v.block_tokens);
  v.stages = in_waves() ? model_.stages() : 1, v.window = std::min(window_, v.stages);
  v.cost = c.cost, v.steps_seen = c.steps_seen;
  v.longest_prefix = c.longest_prefix, v.longest_chunk = c.longest_chunk;
  v.gap_s = c.step_s * v.window;
  v.arrival_tokens_s = c.arrived_tokens / EngineChunks::kArrivalWindow;
  v.kv_free = kv.capacity > 0 ? double(kv.available()) / kv.capacity : 0;
  xpyd::batch::choose_chunks(*c.options.policy, v, c.state, c.choice);
  c.decided = true;
  for (size_t i = 0; i < of.size(); ++i) of[i]->n_held = std::max(0, of[i]->pending() - c.choice.most[i]);
  return c.choice.step_tokens;
}

// The step runs, or waits as the policy said: what was decided for it counts.
void Engine::keep_chunks() {
  EngineChunks& c = chunks_;
  for (const Entry& entry : next_->entries)
    if (entry.n_tokens > 1) {
      c.longest_prefix = std::max(c.longest_prefix, entry.first);
      c.longest_chunk = std::max(c.longest_chunk, entry.n_tokens);
    }
  if (!std::exchange(c.decided, false)) return;
  if (c.watcher) c.watcher(c.view, c.state, c.choice);
  c.state = c.choice.state;
  ++stats_.chunk_decisions;
  stats_.chunk_extrapolations += c.choice.extrapolates;
  if (!c.choice.extrapolates || c.steps_seen < kKnownSteps || std::exchange(c.told, true)) return;
  log_line(
      LogLevel::info,
      "xpyd: --chunk-policy %s extrapolates: it plans %d tokens of prompts, the first behind %d of its own; the steps "
      "that the cost was fitted to had at most %d of a prompt, behind %d at most. From now on such plans are only "
      "counted (chunk_extrapolations_total)",
      c.options.policy->name, c.choice.step_tokens - c.view.decodes, c.prompts[0].done, c.view.longest_chunk,
      c.view.longest_prefix);
}

}  // namespace xpyd::batch
