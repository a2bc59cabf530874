// Drafts from the model's own multi-token head (DeepSeek-V3, section 2.2; model/llama/README.md describes it).
//
// The head's KV is one more layer of the sequence's own KV. Row p of that layer joins the embedding of token p with the
// hidden state of token p - 1, so it depends on tokens up to p only. Blocks are therefore cached, sent, stored and
// evicted with it, and a prefix hit loses no block. (In vLLM the head runs one token ahead and each hit loses its last
// block, issue 54360.) A hit does lose one hidden state: the first row after it is computed without.
//
// The head samples with a copy of the sequence's sampler and its random numbers. Where head and model agree, the draft
// is what the engine will sample, at any temperature (arXiv 2408.07978).
//
// Thread safety: the engine's thread.
#pragma once

#include <memory>

#include "batch/drafter.h"

namespace xpyd::batch {

std::unique_ptr<Drafter> make_head_drafter(const DrafterParts& parts);

}  // namespace xpyd::batch
