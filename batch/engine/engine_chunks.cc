// The chunk policy is asked before the batching policy. It says how many tokens the step has and how many of each
// prompt.
#include "batch/engine/engine_chunks.h"

#include <algorithm>

namespace xpyd::batch {

int EngineChunks::decide(std::span<const Candidate> candidates, int step_tokens, int block_tokens, int stages) {
  prompts_.clear();
  ChunkView view = {.budget = step_tokens, .stages = stages, .cost = cost_};
  std::vector<SequenceView*> of;  // [prompt]
  for (const auto [request, sequence] : candidates) {
    if (sequence->most() < 1) continue;  // its token is being computed, or another wave takes it
    if (sequence->pending() == 1) {
      ++view.decodes, view.decode_context += sequence->n_tokens;
      continue;
    }
    prompts_.push_back({request, sequence->n_computed, sequence->pending()});
    of.push_back(sequence);
  }
  if (prompts_.empty()) return step_tokens;  // decodes alone need no decision
  view.prompts = prompts_;
  view.block_tokens = block_tokens < step_tokens ? block_tokens : 1;  // chunks do not end at slot boundaries
  view.minimum = chunk_minimum(step_tokens, view.block_tokens);
  choose_chunks(*policy_, view, choice_.state, choice_);
  for (size_t i = 0; i < of.size(); ++i) of[i]->n_held = std::max(0, of[i]->pending() - choice_.most[i]);
  return choice_.step_tokens;
}

}  // namespace xpyd::batch
