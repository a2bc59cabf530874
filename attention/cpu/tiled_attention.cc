// Tiled attention: one source for every memory scheme, every CPU variant and both phases.
//
// A step is cut into units of work; each thread takes units until none is left. A unit goes through the KV in tiles of
// 64 tokens: row pointers from KvView, scores, online softmax, values. The query heads of one KV head, for all query
// tokens of the unit, are its *rows*; they share each load of K and V.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/attention.h"
#include "attention/cpu/kernels.h"
#include "attention/cpu/kv_tile.h"
#include "attention/kv_dtype/kv_row.h"
#include "base/memory.h"
#include "base/status.h"

namespace xpyd::attention {
namespace {

// A unit is a block of query tokens of one sequence x some KV heads x one split or all splits of the KV. One thread
// computes it, whichever takes it first. Units have two shapes with the same bits:
//   block   many rows (prefill): one KV head; K and V tiles are packed once and used by all rows
//   stream  few rows (decode): all KV heads, so that memory is read in its order; V is read in place
//
// The cut may depend on the batch and on the number of threads. The bits of the output do not.

constexpr int kBlockRows = 192;  // of one KV head: q, accumulators and weights fit in L2
constexpr int kStreamRows = 8;   // at most this many rows per KV head are streamed, or one query token

// One sequence of the step.
struct Seq {
  const AttentionArgs& args;
  int s;
  int n_q() const { return args.q_offsets[size_t(s) + 1] - args.q_offsets[size_t(s)]; }
  Tokens visible(int i) const {  // the KV tokens that query token i attends to
    int end = args.kv_lengths[size_t(s)] - n_q() + i + 1;
    return {args.sliding_window ? std::max(0, end - args.sliding_window) : 0, end};
  }
};

struct Unit {
  int seq;
  int first, n_tokens;  // query tokens, counted in the sequence's tokens of this step
  int head, n_heads;    // KV heads
  int split;            // of the KV; -1: the unit computes all splits and writes `out`
  bool stream;
  size_t partial;  // if split >= 0: index in `partials` of (split, row 0) of the sequence
};

// A sequence whose splits are separate units (Flash-Decoding): they are merged when all units are done.
struct Split {
  int seq;
  int first;       // the first split
  size_t partial;  // index in `partials` of that split
};

struct Plan {
  std::vector<Unit> units;
  std::vector<Split> splits;
  size_t n_partials = 0;  // rows x splits
};

void make_plan(const AttentionArgs& args, int n_threads, Plan& plan) {
  const KvShape& shape = args.views[0].layout->shape;
  plan.units.clear(), plan.splits.clear(), plan.n_partials = 0;
  int group = args.n_heads / shape.n_kv_heads, streams = 0;
  auto is_stream = [&](int n_q) { return n_q == 1 || n_q * group <= kStreamRows; };
  auto splits_of = [&](Seq seq) {
    return Tokens{seq.visible(0).begin / kSplitTokens, (seq.visible(seq.n_q() - 1).end - 1) / kSplitTokens + 1};
  };
  for (int s = 0; s < int(args.views.size()); ++s) {
    Seq seq{args, s};
    if (seq.n_q() == 0) continue;
    if (is_stream(seq.n_q())) streams += splits_of(seq).end - splits_of(seq).begin;
  }
  // If there are few stream units, they are cut by KV heads, so that every thread gets some.
  int wanted = n_threads > 1 ? 4 * n_threads : 1;
  int cuts = streams ? std::clamp((wanted + streams - 1) / streams, 1, shape.n_kv_heads) : 1;
  int heads = (shape.n_kv_heads + cuts - 1) / cuts;
  for (int s = 0; s < int(args.views.size()); ++s) {
    Seq seq{args, s};
    int n_q = seq.n_q();
    if (n_q == 0) continue;
    if (!is_stream(n_q)) {  // the last blocks see the most tokens and start first
      int tokens = std::max(1, kBlockRows / group);
      for (int first = (n_q - 1) / tokens * tokens; first >= 0; first -= tokens)
        for (int h = 0; h < shape.n_kv_heads; ++h)
          plan.units.push_back({s, first, std::min(tokens, n_q - first), h, 1, -1, false, 0});
      continue;
    }
    Tokens splits = splits_of(seq);
    bool apart = splits.end - splits.begin > 1;
    if (apart) plan.splits.push_back({s, splits.begin, plan.n_partials});
    for (int split = splits.begin; split < splits.end; ++split) {
      for (int h = 0; h < shape.n_kv_heads; h += heads)
        plan.units.push_back(
            {s, 0, n_q, h, std::min(heads, shape.n_kv_heads - h), apart ? split : -1, true, plan.n_partials});
      if (apart) plan.n_partials += size_t(n_q) * size_t(args.n_heads);
      if (!apart) break;
    }
  }
}

// ---- One unit.

constexpr int kAheadTokens = 32;  // how far ahead a stream unit prefetches: parts of K and V in L2
constexpr int kRowGroup = 6;      // rows of a register tile of the AVX2 kernels
constexpr int kStatePad = 16;     // floats behind an accumulator in `partials`: max, sum, padding

// The buffer grows and never shrinks; its contents are not kept.
float* grow(Buffer& buffer, size_t floats) {
  if (buffer.size() < floats * sizeof(float)) buffer = Buffer(floats * sizeof(float));
  return buffer.as<float>();
}

struct Problem {
  const AttentionArgs& args;
  const AttentionKernels& kernels;
  const KvShape& shape;
  int group, d_pad;  // query heads per KV head; head_dim rounded up
  float* partials;   // [split of a sequence][row of a sequence][d_pad + kStatePad]
  size_t partial_stride() const { return size_t(d_pad + kStatePad); }
};

// Merges the state of the next split into that of the splits before it: splits are merged left to right.
void fold(SoftmaxState& into, float* into_acc, const SoftmaxState& next, const float* next_acc, int d_pad) {
  float max = next.max > into.max ? next.max : into.max;
  float a = exp2_negative(into.max - max), b = exp2_negative(next.max - max);
  into = {max, into.sum * a + next.sum * b};
  for (int d = 0; d < d_pad; d += kPanelDims)  // the inner count is constant, so that g++ -O2 uses vectors
    for (int i = d; i < d + kPanelDims; ++i) into_acc[i] = into_acc[i] * a + next_acc[i] * b;
}

void finish(float* out, const SoftmaxState& state, const float* acc, int head_dim) {
  float scale = 1.0f / state.sum;
  for (int d = 0; d < head_dim; ++d) out[d] = acc[d] * scale;
}

// One unit being computed. Row r of KV head h (both counted in the unit) is query token r / group and query head
// (unit.head + h) * group + r % group.
class UnitRun {
 public:
  UnitRun(const Problem& problem, const Unit& unit, Buffer& scratch)
      : p_(problem), u_(unit), seq_{problem.args, unit.seq}, view_(problem.args.views[size_t(unit.seq)]) {
    dim_ = p_.shape.head_dim;
    head_rows_ = u_.n_tokens * p_.group;
    n_rows_ = head_rows_ * u_.n_heads;
    size_t rows = size_t(n_rows_), d_pad = size_t(p_.d_pad);
    // Each array starts on a cache line.
    size_t sizes[] = {rows * d_pad,         rows * d_pad,        rows * d_pad,  rows * kTileTokens,
                      d_pad * kPanelTokens, d_pad * kTileTokens, 2 * rows + 16, 2 * rows + 16};
    size_t total = 0;
    for (size_t& size : sizes) total += size = (size + 15) / 16 * 16;
    float* next = grow(scratch, total);
    float* at[8];
    for (int i = 0; i < 8; next += sizes[i++]) at[i] = next;
    q_ = at[0], acc_ = at[1], folded_acc_ = at[2], s_ = at[3], panel_ = at[4], v_panels_ = at[5];
    state_ = reinterpret_cast<SoftmaxState*>(at[6]);
    folded_ = reinterpret_cast<SoftmaxState*>(at[7]);
  }

  void run() {
    gather_q();
    Tokens all = {seq_.visible(u_.first).begin, seq_.visible(u_.first + u_.n_tokens - 1).end};
    int first = u_.split >= 0 ? u_.split : all.begin / kSplitTokens;
    int last = u_.split >= 0 ? u_.split : (all.end - 1) / kSplitTokens;
    for (int split = first; split <= last; ++split) {
      Tokens tokens = {std::max(all.begin, split * kSplitTokens), std::min(all.end, (split + 1) * kSplitTokens)};
      run_split(tokens);
      for (int row = 0; row < n_rows_; ++row) keep(row, split);
    }
  }

 private:
  int token_of(int row) const { return u_.first + row % head_rows_ / p_.group; }
  int query_head_of(int row) const {
    return (u_.head + row / head_rows_) * p_.group + row % p_.group;  // head_rows_ is a multiple of group
  }
  size_t row_of_sequence(int row) const {
    return size_t(token_of(row)) * size_t(p_.args.n_heads) + size_t(query_head_of(row));
  }
  size_t q_index(int row) const {
    size_t first_row = size_t(p_.args.q_offsets[size_t(u_.seq)]) * size_t(p_.args.n_heads);
    return (first_row + row_of_sequence(row)) * size_t(dim_);
  }

  // q is scaled once, by scale * log2(e), so that weights are exp2.
  void gather_q() {
    float scale = float(double(p_.args.scale) * 1.4426950408889634);
    for (int row = 0; row < n_rows_; ++row)
      p_.kernels.take_q(p_.shape.dtype, p_.args.q + q_index(row), scale, dim_, q_ + size_t(row) * size_t(p_.d_pad));
  }

  void run_split(Tokens tokens) {
    for (int row = 0; row < n_rows_; ++row) state_[row] = {-std::numeric_limits<float>::infinity(), 0.0f};
    std::memset(acc_, 0, size_t(n_rows_) * size_t(p_.d_pad) * sizeof(float));
    Tile tiles[2];
    tile_ = &tiles[0], next_ = &tiles[1];
    load_tile(*next_, tokens.begin / kTileTokens * kTileTokens, tokens);
    while (next_->readable.end > 0) {
      std::swap(tile_, next_);
      load_tile(*next_, tile_->first + kTileTokens, tokens);
      for (int i = 0; i < u_.n_tokens; ++i) {
        Tokens v = seq_.visible(u_.first + i);
        seen_[i] = {std::max(v.begin - tile_->first, tile_->readable.begin),
                    std::min(v.end - tile_->first, tile_->readable.end)};
      }
      score_tile();
      softmax_tile();
      if (u_.stream && dim_ % kPanelDims == 0) {
        values_in_place();
      } else {
        values_packed();
      }
    }
  }

  void load_tile(Tile& tile, int first, Tokens tokens) { tile.load(view_, p_.args.layer, u_.head, first, tokens); }

  size_t head_offset(int h) const { return size_t(h) * p_.shape.row_bytes(); }

  // The lines to prefetch while head `h` of tokens [t, t + n) of K (kv = 0) or V (kv = 1) is computed. A stream unit
  // prefetches its share of the part that comes kAheadTokens later in the order K, V, K of the next tile, ... A block
  // unit prefetches V of this tile during scores, and K of the next tile during values.
  Prefetch ahead(int kv, int t, int n, int h) const {
    const Tile* tile = tile_;
    if (u_.stream) t += kAheadTokens;
    if (!u_.stream || t >= kTileTokens) {
      if (kv == 1) tile = next_;
      kv = 1 - kv;
      t %= kTileTokens;
    }
    Range part = u_.stream ? share(n, h, u_.n_heads) : Range{0, n};
    int begin = std::max(t + part.begin, tile->readable.begin);
    int end = std::min(t + part.end, tile->readable.end);
    if (begin >= end) return {};
    return {tile->rows[kv] + begin, end - begin, int(head_offset(u_.n_heads) + 63) / 64};
  }

  void score_tile() {
    for (int t = 0; t < kTileTokens; t += kPanelTokens) {
      if (t + kPanelTokens <= tile_->readable.begin || t >= tile_->readable.end) continue;
      // Rows are in order of position, so the rows that see a token of this panel are consecutive.
      int begin = 0, end = u_.n_tokens;
      while (begin < end && seen_[begin].end <= t) ++begin;
      while (begin < end && seen_[end - 1].begin >= t + kPanelTokens) --end;
      if (begin >= end) continue;
      for (int h = 0; h < u_.n_heads; ++h) {
        size_t row = size_t(h * head_rows_ + begin * p_.group);
        const float* q = q_ + row * size_t(p_.d_pad);
        float* to = s_ + row * kTileTokens + size_t(t);
        const std::byte* const* rows = tile_->rows[0] + t;
        int n_rows = (end - begin) * p_.group;
        Prefetch prefetch = ahead(0, t, kPanelTokens, h);
        if (u_.stream) {
          p_.kernels.scores_in_place(p_.shape.dtype, rows, head_offset(h), q, n_rows, dim_, panel_, to, prefetch);
        } else {
          p_.kernels.pack_k(p_.shape.dtype, rows, head_offset(h), dim_, panel_);
          p_.kernels.scores(p_.shape.dtype, q, n_rows, dim_, panel_, to, prefetch);
        }
      }
    }
  }

  void softmax_tile() {
    for (int h = 0; h < u_.n_heads; ++h)
      for (int i = 0; i < u_.n_tokens; ++i) {
        if (seen_[i].begin >= seen_[i].end) continue;
        size_t row = size_t(h * head_rows_ + i * p_.group);
        p_.kernels.softmax(s_ + row * kTileTokens, p_.group, seen_[i].begin, seen_[i].end, state_ + row,
                           acc_ + row * size_t(p_.d_pad), p_.d_pad);
      }
  }

  // Called part by part, so that scales are read when the codes beside them are.
  void weigh(int h, int part) {
    if (!p_.kernels.weigh || part >= tile_->readable.end || part + kPartTokens <= tile_->readable.begin) return;
    p_.kernels.weigh(p_.shape.dtype, tile_->rows[1], {part, part + kPartTokens}, tile_->readable, head_offset(h), dim_,
                     s_ + size_t(h * head_rows_) * kTileTokens, seen_, u_.n_tokens, p_.group);
  }

  // Calls add(first row, rows, tokens) so that each row of head h gets each token that it sees within `part`, in
  // ascending order, and no other token: a masked V row is not multiplied by 0, because 0 * NaN is NaN. Rows that
  // weigh() prepared do get masked tokens with weight 0, because codes are integers.
  template <class Add>
  void for_seen(int h, Tokens part, Add&& add) {
    auto clip = [&](int row) {
      Tokens t = seen_[row / p_.group];
      return Tokens{std::max(t.begin, part.begin), std::min(t.end, part.end)};
    };
    auto add_if = [&](int row, int n, int begin, int end) {
      if (begin < end) add(h * head_rows_ + row, n, Tokens{begin, end});
    };
    if (p_.kernels.weigh) {
      add_if(0, head_rows_, std::max(part.begin, tile_->readable.begin), std::min(part.end, tile_->readable.end));
      return;
    }
    Tokens first = clip(0), last = clip(head_rows_ - 1);
    if (first.begin == last.begin && first.end == last.end) {
      add_if(0, head_rows_, first.begin, first.end);
      return;
    }
    for (int row = 0; row < head_rows_; row += kRowGroup) {
      int n = std::min(kRowGroup, head_rows_ - row);
      int begin = clip(row + n - 1).begin, end = clip(row).end;  // tokens that all rows of the group see
      bool common = begin < end;
      for (int r = row; r < row + n; ++r) {
        Tokens t = clip(r);
        add_if(r, 1, t.begin, common ? std::min(t.end, begin) : t.end);
      }
      if (!common) continue;
      add_if(row, n, begin, end);
      for (int r = row; r < row + n; ++r) add_if(r, 1, end, clip(r).end);
    }
  }

  void values_packed() {
    for (int h = 0; h < u_.n_heads; ++h) {
      p_.kernels.pack_v(p_.shape.dtype, tile_->rows[1], tile_->readable.begin, tile_->readable.end, head_offset(h),
                        dim_, v_panels_);
      for (int part = 0; part < kTileTokens; part += kPartTokens) weigh(h, part);
      for_seen(h, tile_->readable, [&](int row, int n, Tokens t) {
        p_.kernels.values(s_ + size_t(row) * kTileTokens, n, t.begin, t.end, v_panels_,
                          acc_ + size_t(row) * size_t(p_.d_pad), p_.d_pad, ahead(1, 0, kTileTokens, h));
      });
    }
  }

  void values_in_place() {
    for (int part = 0; part < kTileTokens; part += kPartTokens)
      for (int h = 0; h < u_.n_heads; ++h) {
        weigh(h, part);
        for_seen(h, {part, part + kPartTokens}, [&](int row, int n, Tokens t) {
          p_.kernels.values_in_place(p_.shape.dtype, s_ + size_t(row) * kTileTokens, n, t.begin, t.end, tile_->rows[1],
                                     head_offset(h), acc_ + size_t(row) * size_t(p_.d_pad), dim_,
                                     ahead(1, part, kPartTokens, h));
        });
      }
  }

  // Stores the row's state of this split in `partials`, or merges it with the splits before and writes `out` after the
  // last.
  void keep(int row, int split) {
    Tokens visible = seq_.visible(token_of(row));
    int first = visible.begin / kSplitTokens, last = (visible.end - 1) / kSplitTokens;
    if (split < first || split > last) return;
    float* acc = acc_ + size_t(row) * size_t(p_.d_pad);
    if (u_.split >= 0) {
      float* to = p_.partials + (u_.partial + row_of_sequence(row)) * p_.partial_stride();
      std::memcpy(to, acc, size_t(p_.d_pad) * sizeof(float));
      std::memcpy(to + p_.d_pad, &state_[row], sizeof(SoftmaxState));
      return;
    }
    float* folded = folded_acc_ + size_t(row) * size_t(p_.d_pad);
    if (split == first) {
      folded_[row] = state_[row];
      std::memcpy(folded, acc, size_t(p_.d_pad) * sizeof(float));
    } else {
      fold(folded_[row], folded, state_[row], acc, p_.d_pad);
    }
    if (split == last) finish(p_.args.out + q_index(row), folded_[row], folded, dim_);
  }

  const Problem& p_;
  const Unit& u_;
  Seq seq_;
  const KvView& view_;
  int dim_, head_rows_, n_rows_;
  float *q_, *acc_, *folded_acc_;  // [n_rows, d_pad] each
  float *s_, *panel_, *v_panels_;  // scores, then weights [n_rows, kTileTokens]; packed K; packed V
  SoftmaxState *state_, *folded_;  // [n_rows]
  Tile *tile_ = nullptr, *next_ = nullptr;
  Tokens seen_[kBlockRows];  // for each query token of the unit, the tokens of the tile that it sees
};

void fold_splits(const Problem& p, const Split& split, int rank, int size) {
  Seq seq{p.args, split.seq};
  int n_rows = seq.n_q() * p.args.n_heads;
  Range rows = share(n_rows, rank, size);
  for (int row = rows.begin; row < rows.end; ++row) {
    Tokens visible = seq.visible(row / p.args.n_heads);
    int first = visible.begin / kSplitTokens, last = (visible.end - 1) / kSplitTokens;
    auto at = [&](int i) {
      return p.partials + (split.partial + size_t(i - split.first) * size_t(n_rows) + size_t(row)) * p.partial_stride();
    };
    auto state_at = [&](int i) {
      SoftmaxState state;
      std::memcpy(&state, at(i) + p.d_pad, sizeof state);
      return state;
    };
    SoftmaxState state = state_at(first);
    for (int i = first + 1; i <= last; ++i) fold(state, at(first), state_at(i), at(i), p.d_pad);
    size_t out = (size_t(p.args.q_offsets[size_t(split.seq)]) * size_t(p.args.n_heads) + size_t(row)) *
                 size_t(p.shape.head_dim);
    finish(p.args.out + out, state, at(first), p.shape.head_dim);
  }
}

void check(const AttentionArgs& args) {
  size_t n_seqs = args.views.size();
  XPYD_CHECK(args.q_offsets.size() == n_seqs + 1 && args.kv_lengths.size() == n_seqs);
  for (size_t s = 0; s < n_seqs; ++s) {
    const KvShape& shape = args.views[s].layout->shape;
    int n_q = args.q_offsets[s + 1] - args.q_offsets[s];
    XPYD_CHECK(n_q >= 0 && args.kv_lengths[s] >= n_q);
    XPYD_CHECK(shape == args.views[0].layout->shape, "one KV shape per call");
    XPYD_CHECK(kv_rows_supported(shape), dtype_name(shape.dtype));
    XPYD_CHECK(args.n_heads > 0 && args.n_heads % shape.n_kv_heads == 0);
    XPYD_CHECK(args.layer >= 0 && args.layer < shape.n_layers);
  }
  XPYD_CHECK(args.sliding_window >= 0);
}

}  // namespace

void tiled_attention(const AttentionArgs& args, ThreadTeam& team, const AttentionKernels& floats,
                     const AttentionKernels& int8, const AttentionKernels& int4) {
  if (args.views.empty()) return;
  check(args);
  const KvShape& shape = args.views[0].layout->shape;
  const AttentionKernels& kernels = shape.dtype == Dtype::int8 ? int8 : shape.dtype == Dtype::int4 ? int4 : floats;
  // Each thread keeps these from call to call, so that a step does not allocate once its sizes have been seen.
  thread_local Plan plan;
  thread_local Buffer partials;
  make_plan(args, team.size(), plan);
  Problem problem{args, kernels, shape, args.n_heads / shape.n_kv_heads, padded_dim(shape.head_dim), nullptr};
  problem.partials = grow(partials, plan.n_partials * problem.partial_stride());
  const Plan& units = plan;  // the team reads the owner's plan, not a thread_local of its own
  std::atomic<size_t> next = 0;
  team.run([&](int rank) {
    thread_local Buffer scratch;
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < units.units.size();)
      UnitRun(problem, units.units[i], scratch).run();
    if (units.splits.empty()) return;
    team.barrier();
    for (const Split& split : units.splits) fold_splits(problem, split, rank, team.size());
  });
}

}  // namespace xpyd::attention
