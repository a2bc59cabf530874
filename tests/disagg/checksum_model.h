// A model whose KV is checksums and whose tokens follow from all of them. Its answer is known without running it, and
// foreign, stale or missing KV changes the answer.
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
