// A model whose KV is checksums and whose tokens follow from all of them: what it says after a
// prompt is known without it, and KV that is foreign, stale or missing makes it say something else.
#pragma once

#include <memory>
#include <vector>

#include "model/model.h"

namespace xpyd::testing {

// 2 layers, one KV head of 4 f32, vocabulary 251, context 512. `codes`: rows of 32 f32 that are the codes of int8 rows,
// and so come through those unchanged (--wire-kv-dtype).
const ModelConfig& checksum_config(bool codes = false);
std::unique_ptr<Model> make_checksum_model(bool codes = false);
// The n greedy tokens after a prompt.
std::vector<int32_t> checksum_tokens(const std::vector<int32_t>& prompt, int n);

}  // namespace xpyd::testing
