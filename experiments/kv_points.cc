// kv_points: what KV of fewer bits costs in points of the standard tool, lm-eval's local-completions (kv_points.py:
// facts in a text, asked at its end, four values to choose from), question by question.
//
// Arithmetic. Of the model's own words it is right at any length, over int4 KV as well: nothing can
// be lost. Words of three made-up letters it copies less surely: 70 to 80 % of the questions, where
// guessing is 25 %, and many answers stand on a difference that noise can turn. bf16 keeps 8 bits
// of each number and int8 8 of each row's range: of 360 answers 0 to 3 turn, either way, so 0 +- 2
// points with their interval (none turned: +- 1.1). int4 has 16 steps for a row's range:
// kv_dtype_logits sees the greedy token change at 9 % of all positions, so some 10 to 15 % of the
// answers turn; those that were right by little and wrong by little nearly as often: 0 to 5 points,
// and with 45 that turn the interval is 3.7 to either side: -5 to 9 (TurboMind's int4: 0.1 to 3.3
// points, of larger models).
#include <array>
#include <cstdio>
#include <filesystem>

#include "experiments/experiment.h"

namespace xpyd::experiments::kv_points_experiment {
namespace {

// Made by `make test-clients`, from PyPI: no part of the build.
constexpr const char* kPython = "build/clients-venv/bin/python";

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.tiny && !std::filesystem::exists(kPython)) return all;  // as without traces
  for (const char* dtype : {"f32", "bf16", "int8", "int4"}) all.push_back({{"dtype", dtype}});
  return all;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) -> Result<Finding> {
    if (!std::filesystem::exists(kPython))
      return Error{ErrorCode::not_found, std::string(kPython) + " is not there: `make test-clients` makes it"};
    // The server beside this program.
    std::error_code none;
    const auto bin = std::filesystem::read_symlink("/proc/self/exe", none).parent_path() / "xpyd";
    const std::string command = std::string(kPython) + " experiments/kv_points.py --bin '" + bin.string() +
                                "' --kv-dtype " + std::string(point["dtype"]) + " --seed " +
                                std::to_string(setting.seed) + (setting.tiny ? " --questions 2 --facts 4" : "") +
                                " 2>/dev/null";
    FILE* pipe = popen(command.c_str(), "r");
    if (!pipe) return Error{ErrorCode::io, command + ": it did not start"};
    std::string out;
    for (std::array<char, 4096> part; size_t n = std::fread(part.data(), 1, part.size(), pipe);)
      out.append(part.data(), n);
    const int status = pclose(pipe);
    const Values found = Values::parse(out);
    if (status != 0 || found.begin() == found.end())
      return Error{ErrorCode::io, command + ": it failed; without 2>/dev/null it says why"};
    return Finding{{found}, ""};
  };
}

REGISTER_EXPERIMENT("kv_points", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::kv_points_experiment
