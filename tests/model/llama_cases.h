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

}  // namespace xpyd::testing
