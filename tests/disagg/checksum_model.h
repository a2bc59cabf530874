// A model whose KV is checksums and whose tokens follow from all of them: what it says after a
// prompt is known without it, and KV that is foreign, stale or missing makes it say something else.
#pragma once

#include <memory>
#include <vector>

#include "model/model.h"

namespace xpyd::testing {

const ModelConfig& checksum_config();  // 2 layers, one KV head of 4 f32, vocabulary 251, context 512
std::unique_ptr<Model> make_checksum_model();
// The n greedy tokens after a prompt.
std::vector<int32_t> checksum_tokens(const std::vector<int32_t>& prompt, int n);

}  // namespace xpyd::testing
