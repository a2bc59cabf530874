// What a folder's generation_config.json wants of sampling where a request says nothing.
//
// Thread safety: plain functions.
#pragma once

#include <string>

#include "base/status.h"
#include "model/sampler.h"

namespace xpyd::model {

// DIR/generation_config.json's temperature, top_k, top_p, min_p and repetition_penalty; of what is not there, and
// where there is no such file, what SamplingParams says. "do_sample": false is a temperature of 0. The error names
// the file and the field, and what was expected.
Result<SamplingParams> load_generation_config(const std::string& dir);

// "temperature 0.6, top_p 0.9": what is not as SamplingParams says; "" where all is.
std::string describe_defaults(const SamplingParams& defaults);

}  // namespace xpyd::model
