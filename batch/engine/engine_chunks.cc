// The chunk policy is asked before the batching policy. It says how many tokens the step has and how many of each
// prompt.
#include "batch/engine/engine_chunks.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "batch/engine/engine_parts.h"
#include "batch/step_arrays.h"

namespace xpyd::batch {

EngineChunks::EngineChunks(const ChunkOptions& options) : options_(options) {
  if (!options_.policy) options_.policy = find_chunk_policy("fixed");
}

int EngineChunks::decide(std::span<const Candidate> candidates, int step_tokens, int block_tokens, int stages) {
  // The last decision did not run, but the wave time searched for its first prompt stays valid.
  if (std::exchange(decided_, false)) state_ = choice_.state;
  prompts_.clear();
  view_ = {};
  std::vector<SequenceView*> of;  // [prompt]
  for (const auto [request, view] : candidates) {
    if (view->most() < 1) continue;  // its token is being computed, or another wave takes it
    if (view->pending() == 1) {
      ++view_.decodes, view_.decode_context += view->n_tokens;
      continue;
    }
    prompts_.push_back({request, view->n_computed, view->pending()});
    of.push_back(view);
  }
  if (prompts_.empty()) return step_tokens;  // decodes alone need no decision
  view_.prompts = prompts_;
  view_.budget = step_tokens;
  view_.base = options_.request_tokens > 0 ? std::min(options_.request_tokens, step_tokens) : step_tokens;
  view_.block_tokens = block_tokens < step_tokens ? block_tokens : 1;  // chunks do not end at slot boundaries
  view_.minimum = chunk_minimum(*options_.policy, options_.minimum, view_.base, view_.block_tokens);
  view_.stages = stages;
  view_.cost = cost_, view_.steps_seen = steps_seen_;
  view_.longest_prefix = longest_prefix_, view_.longest_chunk = longest_chunk_;
  choose_chunks(*options_.policy, view_, state_, choice_);
  decided_ = true;
  for (size_t i = 0; i < of.size(); ++i) of[i]->n_held = std::max(0, of[i]->pending() - choice_.most[i]);
  return choice_.step_tokens;
}

void EngineChunks::keep(std::span<const StepEntry> entries) {
  for (const StepEntry& entry : entries)
    if (entry.n_tokens > 1) {
      longest_prefix_ = std::max(longest_prefix_, entry.first);
      longest_chunk_ = std::max(longest_chunk_, entry.n_tokens);
    }
  if (!std::exchange(decided_, false)) return;
  if (watcher_) watcher_(view_, state_, choice_);
  state_ = choice_.state;
  if (choice_.extrapolates && steps_seen_ >= kKnownSteps && !std::exchange(told_, true)) say_once();
}

void EngineChunks::say_once() const {
  log_line(LogLevel::info,
           "xpyd: --chunk-policy %s extrapolates: it plans %d prompt tokens, the first of them after %d earlier tokens "
           "of its prompt; the steps to which its cost was fitted had at most %d prompt tokens, after at most %d",
           options_.policy->name, choice_.step_tokens - view_.decodes, prompts_[0].done, view_.longest_chunk,
           view_.longest_prefix);
}

}  // namespace xpyd::batch
