// One mixture-of-experts block: the MLP of a sparse layer on one rank. README.md draws it.
//
// One order of additions. An expert's output row is a product of gemm.h, so its bits depend on the token's own
// activations only. A token's rows are weighted and added in ascending order of expert ids. So the result depends on
// neither the other tokens of the step nor the rank that computes a row.
//
// Thread safety: the rank's own thread makes every call.
#pragma once

#include <algorithm>

#include "base/memory.h"
#include "model/moe/router.h"
#include "model/weights/weights.h"

namespace xpyd::model {

// The part of every sparse layer that a tensor rank computes: these K-groups of these experts' down products.
struct ExpertSlice {
  Range experts;
  Range groups;  // of kRowParallelGroups
};
// The whole experts of a rank, as even as they go, and the rank that has an expert.
inline Range rank_experts(int count, int rank, int tp) { return share(count, rank, tp); }
inline int expert_rank(int expert, int count, int tp) { return ((expert + 1) * tp - 1) / count; }

class MoeBlock {
 public:
  MoeBlock(const ModelConfig& config, const ExpertSlice& slice, int max_step_tokens, RowTeam& team);

  // Chooses experts for the n tokens of x, [n, hidden], and writes this rank's rows of the down products to
  // out[n * experts.used, hidden]. Rows of other ranks' experts are not written.
  void run(const LayerWeights& layer, const float* x, int n, float* out);

  // out[0, hidden) = the weighted rows of a token of the last run(), added. read(expert, at, n, part) writes elements
  // [at, at + n) of all rows to `part`, summed over the ranks that share the expert.
  template <class Read>
  void combine(int token, Read read, float* out) const {
    constexpr int kChunk = 512;
    float part[kChunk];
    std::fill_n(out, c_.hidden, 0.0f);
    for (int j = 0; j < c_.experts.used; ++j) {
      const float weight = rows_.weight(token, j);
      const size_t first = size_t(rows_.row(token, j)) * size_t(c_.hidden);
      for (int begin = 0; begin < c_.hidden; begin += kChunk) {
        const int n = std::min(kChunk, c_.hidden - begin);
        read(rows_.expert(token, j), first + size_t(begin), n, part);
        for (int i = 0; i < n; ++i) out[begin + i] += weight * part[i];
      }
    }
  }
  const ExpertRows& rows() const { return rows_; }  // of the last run()

 private:
  const ModelConfig& c_;
  const ExpertSlice slice_;
  const Range columns_;  // of gate and up, which the K-groups read
  RowTeam& team_;
  ExpertRows rows_;
  Buffer scratch_;
  // Parts of scratch_, [max_step_tokens, width] each. An expert has at most one row of each token.
  float* scores_;    // width experts.count
  float* gathered_;  // width hidden: an expert's rows of x
  float* gated_;     // width 2 * columns
};

}  // namespace xpyd::model
