// Prompt and output lengths of requests, as papers report them.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "experiments/experiment.h"

namespace xpyd::experiments {

struct Lengths {
  int prompt = 0, output = 0;  // in tokens
};

struct LengthSet {
  std::vector<Lengths> requests;
  std::string source;  // "trace", or "generated": a distribution with the trace's known figures
};

// `dataset` is one of these. "mooncake": the conversation trace if it is present, else lognormal with its medians and
// means. "sharegpt": lognormal with PagedAttention's means (161 and 338 tokens, SOSP'23 section 6.1) after the usual
// filter (4..1024 of prompt, 2048 of both). "alpaca": the same with 19.3 and 58.5. "arxiv": the bounds and means of
// vAttention's long summaries (ASPLOS'25 Fig. 9). `draw` selects other lengths of the same kind; for a trace, its next
// `n` requests.
Result<LengthSet> request_lengths(const std::string& dataset, int n, const Setting& setting, int draw = 0);

// Draws of an experiment on a virtual clock, whose results depend on the drawn lengths and arrivals. The interval of a
// claim is the whole range of three. Each draw is a point, in column `sample`.
inline constexpr int kDraws = 3;
inline uint64_t seed_of(const Setting& setting, int draw) { return setting.seed + 1000 * uint64_t(draw); }

}  // namespace xpyd::experiments
