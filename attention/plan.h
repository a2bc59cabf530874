// How a step's attention is cut into units, each computed by one thread, whichever takes it first:
// a block of query tokens of one sequence x some kv heads x one split or all splits of the KV.
//
// Two shapes of unit, same bits:
//   block   many rows (prefill): one kv head; K and V tiles are packed once, used by all rows
//   stream  few rows (decode): all kv heads, so memory is read in the order it lies; V in place
//
// The cut may depend on the batch and on the number of threads: no output's bits do.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/attention.h"

namespace xpyd::attention {

// Of one kv head, in a block unit: q, accumulators and weights stay in L2.
inline constexpr int kBlockRows = 192;

struct Tokens {
  int begin, end;
};

// One sequence as the walk sees it.
struct Seq {
  const AttentionArgs& args;
  int s;
  int n_q() const { return args.q_offsets[size_t(s) + 1] - args.q_offsets[size_t(s)]; }
  Tokens visible(int i) const {  // KV tokens that query token i attends to
    int end = args.kv_lengths[size_t(s)] - n_q() + i + 1;
    return {args.sliding_window ? std::max(0, end - args.sliding_window) : 0, end};
  }
};

struct Unit {
  int seq;
  int first, n_tokens;  // of the sequence's tokens in this step
  int head, n_heads;    // kv heads
  int split;            // of the KV; -1: all, and the result goes to `out`
  bool stream;
  size_t partial;  // split >= 0: index in partials of (split, row 0) of the sequence
};

// A sequence whose splits are computed apart: its rows are folded when all units are done.
struct Split {
  int seq;
  int first;       // split
  size_t partial;  // of that split
};

struct Plan {
  std::vector<Unit> units;
  std::vector<Split> splits;
  size_t n_partials = 0;  // rows x splits
};

void make_plan(const AttentionArgs& args, int n_threads, Plan& plan);

}  // namespace xpyd::attention
