#include "model/generation_config.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "base/json/json.h"
#include "model/folder.h"

namespace xpyd::model {

Result<SamplingParams> load_generation_config(const std::string& dir) try {
  SamplingParams defaults;
  const std::string file = dir + "/generation_config.json";
  const Result<std::string> text = read_model_file(file, 16u << 20);
  if (!text && text.error().code == ErrorCode::not_found) return defaults;
  const nlohmann::json object = need(parse_json(need(text), file));
  if (!object.is_object()) return invalid(file + ": expected a JSON object");
  JsonFields fields(object, file);
  defaults.temperature = float(fields.number_or("temperature", 0, 100, defaults.temperature));
  if (!fields.boolean_or("do_sample", true)) defaults.temperature = 0;
  defaults.top_k = int(std::max<int64_t>(0, fields.integer_or("top_k", -1, INT32_MAX, defaults.top_k)));
  defaults.top_p = float(fields.number_or("top_p", 1e-6, 1, defaults.top_p));
  defaults.min_p = float(fields.number_or("min_p", 0, 1, defaults.min_p));
  defaults.repetition_penalty = float(fields.number_or("repetition_penalty", 1e-6, 100, defaults.repetition_penalty));
  return defaults;
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::model
