// Shared by the tests of the model on the CPU and on CUDA: the fixtures' names, and comparisons of logits.
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

}  // namespace xpyd::testing
