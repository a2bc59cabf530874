// The arithmetic of attention without its memory: what an instruction set has to supply. walk.cc,
// one source for all of them, decides which rows of which blocks meet which queries; the kernels
// only ever see row pointers and small dense panels.
//
// Every kernel keeps one addition order: one FMA (or mul+add) chain per output element, ascending
// in d for scores and in the token for values, whatever the number of rows it is called with; or, over codes of int8
// and int4 (codes_256.h), sums of integers, which are exact and so have no order.
#pragma once

#include <cstddef>

#include "attention/attention.h"

namespace xpyd::attention {

// One step of online softmax; tile i is tokens [64 i, 64 i + 64) of the sequence.
inline constexpr int kTileTokens = 64;
// One independent softmax state; split i is tokens [512 i, 512 i + 512).
inline constexpr int kSplitTokens = 512;
inline constexpr int kPanelTokens = 16;  // K tokens that are transposed together
inline constexpr int kPanelDims = 16;    // V dims that are computed together
inline constexpr int kPartTokens = 32;   // of V that a stream computes head after head; a tile has two parts

// A row of q, and an accumulator: head_dim rounded up to kPanelDims.
static constexpr int padded_dim(int head_dim) { return (head_dim + kPanelDims - 1) / kPanelDims * kPanelDims; }

// Of a tile.
struct Tokens {
  int begin, end;
};

// Running softmax of one query row over the tokens seen so far of one split, in base 2: weights are
// exp2(s - max), `sum` is their sum, the row's accumulator holds their weighted sum of V.
struct SoftmaxState {
  float max, sum;
};

// Lines to ask the memory for while computing: the first `n_lines` cache lines of each of `n_rows` rows.
struct Prefetch {
  const std::byte* const* rows = nullptr;
  int n_rows = 0, n_lines = 0;
};

// Row pointer arrays point at kv head 0 of the unit; `offset` bytes further is the head in
// question. A null row is one that must not be read. d_pad is padded_dim(head_dim). What q's rows, panels and weights
// hold (f32 [head_dim], [head_dim][kPanelTokens], ...) is the kernels' own business, within the room of f32.
struct AttentionKernels {
  // A row of q, times scale, as scores() wants it: row[d_pad].
  void (*take_q)(Dtype dtype, const float* q, float scale, int head_dim, float* row);
  // rows[kPanelTokens] -> panel [d_pad][kPanelTokens]; a null row gives a column of anything.
  void (*pack_k)(Dtype dtype, const std::byte* const* rows, size_t offset, int head_dim, float* panel);
  // s[r * kTileTokens + t] = sum_d q[r * d_pad + d] panel[d][t], t in [0, kPanelTokens).
  void (*scores)(Dtype dtype, const float* q, int n_rows, int head_dim, const float* panel, float* s,
                 Prefetch prefetch);
  // pack_k and scores in one call, for few query rows; `panel` is scratch.
  void (*scores_in_place)(Dtype dtype, const std::byte* const* rows, size_t offset, const float* q, int n_rows,
                          int head_dim, float* panel, float* s, Prefetch prefetch);
  // s[r * kTileTokens + [begin, end)] become weights; state[r] and acc[r * d_pad] are rescaled when
  // the maximum grew. begin < end <= kTileTokens.
  void (*softmax)(float* s, int n_rows, int begin, int end, SoftmaxState* state, float* acc, int d_pad);
  // Null: weights are p as softmax leaves them, and values is called with the tokens that its rows see. Otherwise: of
  // one part, the p of `group` rows for each of n_tokens, p[(i * group + r) * kTileTokens + seen[i]], become weights of
  // V's rows, 0 where a row does not see; values is then called with all tokens that are readable.
  void (*weigh)(Dtype dtype, const std::byte* const* rows, Tokens part, Tokens readable, size_t offset, int head_dim,
                float* p, const Tokens* seen, int n_tokens, int group);
  // rows[begin, end) -> panels [d_pad / 16][kTileTokens][16], dims beyond head_dim are zero.
  void (*pack_v)(Dtype dtype, const std::byte* const* rows, int begin, int end, size_t offset, int head_dim,
                 float* panels);
  // acc[r * d_pad + d] += sum_t p[r * kTileTokens + t] panels[.][t][.], t in [begin, end).
  void (*values)(const float* p, int n_rows, int begin, int end, const float* panels, float* acc, int d_pad,
                 Prefetch prefetch);
  // The same sum straight from the rows of one part, for few query rows. Only for head_dim % kPanelDims == 0.
  void (*values_in_place)(Dtype dtype, const float* p, int n_rows, int begin, int end, const std::byte* const* rows,
                          size_t offset, float* acc, int head_dim, Prefetch prefetch);
};

// 2^x for x <= 0, relative error < 1.1e-7; below 2^-126 it is 0. NaN stays NaN. Plain multiply and add.
float exp2_negative(float x);

// With the kernels of f32, bf16 and fp8, of int8, and of int4.
void attention_walk(const AttentionArgs& args, ThreadTeam& team, const AttentionKernels& floats,
                    const AttentionKernels& int8, const AttentionKernels& int4);

void attention_portable(const AttentionArgs& args, ThreadTeam& team);
void attention_avx2(const AttentionArgs& args, ThreadTeam& team);
void attention_avx512(const AttentionArgs& args, ThreadTeam& team);
void attention_avx512_vnni(const AttentionArgs& args, ThreadTeam& team);

}  // namespace xpyd::attention
