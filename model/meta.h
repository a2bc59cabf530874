// Meta's layout of a Llama folder. It differs from Hugging Face's in three ways: params.json replaces config.json,
// tensors have other names, and the rows of W_q and W_k stand in another order.
//
// RoPE rotates pairs of a head's dimensions. Meta pairs neighbours, (2 i, 2 i + 1). Hugging Face and this project pair
// dimensions half a head apart, (i, i + head_dim / 2). Hugging Face's converter permutes the rows so that the scores
// agree:
//
//   W.view(n_heads, head_dim / 2, 2, hidden).transpose(1, 2)
//
// The loader reads each row from its place in Meta's order. So weights and logits equal those of Hugging Face's folder
// of the same model.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace xpyd::model {

// Translates a params.json to the text of the equal config.json.
Result<std::string> config_of_params(const std::string& json_text, const std::string& file_name);

inline constexpr std::string_view kMetaEmbedding = "tok_embeddings.weight";  // present in Meta's layout only
// Returns Meta's name of the tensor with this Hugging Face name.
std::string meta_name(std::string name);
// True if Meta stores this tensor's rows in another order; meta_row() then gives a row's place in it.
bool meta_reorders(std::string_view name);
// Place in Meta's W_q or W_k of row `row` of Hugging Face's.
constexpr int meta_row(int row, int head_dim) {
  const int d = row % head_dim, half = head_dim / 2;
  return row - d + 2 * (d % half) + d / half;
}

}  // namespace xpyd::model
