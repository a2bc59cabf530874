#include "experiments/simulate/hardware.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/json/json.h"
#include "base/numbers.h"
#include "base/table.h"

namespace xpyd::disagg {
namespace {

constexpr double kT = 1e12, kG = 1e9;

// A card by its data sheet, in TFLOP/s, GB/s and GB, and its links in GB/s.
Hardware card(const char* name, double tflops, double gbps, double gb, double link, double host, const char* source) {
  return {.name = name,
          .flops_per_s = tflops * kT,
          .bytes_per_s = gbps * kG,
          .memory_bytes = gb * kG,
          .link_bytes_per_s = link * kG,
          .host_bytes_per_s = host * kG,
          .source = source};
}

// Links: a Mooncake node has 4 x 200 Gb/s, of which a transfer of an instance uses 100 Gb/s in its simulations. The
// other links are those of the servers that these cards are usually sold in.
const Hardware kHardware[] = {
    card("a800", 312, 2039, 80, 12.5, 25, "NVIDIA A800 80GB SXM4, data sheet"),
    card("h800", 989, 3350, 80, 50, 50, "NVIDIA H800 SXM5, as H100 but for NVLink"),
    card("h100", 989, 3350, 80, 50, 50, "NVIDIA H100 SXM5, data sheet"),
    card("h200", 989, 4800, 141, 50, 50, "NVIDIA H200 SXM, data sheet"),
    card("h20", 148, 4000, 96, 50, 50, "NVIDIA H20, data sheet"),
    card("l40", 181, 864, 48, 12.5, 25, "NVIDIA L40, data sheet"),
    card("v100", 125, 900, 32, 12.5, 12, "NVIDIA V100 SXM2 32GB, data sheet"),
};

// Grouped-query attention stores a key and a value for each KV head.
constexpr double kv(int n_kv_heads, int head_dim) { return 2.0 * n_kv_heads * head_dim; }

const SimulatedModel kModels[] = {
    {"llama-3-8b", 32, 32, 128, 8.03e9, 8.03e9, kv(8, 128), 2, 2, "Llama 3 (arXiv 2407.21783), table 3"},
    {"llama-3-70b", 80, 64, 128, 70.6e9, 70.6e9, kv(8, 128), 2, 2, "Llama 3 (arXiv 2407.21783), table 3"},
    {"qwen2.5-7b", 28, 28, 128, 7.62e9, 7.62e9, kv(4, 128), 2, 2, "Qwen2.5-7B, config.json"},
    {"qwen2.5-32b", 64, 40, 128, 32.8e9, 32.8e9, kv(8, 128), 2, 2, "Qwen2.5-32B, config.json"},
    {"yi-6b", 32, 32, 128, 6.06e9, 6.06e9, kv(4, 128), 2, 2, "Yi-6B (vAttention's first model), config.json"},
    {"yi-34b", 60, 56, 128, 34.4e9, 34.4e9, kv(8, 128), 2, 2, "Yi-34B, config.json"},
    // Multi-head latent attention stores 512 + 64 elements for each token and layer; a query head reads 192 and returns
    // 128. Weights in fp8.
    {"deepseek-v3", 61, 128, 160, 37e9, 671e9, 576, 1, 2, "DeepSeek-V3 (arXiv 2412.19437), section 4.2"},
    {"deepseek-r1", 61, 128, 160, 37e9, 671e9, 576, 1, 2, "DeepSeek-R1, the shape of V3"},
};

Error unknown(const std::string& what, const std::string& name, const std::string& names) {
  return {ErrorCode::not_found, what + " " + name + " is neither a file (.json) nor one of: " + names};
}

bool is_file(const std::string& name) { return name.ends_with(".json"); }

}  // namespace

std::span<const Hardware> hardware_table() { return kHardware; }
std::span<const SimulatedModel> model_table() { return kModels; }

Result<Hardware> find_hardware(const std::string& name) try {
  if (!is_file(name)) {
    const size_t x = name.rfind('x');
    const std::string card = name.substr(0, x);
    int cards = 1;
    if (x != std::string::npos && !read_number(std::string_view(name).substr(x + 1), cards)) cards = 0;
    const Hardware* row = cards < 1 || cards > 1024 ? nullptr : find_row(kHardware, card);
    if (!row) return unknown("hardware", name, names_of(kHardware) + ", each with a count: a800x8");
    Hardware found = *row;
    found.name = name;
    found.cards = cards;
    return found;
  }
  const nlohmann::json file = need(parse_json_file(name));
  JsonFields fields(file, name);
  Hardware h;
  h.name = fields.string_or("name", name);
  h.cards = int(fields.integer_or("cards", 1, 1024, 1));
  const nlohmann::json* terms = fields.find("step_terms");
  // Measured terms describe a step completely, so the file need not contain rates. --kv-tokens then says how many
  // tokens fit.
  const auto rate = [&](const char* field, double most) {
    return terms ? fields.number_or(field, 1, most, 0) : fields.number(field, 1, most);
  };
  h.flops_per_s = rate("flops_per_s", 1e18);
  h.bytes_per_s = rate("bytes_per_s", 1e16);
  h.memory_bytes = rate("memory_bytes", 1e15);
  if (terms) {
    if (!terms->is_array() || terms->size() != h.step_terms.size())
      return invalid(name + ": step_terms: expected " + std::to_string(h.step_terms.size()) + " numbers");
    for (size_t i = 0; i < h.step_terms.size(); ++i) {
      const nlohmann::json& term = (*terms)[i];
      if (!term.is_number() || term < 0.0 || term > 10.0)
        return invalid(name + ": step_terms: expected seconds, from 0 to 10");
      h.step_terms[i] = term.get<double>();
    }
    if (h.step_terms == model::StepCost::Terms{}) return invalid(name + ": step_terms: expected one above 0");
  }
  h.mfu = fields.number_or("mfu", 1e-6, 1, h.mfu);
  h.mbu = fields.number_or("mbu", 1e-6, 1, h.mbu);
  h.step_s = fields.number_or("step_s", 0, 10, h.step_s);
  h.link_bytes_per_s = fields.number_or("link_bytes_per_s", 1, 1e15, h.link_bytes_per_s);
  h.link_s = fields.number_or("link_s", 0, 10, h.link_s);
  h.host_bytes = fields.number_or("host_bytes", 0, 1e18, 0);
  h.host_bytes_per_s = fields.number_or("host_bytes_per_s", 0, 1e15, 0);
  h.source = name;
  fields.no_others();
  return h;
} catch (const Error& error) {
  return error;
}

Result<SimulatedModel> find_simulated_model(const std::string& name) try {
  if (!is_file(name)) {
    const SimulatedModel* row = find_row(kModels, name);
    return row ? Result<SimulatedModel>(*row) : unknown("model", name, names_of(kModels));
  }
  const nlohmann::json file = need(parse_json_file(name));
  JsonFields fields(file, name);
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
  fields.no_others();
  return m;
} catch (const Error& error) {
  return error;
}

model::StepCost step_cost(const SimulatedModel& m, const Hardware& h, int stages) {
  if (h.step_terms != model::StepCost::Terms{}) return model::StepCost(h.step_terms);
  const int cards = h.cards * stages;  // a stage has 1 / stages of the work, on h.cards cards
  const double flops_per_s = cards * h.flops_per_s * h.mfu, bytes_per_s = cards * h.bytes_per_s * h.mbu;
  const double token_s = 2 * m.active_parameters / flops_per_s;
  const double look_s = 4.0 * m.n_layers * m.n_heads * m.head_dim / flops_per_s;  // a query and a key token
  const double kv_s = m.kv_token_bytes() / bytes_per_s;
  const double weights_s = m.parameters * m.weight_element_bytes / bytes_per_s;
  // StepCost counts 2 L x + x^2 pairs, twice as many as causal attention computes.
  return model::StepCost(
      model::StepCost::Terms{h.step_s + weights_s, token_s, kv_s, look_s / 2, token_s, std::max(kv_s, look_s)});
}

double kv_tokens(const SimulatedModel& m, const Hardware& h, int stages, double share) {
  const double room = stages * h.cards * h.memory_bytes * share - m.parameters * m.weight_element_bytes;
  return std::max(0.0, room / m.kv_token_bytes());
}

}  // namespace xpyd::disagg
