// The arithmetic of CPU attention: the functions that each instruction set supplies. tiled_attention.cc, one source for
// all of them, decides which rows of which blocks meet which queries. The kernels see row pointers and small dense
// panels alone.
//
// Every kernel keeps one order of additions. Over f32, bf16 and fp8 each output element is one chain of FMAs (or of
// multiplications and additions), ascending in d for scores and in the token for values, for any number of rows. Over
// codes of int8 and int4 (quantised_rows.h) sums are sums of integers, which are exact in any order.
#pragma once

#include <cstddef>

#include "attention/attention.h"

namespace xpyd::attention {

// One step of online softmax: tile i is tokens [64 i, 64 i + 64) of the sequence.
inline constexpr int kTileTokens = 64;
// One independent softmax state: split i is tokens [512 i, 512 i + 512).
inline constexpr int kSplitTokens = 512;
inline constexpr int kPanelTokens = 16;  // tokens of K that are transposed together
inline constexpr int kPanelDims = 16;    // dims of V that are computed together
inline constexpr int kPartTokens = 32;   // tokens of V before a stream unit takes the next head; half a tile

// Floats of a row of q and of an accumulator: head_dim rounded up to kPanelDims.
static constexpr int padded_dim(int head_dim) { return (head_dim + kPanelDims - 1) / kPanelDims * kPanelDims; }

// A half-open range of tokens, here counted in a tile.
struct Tokens {
  int begin, end;
};

// Running softmax of one query row over the tokens of one split so far, in base 2. Weights are exp2(s - max), `sum` is
// their sum, and the row's accumulator holds their weighted sum of V.
struct SoftmaxState {
  float max, sum;
};

// Cache lines to prefetch while computing: the first `n_lines` of each of `n_rows` rows.
struct Prefetch {
  const std::byte* const* rows = nullptr;
  int n_rows = 0, n_lines = 0;
};

// Row pointers point at the first KV head of the unit; the head to compute is `offset` bytes further. A null row must
// not be read. d_pad is padded_dim(head_dim). The contents of q rows, panels and weights (f32 [head_dim], [head_dim]
// [kPanelTokens], ...) are private to a set of kernels and fit the room that f32 needs. Thread safety: any thread.
struct AttentionKernels {
  // Prepares one row of q, times scale, for scores(): row[d_pad].
  void (*take_q)(Dtype dtype, const float* q, float scale, int head_dim, float* row);
  // rows[kPanelTokens] -> panel [d_pad][kPanelTokens]; the column of a null row may hold anything.
  void (*pack_k)(Dtype dtype, const std::byte* const* rows, size_t offset, int head_dim, float* panel);
  // s[r * kTileTokens + t] = sum_d q[r * d_pad + d] panel[d][t], t in [0, kPanelTokens).
  void (*scores)(Dtype dtype, const float* q, int n_rows, int head_dim, const float* panel, float* s,
                 Prefetch prefetch);
  // pack_k() and scores() in one call, for few query rows; `panel` is scratch.
  void (*scores_in_place)(Dtype dtype, const std::byte* const* rows, size_t offset, const float* q, int n_rows,
                          int head_dim, float* panel, float* s, Prefetch prefetch);
  // Turns s[r * kTileTokens + [begin, end)] into weights. If the maximum grew, state[r] and acc[r * d_pad] are
  // rescaled. Requires begin < end <= kTileTokens.
  void (*softmax)(float* s, int n_rows, int begin, int end, SoftmaxState* state, float* acc, int d_pad);
  // If null, the weights are those of softmax(), and values() is called for the tokens that its rows see. Otherwise it
  // turns the weights p[(i * group + r) * kTileTokens + seen[i]] of one part, `group` rows for each of n_tokens, into
  // weights of V's rows, 0 where a row does not see the token; values() is then called for all readable tokens.
  void (*weigh)(Dtype dtype, const std::byte* const* rows, Tokens part, Tokens readable, size_t offset, int head_dim,
                float* p, const Tokens* seen, int n_tokens, int group);
  // rows[begin, end) -> panels [d_pad / 16][kTileTokens][16]; dims beyond head_dim are zero.
  void (*pack_v)(Dtype dtype, const std::byte* const* rows, int begin, int end, size_t offset, int head_dim,
                 float* panels);
  // acc[r * d_pad + d] += sum_t p[r * kTileTokens + t] panels[.][t][.], t in [begin, end).
  void (*values)(const float* p, int n_rows, int begin, int end, const float* panels, float* acc, int d_pad,
                 Prefetch prefetch);
  // The same sum straight from the cache rows of one part, for few query rows. Requires head_dim % kPanelDims == 0.
  void (*values_in_place)(Dtype dtype, const float* p, int n_rows, int begin, int end, const std::byte* const* rows,
                          size_t offset, float* acc, int head_dim, Prefetch prefetch);
};

// 2^x for x <= 0 with a relative error below 1.1e-7, by plain multiplications and additions. Below 2^-126 the result is
// 0; NaN stays NaN.
float exp2_negative(float x);

// Computes attention with three sets of kernels: those for f32, bf16 and fp8 KV, those for int8, and those for int4.
void tiled_attention(const AttentionArgs& args, ThreadTeam& team, const AttentionKernels& floats,
                     const AttentionKernels& int8, const AttentionKernels& int4);

void attention_portable(const AttentionArgs& args, ThreadTeam& team);
void attention_avx2(const AttentionArgs& args, ThreadTeam& team);
void attention_avx512(const AttentionArgs& args, ThreadTeam& team);
void attention_avx512_vnni(const AttentionArgs& args, ThreadTeam& team);

}  // namespace xpyd::attention
