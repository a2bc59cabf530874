// Before the batching policy is asked, the chunk policy is: how many tokens the step has, and how many of each prompt.
#include "batch/engine/engine_chunks.h"

#include <algorithm>

#include "base/log.h"
#include "batch/engine/engine.h"

namespace xpyd::batch {

void Engine::know_cost(const StepCost::Terms& cost, double steps_seen) {
  chunks_.cost = cost;
  chunks_.steps_seen = steps_seen;
}

// Of a step: the prompts that may run in it, and where their views are told what they get.
int Engine::choose_chunks(const KvStats& kv) {
  EngineChunks& c = chunks_;
  // What was decided last did not run: what was searched for its first prompt holds all the same.
  if (std::exchange(c.decided, false)) c.state = c.choice.state;
  if (!c.decides()) return options_.step_tokens;
  c.prompts.clear();
  ChunkView& v = c.view = {};
  std::vector<SequenceView*> of;  // [prompt]
  const auto add = [&](const Sequence& s, SequenceView& view) {
    if (view.most() < 1) return;  // its token is being computed, or another wave takes it
    if (view.pending() == 1) {
      ++v.decodes, v.decode_context += view.n_tokens;
      return;
    }
    c.prompts.push_back({s.request->id, view.n_computed, view.pending()});
    of.push_back(&view);
  };
  for (size_t i = 0; i < running_views_.size(); ++i) add(*running_[size_t(runnable_[i])], running_views_[i]);
  for (size_t i = 0; i < waiting_views_.size(); ++i) add(*waiting_[size_t(admissible_[i])], waiting_views_[i]);
  if (c.prompts.empty()) return options_.step_tokens;  // decodes alone: nobody is asked, nothing is remembered
  v.prompts = c.prompts;
  v.budget = options_.step_tokens;
  v.base = c.options.request_tokens > 0 ? std::min(c.options.request_tokens, v.budget) : v.budget;
  v.block_tokens = kv.block_tokens < v.budget ? kv.block_tokens : 1;  // a slot is no reason to end a chunk
  v.minimum = chunk_minimum(*c.options.policy, c.options.minimum, v.base, v.block_tokens);
  v.stages = in_waves() ? model_.stages() : 1;
  v.cost = c.cost, v.steps_seen = c.steps_seen;
  v.longest_prefix = c.longest_prefix, v.longest_chunk = c.longest_chunk;
  xpyd::batch::choose_chunks(*c.options.policy, v, c.state, c.choice);
  c.decided = true;
  for (size_t i = 0; i < of.size(); ++i) of[i]->n_held = std::max(0, of[i]->pending() - c.choice.most[i]);
  return c.choice.step_tokens;
}

// The step runs: what was decided for it counts.
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
