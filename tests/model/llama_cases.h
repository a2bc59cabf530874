// Cases that hold for the model on the CPU and on CUDA alike, and run on both. A Kv has views of its slots and a pool.
#pragma once

#include <cmath>
#include <cstring>

#include "tests/model/model_fixture.h"

namespace xpyd::testing {

inline const std::vector<std::string> kFixtures = {"llama2",  "llama31", "llama_linear_bias",
                                                   "mistral", "qwen2",   "qwen3"};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
inline double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::fabs(double(a[i]) - double(b[i]));
    largest = difference <= largest ? largest : difference;  // NaN wins
  }
  return largest;
}
// The root of the squared error over b's squared size.
inline double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i)
    error += std::pow(double(a[i]) - double(b[i]), 2), size += std::pow(double(b[i]), 2);
  return std::sqrt(error / size);
}

// Runs sequences in permuted slots: first all but a tail of each, then the tails of one or two tokens. Each must have
// the bits that it has alone. alone() makes the KV of one sequence.
template <class Kv, class Alone>
void check_batch_mates(Model& model, const Kv& kv, Alone alone, const std::vector<std::vector<int32_t>>& prompts,
                       const std::vector<int>& tail) {
  const size_t vocab = size_t(model.config().vocab);
  std::vector<std::vector<int32_t>> heads, tails;
  std::vector<int> zeros(prompts.size(), 0), past;
  for (size_t s = 0; s < prompts.size(); ++s) {
    heads.emplace_back(prompts[s].begin(), prompts[s].end() - tail[s]);
    tails.emplace_back(prompts[s].end() - tail[s], prompts[s].end());
    past.push_back(int(heads[s].size()));
  }
  const std::vector<KvView> views = {kv.view(2), kv.view(0), kv.view(3), kv.view(1)};
  const auto first = run_step(model, views, heads, zeros), second = run_step(model, views, tails, past);
  size_t at_first = 0, at_second = 0;
  for (size_t s = 0; s < prompts.size(); ++s) {
    CAPTURE(s);
    const auto own = alone();
    if (past[s] > 0) {
      const auto head = run_step(model, {own.view()}, {heads[s]}, {0});
      CHECK(std::memcmp(head.data(), first.data() + at_first, head.size() * 4) == 0);
    }
    const auto rest = run_step(model, {own.view()}, {tails[s]}, {past[s]});
    CHECK(std::memcmp(rest.data(), second.data() + at_second, rest.size() * 4) == 0);
    at_first += heads[s].size() * vocab, at_second += tails[s].size() * vocab;
  }
}

// make_kv() makes KV for five sequences of 16 tokens.
template <class MakeKv>
void check_wanted_rows(Model& model, MakeKv make_kv) {
  const size_t vocab = size_t(model.config().vocab);
  const std::vector<std::vector<int32_t>> prompts = {
      {30}, {5, 6, 7, 8, 9, 10, 11, 12, 13, 14}, {1, 2, 3}, {31}, {20, 21, 22, 23}};
  const auto views_of = [](const auto& kv) {
    return std::vector<KvView>{kv.view(0), kv.view(1), kv.view(2), kv.view(3), kv.view(4)};
  };
  // The KV is complete whatever logits were wanted: the next tokens agree.
  const auto next = [&](const std::vector<KvView>& views) {
    return run_step(model, views, {{3}, {4}, {5}, {6}, {7}}, {1, 10, 3, 1, 4});
  };
  const auto kv = make_kv();
  const auto all = run_step(model, views_of(kv), prompts, {0, 0, 0, 0, 0}), expected = next(views_of(kv));
  std::vector<int32_t> ids, offsets = {0}, lengths;
  for (const auto& p : prompts) {
    ids.insert(ids.end(), p.begin(), p.end());
    offsets.push_back(int32_t(ids.size()));
    lengths.push_back(int32_t(p.size()));
  }
  for (const std::vector<int32_t>& rows :
       std::vector<std::vector<int32_t>>{{}, {10}, {0, 10, 13, 14, 18}, {5, 10, 14}, {14}, {0}, {15, 18}, {18}}) {
    CAPTURE(rows);
    const auto fresh = make_kv();
    const auto views = views_of(fresh);
    std::vector<float> logits(rows.size() * vocab + 1, -7);
    compute_step(model, {ids, offsets, lengths, views, rows}, logits.data());
    for (size_t i = 0; i < rows.size(); ++i)
      CHECK(std::memcmp(&logits[i * vocab], &all[size_t(rows[i]) * vocab], vocab * 4) == 0);
    CHECK(logits.back() == -7);
    CHECK(same_bits(next(views), expected));
  }
}

// kv: two sequences of 6 tokens, all NaN. Work that is enqueued in layer_done() sees the rows of this layer and none of
// the next. pool() returns the bytes of kv's pool where the CPU can read them.
template <class Kv, class Pool>
void check_observer(Model& model, const Kv& kv, Pool pool) {
  struct Observer : LayerObserver {
    void layer_done(int layer) override {
      CHECK(layer == next++);
      const auto there = pool();
      for (int slot = 0; slot < 2; ++slot)
        for (int token = 0; token < (slot ? 2 : 6); ++token)
          for (int v = 0; v < 2; ++v) {
            const auto written = [&](int l, int i) {
              float x = 0;
              std::memcpy(&x, kv.view(slot).row(l, v, token, 0) - kv.pool.data() + &there[0] + i * 4, 4);
              return !std::isnan(x);
            };
            CHECK((written(layer, 0) && written(layer, kv.layout.shape.head_dim - 1)));
            if (layer + 1 < kv.layout.shape.n_layers) CHECK_FALSE(written(layer + 1, 0));
          }
    }
    Observer(const Kv& of, Pool p) : kv(of), pool(p) {}
    const Kv& kv;
    Pool pool;
    int next = 0;
  } observer(kv, pool);
  run_step(model, {kv.view(0), kv.view(1)}, {{1, 2, 3, 4, 5, 6}, {7, 8}}, {0, 0}, &observer);
  CHECK(observer.next == model.config().n_layers);
}

}  // namespace xpyd::testing
