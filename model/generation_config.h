// Sampling defaults of a model folder, for fields that a request leaves out.
//
// Thread safety: plain functions.
#pragma once

#include <string>

#include "base/status.h"
#include "model/sampler.h"

namespace xpyd::model {

// Reads temperature, top_k, top_p, min_p and repetition_penalty from DIR/generation_config.json. A missing field or
// file leaves the default of SamplingParams. "do_sample": false sets the temperature to 0. Errors name file, field and
// expected value.
Result<SamplingParams> load_generation_config(const std::string& dir);

}  // namespace xpyd::model
