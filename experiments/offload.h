// Shared by the experiments with offload tiers: prompts that can be asked again, and a link whose speed is a share of
// the prefill speed.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "experiments/load.h"
#include "model/config.h"

namespace xpyd::experiments {

// Prompt `number` of a seed. Equal numbers begin with equal tokens; `tail` distinguishes their ends.
inline BenchRequest document(uint64_t seed, int number, int tokens, int output_tokens, int tail_tokens = 0,
                             int tail = 0) {
  const uint64_t first = 1 + 1000003 * (seed + 1) + 1000 * uint64_t(number);
  BenchRequest request;
  request.spans = {{first, tokens}};
  if (tail_tokens > 0) request.spans.push_back({first + 1 + uint64_t(tail), tail_tokens});
  request.input_tokens = tokens + tail_tokens;
  request.output_tokens = output_tokens;
  return request;
}

inline const char* offload_model(const Setting& setting) {
  return setting.tiny ? "experiments/models/llama-tiny" : "experiments/models/llama-mini";
}
inline size_t token_kv_bytes(const Setting& setting) {
  return kv_shape(load_model_config(offload_model(setting)).value(), Dtype::f32).token_bytes();
}

// The --kv-copy-gbps at which copying a prompt's KV takes 1 / `times` of the time in which this machine computes it.
// times = 0 gives "0", no limit. This models a GPU's link, which is slow beside its products; a CPU's memory is not.
// Measured once for each bed.
inline Result<std::string> slow_link(Bed& bed, const Setting& setting, double times) {
  if (times == 0) return std::string("0");
  const int tokens = setting.tiny ? 64 : 512;
  std::vector<BenchRequest> prompts;
  for (int i = 0; i < 4; ++i) prompts.push_back(document(setting.seed + 77, i, tokens, 1));
  Result<double> rate = bed.capacity(prompts);
  if (!rate) return rate.error();
  char text[32];
  std::snprintf(text, sizeof text, "%.6f", 1e-9 * times * rate.value() * tokens * double(token_kv_bytes(setting)));
  return std::string(text);
}

inline std::string hash_text(uint64_t hash) {
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

inline OffloadStats tier_stats(Bed& bed) { return bed.build().cluster->instances()[0]->memory().stats().tiers; }

}  // namespace xpyd::experiments
