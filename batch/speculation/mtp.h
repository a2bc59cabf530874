// Drafts of the model's own multi-token head (DeepSeek-V3, section 2.2; model/README.md has its forward pass).
//
// The head's KV is one more layer of the sequence's own. Row p of it depends on the tokens up to p and no others (it
// joins the embedding of token p with the hidden state of token p - 1), so blocks are found again, sent, stored and
// evicted with it, and a prefix hit loses no block (as vLLM's do, issue 54360, where the head runs one token ahead).
// What a hit does lose is one hidden state: the first row behind it is computed without.
//
// From its logits it draws with the sequence's own sampler and random numbers, so that where head and model think alike
// the draft is what the engine will draw, at any temperature (arXiv 2408.07978).
//
// Thread safety: the engine's.
#pragma once

#include <memory>

#include "batch/drafter.h"

namespace xpyd::batch {

std::unique_ptr<Drafter> make_head_drafter(const SpeculationOptions& options, const DrafterParts& parts);

}  // namespace xpyd::batch
