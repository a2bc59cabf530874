#include "experiments/attention_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/clock.h"
#include "base/random.h"
#include "experiments/stats.h"

namespace xpyd::experiments {
namespace {

std::vector<int32_t> shuffled(int n, Random& random) {
  std::vector<int32_t> all(static_cast<size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[random.below(i)]);
  return all;
}

}  // namespace

AttentionCase::AttentionCase(const AttentionShape& s, const AttentionMemory& m, uint64_t seed) {
  const int tokens = m.block == 0 ? s.length : m.block, per_seq = s.length / tokens, n_used = per_seq * s.n_seqs,
            n_blocks = m.n_blocks > 0 ? m.n_blocks : n_used;
  XPYD_CHECK(per_seq * tokens == s.length);
  layout_ = {{m.n_layers, s.n_kv_heads, s.head_dim, s.dtype},
             m.n_layers > 1 ? KvOrder::token_major : KvOrder::layer_major,
             tokens,
             n_blocks};
  const int layer = m.n_layers / 2;
  Random random(seed + 1);
  tables_ = shuffled(n_blocks, random);
  if (m.n_blocks > 0) {
    tables_.resize(size_t(n_used));
    for (int32_t& block : tables_) block = int32_t(random.below(uint64_t(n_blocks)));
  }
  std::byte* data;
  if (m.group > 0) {
    const int n = int(layout_.pool_bytes() / m.group);
    XPYD_CHECK(size_t(n) * m.group == layout_.pool_bytes());
    const int run = m.in_order ? n : 1;
    groups_ = make_host_page_groups({.group_bytes = m.group, .n_groups = n}).value();
    range_ = groups_->reserve(layout_.pool_bytes()).value();
    const std::vector<int32_t> order = shuffled(n, random);
    for (int i = 0; i < n; i += run)
      XPYD_CHECK(range_->map(size_t(i) * m.group, m.in_order ? 0 : order[size_t(i)], run).ok());
    data = range_->data();
  } else {
    pool_ = Buffer(layout_.pool_bytes());
    data = pool_.data();
  }
  // One sequence's rows. The other sequences have the same rows, each from another start.
  Random values(seed + 2);
  const size_t row = layout_.shape.row_bytes(), rows = 2 * size_t(s.length) * size_t(s.n_kv_heads);
  std::vector<std::byte> source(rows * row);
  for (size_t i = 0; i < rows * size_t(s.head_dim); ++i) {
    const float x = float(values.uniform() * 2 - 1);
    if (s.dtype == Dtype::f32)
      reinterpret_cast<float*>(source.data())[i] = x;
    else
      reinterpret_cast<bf16*>(source.data())[i] = to_bf16(x);
  }
  for (int i = 0; i < s.n_seqs; ++i) {
    const int32_t* table = tables_.data() + i * per_seq;
    views_.push_back({data, &layout_, m.block == 0 ? nullptr : table, m.block == 0 ? *table : 0});
    q_offsets_.push_back((i + 1) * s.n_q);
    kv_lengths_.push_back(s.length);
    for (int t = 0; t < s.length; ++t)
      for (int kv = 0; kv < 2; ++kv)
        for (int h = 0; h < s.n_kv_heads; ++h) {
          const size_t at = (((size_t(t) + size_t(i) * 37) % size_t(s.length)) * 2 + size_t(kv)) *
                                size_t(s.n_kv_heads) +
                            size_t(h);
          std::memcpy(views_.back().row(layer, kv, t, h), source.data() + at * row, row);
        }
  }
  q_.resize(size_t(s.n_seqs) * size_t(s.n_q) * size_t(s.n_heads) * size_t(s.head_dim));
  for (float& x : q_) x = float(8 * (values.uniform() * 2 - 1));
  out_.resize(q_.size());
  args_ = {.q = q_.data(),
           .out = out_.data(),
           .q_offsets = q_offsets_,
           .kv_lengths = kv_lengths_,
           .views = views_,
           .layer = layer,
           .n_heads = s.n_heads,
           .scale = 1 / std::sqrt(float(s.head_dim))};
}

std::string AttentionCase::check() const {
  const size_t width = size_t(args_.n_heads) * size_t(layout_.shape.head_dim), at = q_.size() - width;
  std::vector<float> want(width);
  const int32_t one[] = {0, 1};
  AttentionArgs last = args_;
  last.q = q_.data() + at;
  last.out = want.data();
  last.q_offsets = one;
  last.kv_lengths = {&kv_lengths_.back(), 1};
  last.views = {&views_.back(), 1};
  attention_reference(last);
  for (size_t i = 0; i < width; ++i)
    if (!(std::abs(out_[at + i] - want[i]) < 1e-3))
      return "element " + std::to_string(i) + " differs from the reference";
  return "";
}

uint64_t AttentionCase::hash() const {
  uint64_t hash = 0;
  for (float x : out_) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    hash = (hash ^ bits) * 0x9e3779b97f4a7c15u;
  }
  return hash;
}

std::vector<Timed> time_attention(const std::vector<AttentionCase*>& cases, double seconds, ThreadTeam& team,
                                  std::string& wrong) {
  const AttentionVariant& variant = default_attention();
  for (const AttentionCase* c : cases) {
    variant.run(c->args(), team);
    if (wrong = c->check(); !wrong.empty()) return {};
  }
  RealClock clock;
  std::vector<Timed> timed(cases.size());
  for (int part = 0; part < kTimedParts; ++part) {
    std::vector<std::vector<double>> calls(cases.size());
    const double end = clock.now() + seconds / kTimedParts;
    do {
      for (size_t i = 0; i < cases.size(); ++i) {
        const double start = clock.now();
        variant.run(cases[i]->args(), team);
        calls[i].push_back(clock.now() - start);
      }
    } while (clock.now() < end);
    for (size_t i = 0; i < cases.size(); ++i) timed[i].means.push_back(summarize(std::move(calls[i])).mean);
  }
  return timed;
}

}  // namespace xpyd::experiments
