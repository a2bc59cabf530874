// A model that computes nothing: for benches and tests of everything around a model.
#pragma once

#include <memory>

#include "model/model.h"

namespace xpyd {

// A Model of the shape of `config` that neither writes nor reads KV. The logits of a token are 0
// but for one 1, at a place that follows from the token's id and position alone, so that a greedy
// continuation is deterministic and does not depend on batching, chunking or the cache. The
// observer is called for every layer. Nothing is allocated per step.
std::unique_ptr<Model> make_null_model(const ModelConfig& config);

}  // namespace xpyd
