#include "disagg/simulate/hardware.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/json.h"
#include "base/table.h"

namespace xpyd::disagg {
namespace {

constexpr double kT = 1e12, kG = 1e9;

// Links: Mooncake's nodes have 4 x 200 Gb/s of which an instance's transfer uses 100 Gb/s in its simulations; the
// others as their usual servers are sold.
const Hardware kHardware[] = {
    {.name = "a800",
     .flops_per_s = 312 * kT,
     .bytes_per_s = 2039 * kG,
     .memory_bytes = 80 * kG,
     .host_bytes_per_s = 25 * kG,
     .source = "NVIDIA A800 80GB SXM4, data sheet"},
    {.name = "h800",
     .flops_per_s = 989 * kT,
     .bytes_per_s = 3350 * kG,
     .memory_bytes = 80 * kG,
     .link_bytes_per_s = 50 * kG,
     .host_bytes_per_s = 50 * kG,
     .source = "NVIDIA H800 SXM5, as H100 but for NVLink"},
    {.name = "h100",
     .flops_per_s = 989 * kT,
     .bytes_per_s = 3350 * kG,
     .memory_bytes = 80 * kG,
     .link_bytes_per_s = 50 * kG,
     .host_bytes_per_s = 50 * kG,
     .source = "NVIDIA H100 SXM5, data sheet"},
    {.name = "h200",
     .flops_per_s = 989 * kT,
     .bytes_per_s = 4800 * kG,
     .memory_bytes = 141 * kG,
     .link_bytes_per_s = 50 * kG,
     .host_bytes_per_s = 50 * kG,
     .source = "NVIDIA H200 SXM, data sheet"},
    {.name = "h20",
     .flops_per_s = 148 * kT,
     .bytes_per_s = 4000 * kG,
     .memory_bytes = 96 * kG,
     .link_bytes_per_s = 50 * kG,
     .host_bytes_per_s = 50 * kG,
     .source = "NVIDIA H20, data sheet"},
    {.name = "l40",
     .flops_per_s = 181 * kT,
     .bytes_per_s = 864 * kG,
     .memory_bytes = 48 * kG,
     .host_bytes_per_s = 25 * kG,
     .source = "NVIDIA L40, data sheet"},
    {.name = "v100",
     .flops_per_s = 125 * kT,
     .bytes_per_s = 900 * kG,
     .memory_bytes = 32 * kG,
     .host_bytes_per_s = 12 * kG,
     .source = "NVIDIA V100 SXM2 32GB, data sheet"},
};

// Grouped-query attention: two heads' worth of KV for each KV head.
constexpr double kv(int n_kv_heads, int head_dim) { return 2.0 * n_kv_heads * head_dim; }

const SimulatedModel kModels[] = {
    {"llama-3-8b", 32, 32, 128, 8.03e9, 8.03e9, kv(8, 128), 2, 2, "Llama 3 (arXiv 2407.21783), table 3"},
    {"llama-3-70b", 80, 64, 128, 70.6e9, 70.6e9, kv(8, 128), 2, 2, "Llama 3 (arXiv 2407.21783), table 3"},
    {"qwen2.5-7b", 28, 28, 128, 7.62e9, 7.62e9, kv(4, 128), 2, 2, "Qwen2.5-7B, config.json"},
    {"qwen2.5-32b", 64, 40, 128, 32.8e9, 32.8e9, kv(8, 128), 2, 2, "Qwen2.5-32B, config.json"},
    {"yi-6b", 32, 32, 128, 6.06e9, 6.06e9, kv(4, 128), 2, 2, "Yi-6B (vAttention's first model), config.json"},
    {"yi-34b", 60, 56, 128, 34.4e9, 34.4e9, kv(8, 128), 2, 2, "Yi-34B, config.json"},
    // Latent attention: 512 + 64 elements a token and layer; a head looks at 192 and takes 128. Weights in fp8.
    {"deepseek-v3", 61, 128, 160, 37e9, 671e9, 576, 1, 2, "DeepSeek-V3 (arXiv 2412.19437), section 4.2"},
    {"deepseek-r1", 61, 128, 160, 37e9, 671e9, 576, 1, 2, "DeepSeek-R1, the shape of V3"},
};

Error unknown(const std::string& what, const std::string& name, const std::string& names) {
  return {ErrorCode::not_found, what + " " + name + " is neither a file (.json) nor one of: " + names};
}

// `names`: of the fields that there are. A misspelt one would be its default, and nobody would know.
Status check_names(const nlohmann::json& file, const std::string& path, std::initializer_list<std::string_view> names) {
  if (!file.is_object()) return ok();  // JsonFields says so
  for (const auto& [name, value] : file.items()) {
    if (std::ranges::find(names, name) != names.end()) continue;
    std::string known;
    for (std::string_view one : names) known += (known.empty() ? "" : ", ") + std::string(one);
    return invalid(path + ": " + name + ": no such field; expected " + known);
  }
  return ok();
}

bool is_file(const std::string& name) { return name.ends_with(".json"); }

}  // namespace

std::span<const Hardware> hardware_table() { return kHardware; }
std::span<const SimulatedModel> model_table() { return kModels; }

Result<Hardware> find_hardware(const std::string& name) {
  if (!is_file(name)) {
    const size_t x = name.rfind('x');
    const std::string card = name.substr(0, x);
    int cards = 1;
    if (x != std::string::npos) {
      const char *begin = name.data() + x + 1, *end = name.data() + name.size();
      if (auto [at, error] = std::from_chars(begin, end, cards); at != end || error != std::errc{} || cards < 1)
        cards = 0;
    }
    const Hardware* row = cards < 1 || cards > 1024 ? nullptr : find_row(kHardware, card);
    if (!row) return unknown("hardware", name, names_of(kHardware) + ", each with a count: a800x8");
    Hardware found = *row;
    found.name = name;
    found.cards = cards;
    return found;
  }
  Result<nlohmann::json> file = parse_json_file(name);
  if (!file) return file.error();
  if (Status known = check_names(file.value(), name,
                                 {"name", "cards", "flops_per_s", "bytes_per_s", "memory_bytes", "mfu", "mbu", "step_s",
                                  "step_terms", "link_bytes_per_s", "link_s", "host_bytes", "host_bytes_per_s"});
      !known)
    return known.error();
  JsonFields fields(file.value(), name);
  Hardware h;
  h.name = fields.string_or("name", name);
  h.cards = int(fields.integer_or("cards", 1, 1024, 1));
  const auto terms = file.value().find("step_terms");
  if (terms == file.value().end()) {
    h.flops_per_s = fields.number("flops_per_s", 1, 1e18);
    h.bytes_per_s = fields.number("bytes_per_s", 1, 1e16);
    h.memory_bytes = fields.number("memory_bytes", 1, 1e15);
  } else if (terms->is_array() && terms->size() == h.step_terms.size()) {
    for (size_t i = 0; i < h.step_terms.size(); ++i) {
      const nlohmann::json& term = (*terms)[i];
      if (!term.is_number() || term < 0.0 || term > 10.0)
        return invalid(name + ": step_terms: expected seconds, from 0 to 10");
      h.step_terms[i] = term.get<double>();
    }
    if (h.step_terms == model::StepCost::Terms{}) return invalid(name + ": step_terms: expected one above 0");
  } else {
    return invalid(name + ": step_terms: expected " + std::to_string(h.step_terms.size()) + " numbers");
  }
  h.memory_bytes = fields.number_or("memory_bytes", 1, 1e15, h.memory_bytes);  // measured: --kv-tokens instead
  h.mfu = fields.number_or("mfu", 1e-6, 1, h.mfu);
  h.mbu = fields.number_or("mbu", 1e-6, 1, h.mbu);
  h.step_s = fields.number_or("step_s", 0, 10, h.step_s);
  h.link_bytes_per_s = fields.number_or("link_bytes_per_s", 1, 1e15, h.link_bytes_per_s);
  h.link_s = fields.number_or("link_s", 0, 10, h.link_s);
  h.host_bytes = fields.number_or("host_bytes", 0, 1e18, 0);
  h.host_bytes_per_s = fields.number_or("host_bytes_per_s", 0, 1e15, 0);
  h.source = name;
  if (!fields.status()) return fields.status().error();
  return h;
}

Result<SimulatedModel> find_simulated_model(const std::string& name) {
  if (!is_file(name)) {
    const SimulatedModel* row = find_row(kModels, name);
    return row ? Result<SimulatedModel>(*row) : unknown("model", name, names_of(kModels));
  }
  Result<nlohmann::json> file = parse_json_file(name);
  if (!file) return file.error();
  if (Status known = check_names(file.value(), name,
                                 {"name", "n_layers", "n_heads", "head_dim", "active_parameters", "parameters",
                                  "kv_elements", "weight_element_bytes", "kv_element_bytes"});
      !known)
    return known.error();
  JsonFields fields(file.value(), name);
  SimulatedModel m;
  m.name = fields.string_or("name", name);
  m.n_layers = int(fields.integer("n_layers", 1, 10000));
  m.n_heads = int(fields.integer("n_heads", 1, 10000));
  m.head_dim = int(fields.integer("head_dim", 1, 10000));
  m.active_parameters = fields.number("active_parameters", 1, 1e15);
  m.parameters = fields.number_or("parameters", m.active_parameters, 1e15, m.active_parameters);
  m.kv_elements = fields.number("kv_elements", 1, 1e9);
  m.weight_element_bytes = fields.number_or("weight_element_bytes", 0.1, 8, 2);
  m.kv_element_bytes = fields.number_or("kv_element_bytes", 0.1, 8, 2);
  m.source = name;
  if (!fields.status()) return fields.status().error();
  return m;
}

model::StepCost step_cost(const SimulatedModel& m, const Hardware& h, int stages) {
  if (h.step_terms != model::StepCost::Terms{}) return model::StepCost(h.step_terms);
  const int cards = h.cards * stages;  // a stage has its share of everything, and its own cards for it
  const double flops_per_s = cards * h.flops_per_s * h.mfu, bytes_per_s = cards * h.bytes_per_s * h.mbu;
  const double token_s = 2 * m.active_parameters / flops_per_s;
  const double look_s = 4.0 * m.n_layers * m.n_heads * m.head_dim / flops_per_s;  // of one token, at one
  const double kv_s = m.kv_token_bytes() / bytes_per_s;
  const double weights_s = m.parameters * m.weight_element_bytes / bytes_per_s;
  // A causal token looks at half of what the square says: 2 L x + x^2 counts every pair twice.
  return model::StepCost(
      model::StepCost::Terms{h.step_s + weights_s, token_s, kv_s, look_s / 2, token_s, std::max(kv_s, look_s)});
}

double kv_tokens(const SimulatedModel& m, const Hardware& h, int stages, double share) {
  const double room = stages * h.cards * h.memory_bytes * share - m.parameters * m.weight_element_bytes;
  return std::max(0.0, room / m.kv_token_bytes());
}

}  // namespace xpyd::disagg
