// Meta's own layout of a Llama folder beside Hugging Face's: params.json for config.json, tensors of other names, and
// the rows of W_q and W_k in another order.
//
// RoPE turns pairs of a head's dims. Meta's pairs are neighbours, (2 i, 2 i + 1); Hugging Face's, and ours, are half a
// head apart, (i, i + head_dim / 2), and its converter moves the rows of W_q and W_k so that the scores are the same:
//
//   W.view(n_heads, head_dim / 2, 2, hidden).transpose(1, 2)
//
// Here those rows are read from where Meta has them, so that a folder's weights, and all logits, are the ones of
// Hugging Face's folder of the same model.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace xpyd::model {

// The text of the config.json that a params.json stands for.
Result<std::string> config_of_params(const std::string& json_text, const std::string& file_name);

inline constexpr std::string_view kMetaEmbedding = "tok_embeddings.weight";  // a checkpoint with it is in Meta's layout
// Meta's name of a tensor of Hugging Face's.
std::string meta_name(std::string name);
// Whether the tensor of this name has rows in another order, and where its row is.
bool meta_reorders(std::string_view name);
constexpr int meta_row(int row, int head_dim) {
  const int d = row % head_dim, half = head_dim / 2;
  return row - d + 2 * (d % half) + d / half;
}

}  // namespace xpyd::model
