// Attention over a KvView, and append, which fills one. The contract of both operations.
//
// For query token i of sequence s at position p = kv_lengths[s] - (q tokens of s) +
// (i - q_offsets[s]):
//   out[i, h] = sum_t softmax_t(scale * q[i, h] . K[t, g]) V[t, g],  g = h / (n_heads /
//   n_kv_heads), t in [max(0, p - sliding_window + 1), p]  (the whole prefix when sliding_window is
//   0).
//
// One addition order: the bits of out[i, h] depend on q[i, h] and on the rows K[t], V[t], and on nothing else: not on
// the number of query tokens in the step, on what else is in the batch, on the block size, on the layout, or on the
// number of threads. Tiles are fixed from position 0 of the sequence. Rows outside the range above are never read.
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
  float* out = nullptr;                 // [n_tokens, n_heads, head_dim], contiguous; not aliased with q
  std::span<const int32_t> q_offsets;   // [n_seqs + 1]: tokens of sequence s are [q_offsets[s], q_offsets[s+1])
  std::span<const int32_t> kv_lengths;  // [n_seqs]: tokens of KV present, this step's included
  std::span<const KvView> views;        // [n_seqs]
  int layer = 0;
  int n_heads = 0;         // query heads; n_heads % n_kv_heads == 0
  int sliding_window = 0;  // tokens; 0 = no window
  float scale = 0;         // usually 1 / sqrt(head_dim)
};

Work work(const AttentionArgs& args);

// K and V of this step's tokens go to their places in the cache, converted to its dtype.
struct AppendArgs {
  const float* k = nullptr;             // [n_tokens, n_kv_heads, head_dim], after RoPE; row stride `stride`
  const float* v = nullptr;             // [n_tokens, n_kv_heads, head_dim]
  int stride = 0;                       // floats from one token of k (or v) to the next
  std::span<const int32_t> q_offsets;   // as above
  std::span<const int32_t> kv_lengths;  // as above: token i of s is written at its position p
  std::span<const KvView> views;
  int layer = 0;
};

void append_kv(const AppendArgs& args, ThreadTeam& team);

using AttentionFn = void (*)(const AttentionArgs& args, ThreadTeam& team);

struct AttentionVariant {
  const char* name;
  AttentionFn run;
  Isa needs;
  const char* source;  // paper, or what it teaches
  bool available() const { return cpu_has(needs); }
};

std::span<const AttentionVariant> attention_variants();

// The row that the server uses on this machine.
const AttentionVariant& default_attention();

// Double precision, one loop per index, obviously right. The oracle of every variant; not in the table.
void attention_reference(const AttentionArgs& args);

}  // namespace xpyd::attention
