#include "experiments/values.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/status.h"
#include "experiments/stats.h"

namespace xpyd::experiments {

double Value::real() const {
  const double* number = std::get_if<double>(&value_);
  XPYD_CHECK(number, dump() + " is not a number");
  return *number;
}

Value::operator std::string() const {
  const std::string* word = std::get_if<std::string>(&value_);
  XPYD_CHECK(word, dump() + " is not a string");
  return *word;
}

std::string Value::dump() const {
  return std::visit([](const auto& value) { return nlohmann::ordered_json(value).dump(); }, value_);
}

Values Values::parse(const std::string& json) {
  // An ordered_json, because plain nlohmann::json would sort the names.
  const auto object = nlohmann::ordered_json::parse(json, nullptr, false);
  if (!object.is_object()) return {};
  Values out;
  for (const auto& [name, value] : object.items()) {
    if (value.is_number_integer())
      out[name] = value.get<int64_t>();
    else if (value.is_number())
      out[name] = value.get<double>();
    else if (value.is_string())
      out[name] = value.get<std::string>();
    else
      return {};
  }
  return out;
}

const Value& Values::operator[](const std::string& name) const {
  auto field = std::ranges::find(fields_, name, &Field::name);
  XPYD_CHECK(field != fields_.end(), name + " is not in " + dump());
  return field->value;
}

Value& Values::operator[](const std::string& name) {
  auto field = std::ranges::find(fields_, name, &Field::name);
  if (field == fields_.end()) field = fields_.insert(field, Field{name, {}});
  return field->value;
}

void Values::update(const Values& more) {
  for (const auto& [name, value] : more) (*this)[name] = value;
}

std::string Values::dump() const {
  std::string out;
  for (const auto& [name, value] : fields_) out += (out.empty() ? "{" : ",") + Value(name).dump() + ":" + value.dump();
  return out.empty() ? "{}" : out + "}";
}

std::string dump(const std::vector<Values>& rows) {
  std::string out;
  for (const Values& row : rows) out += (out.empty() ? "[" : ",") + row.dump();
  return out.empty() ? "[]" : out + "]";
}

Value percentile_seen(std::span<const double> sorted, double p) {
  if (double(sorted.size()) * std::min(p, 100 - p) / 100 < 20) return "";
  return percentile(sorted, p);
}

}  // namespace xpyd::experiments
