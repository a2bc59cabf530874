// Causal attention over a KvView, and append_kv(), which writes this step's K and V there: the contract of both.
//
// For query token i of sequence s at position p = kv_lengths[s] - (q tokens of s) + (i - q_offsets[s]):
//   out[i, h] = sum_t softmax_t(scale * q[i, h] . K[t, g]) V[t, g],  g = h / (n_heads / n_kv_heads)
// t runs over the visible tokens [max(0, p - sliding_window + 1), p], or over [0, p] if sliding_window is 0.
//
// The order of additions is fixed: the bits of out[i, h] depend on q[i, h] and on the visible rows K[t], V[t] alone.
// The number of query tokens, the rest of the batch, the block size, the layout and the number of threads do not change
// them, because tiles are cut from position 0 of the sequence. No row outside the visible range is read.
//
// Thread safety: the thread that owns `team` calls, and the call returns when all is computed. A broken requirement is
// a bug of the caller and aborts.
#pragma once

#include <cstdint>
#include <span>

#include "allocator/kv/kv_layout.h"
#include "base/cpu.h"
#include "base/thread_team.h"
#include "base/work.h"

namespace xpyd::attention {

struct AttentionArgs {
  const float* q = nullptr;             // [n_tokens, n_heads, head_dim], contiguous, after RoPE
  float* out = nullptr;                 // [n_tokens, n_heads, head_dim], contiguous; must not overlap q
  std::span<const int32_t> q_offsets;   // [n_seqs + 1]: sequence s has tokens [q_offsets[s], q_offsets[s + 1])
  std::span<const int32_t> kv_lengths;  // [n_seqs]: tokens of KV, those of this step included
  std::span<const KvView> views;        // [n_seqs], all of one KvShape
  int layer = 0;
  int n_heads = 0;         // query heads; n_heads % n_kv_heads == 0
  int sliding_window = 0;  // tokens; 0 = no window
  float scale = 0;         // usually 1 / sqrt(head_dim)
};

// The bytes and FLOPs that the operation needs at least: q and out once, each visible K and V row once for each
// sequence, 4 FLOPs for each element of a query head and visible token. A test counts the elements that the reference
// touches.
Work work(const AttentionArgs& args);

// Arguments of append_kv().
struct AppendArgs {
  const float* k = nullptr;             // [n_tokens, n_kv_heads, head_dim], after RoPE; row stride `stride`
  const float* v = nullptr;             // [n_tokens, n_kv_heads, head_dim]
  int stride = 0;                       // floats from one token of k (or v) to the next
  std::span<const int32_t> q_offsets;   // as above
  std::span<const int32_t> kv_lengths;  // as above: token i of s is written at its position p
  std::span<const KvView> views;
  int layer = 0;
};

// Writes the K and V of this step's tokens to their places in the cache, converted to its dtype.
void append_kv(const AppendArgs& args, ThreadTeam& team);

using AttentionFn = void (*)(const AttentionArgs& args, ThreadTeam& team);

struct AttentionVariant {
  const char* name;
  AttentionFn run;
  Isa needs;
  const char* source;  // the paper that it implements, or what it adds to the row before
  bool available() const { return cpu_has(needs); }
};

std::span<const AttentionVariant> attention_variants();

// The row that the server uses on this machine with --attention auto.
const AttentionVariant& default_attention();

// The definition above in double precision, one loop per index: every variant is tested against it. Not in the table.
void attention_reference(const AttentionArgs& args);

}  // namespace xpyd::attention
