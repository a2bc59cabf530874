// The choice of experts: scores -> the rows of a step, grouped by expert.
//
// Softmax over all experts, the `used` most probable ones, and their probabilities as weights, which are divided by
// their sum if `renormalise` (Mixtral, arXiv 2401.04088, section 2.1; Qwen3-MoE with norm_topk_prob). Of equal scores
// the lower id is used. The choice and the bits of the weights depend on the token's own scores only.
#pragma once

#include <vector>

#include "model/config.h"
#include "model/gemm/row_team.h"

namespace xpyd::model {

// A row is a token in one of its experts. Rows stand in ascending order of experts, then of tokens.
class ExpertRows {
 public:
  ExpertRows(const Experts& experts, int max_tokens);

  // Groups the rows of n tokens. `scores`, [n, count], is overwritten.
  void choose(float* scores, int n, RowTeam& team);

  // Rows of an expert.
  Range of(int expert) const { return {begin_[size_t(expert)], begin_[size_t(expert) + 1]}; }
  int token(int row) const { return tokens_[size_t(row)]; }
  // A token's j-th expert in ascending order, its weight, and its row.
  int expert(int token, int j) const { return chosen_[place(token, j)]; }
  float weight(int token, int j) const { return weights_[place(token, j)]; }
  int row(int token, int j) const { return rows_[place(token, j)]; }

 private:
  size_t place(int token, int j) const { return size_t(token * experts_.used + j); }
  const Experts& experts_;
  std::vector<int> begin_;          // [count + 1]
  std::vector<int> tokens_;         // [rows]
  std::vector<int> chosen_, rows_;  // [tokens, used]
  std::vector<float> weights_;      // [tokens, used]
};

// Writes the ids of the `used` highest scores, in ascending order.
void top_experts(const float* scores, int count, int used, int* chosen);

}  // namespace xpyd::model
