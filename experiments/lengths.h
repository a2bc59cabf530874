// Prompt and output lengths of requests, as papers measured them.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "experiments/experiment.h"

namespace xpyd::experiments {

struct Lengths {
  int prompt = 0, output = 0;  // tokens
};

struct LengthSet {
  std::vector<Lengths> requests;
  std::string source;  // "trace", or "generated": a distribution with the trace's known figures
};

// "mooncake": the conversation trace where it is at hand, else lognormal with its medians and means. "sharegpt":
// lognormal, with the means that PagedAttention gives (161 and 338 tokens, SOSP'23 section 6.1) after the usual filter
// (4..1024 of prompt, 2048 of both). "alpaca": the same, 19.3 and 58.5. "arxiv": with the bounds and means of
// vAttention's long summaries (ASPLOS'25 Fig. 9). `draw`: others of the same kind; of a trace its next `n`.
Result<LengthSet> request_lengths(const std::string& dataset, int n, const Setting& setting, int draw = 0);

// Draws of an experiment on a virtual clock, whose numbers hang on which lengths and arrivals were
// drawn: the fewest of which a spread is made (evidence.py). Each is a point, column `sample`.
inline constexpr int kDraws = 6;
inline uint64_t seed_of(const Setting& setting, int draw) { return setting.seed + 1000 * uint64_t(draw); }

}  // namespace xpyd::experiments
