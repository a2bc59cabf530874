#include "model/moe/moe.h"

namespace xpyd::model {

MoeBlock::MoeBlock(const ModelConfig& config, const ExpertSlice& slice, int max_step_tokens, RowTeam& team)
    : c_(config),
      slice_(slice),
      columns_(group_range(config.experts.intermediate, kRowParallelGroups, slice.groups)),
      team_(team),
      rows_(config.experts, max_step_tokens) {
  const size_t tokens = size_t(max_step_tokens), scores = tokens * size_t(c_.experts.count),
               gathered = tokens * size_t(c_.hidden), gated = 2 * tokens * size_t(columns_.end - columns_.begin);
  scratch_ = Buffer((scores + gathered + gated) * sizeof(float));
  gathered_ = scratch_.as<float>();
  gated_ = gathered_ + gathered;
  scores_ = gated_ + gated;
}

void MoeBlock::run(const LayerWeights& layer, const float* x, int n, float* out) {
  const size_t hidden = size_t(c_.hidden);
  team_.gemm(layer.router, {}, x, c_.hidden, scores_, c_.experts.count, n);
  rows_.choose(scores_, n, team_);
  for (int e = slice_.experts.begin; e < slice_.experts.end; ++e) {
    const auto [begin, end] = rows_.of(e);
    if (begin == end) continue;
    const ExpertWeights& expert = layer.experts[size_t(e)];
    team_.for_rows(end - begin, c_.hidden, [&, first = begin](int i) {
      std::copy_n(x + size_t(rows_.token(first + i)) * hidden, hidden, gathered_ + size_t(i) * hidden);
    });
    team_.gated(expert.gate_up, {}, columns_, gathered_, gated_, end - begin);
    team_.gemm(expert.down, {}, gated_, 2 * (columns_.end - columns_.begin), out + size_t(begin) * hidden, c_.hidden,
               end - begin, {0, 0}, slice_.groups);
  }
}

}  // namespace xpyd::model
