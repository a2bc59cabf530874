// kv_points: what KV of fewer bits costs in points of the standard tool, lm-eval's
// local-completions (kv_points.py: facts in a text, asked at its end, four values to choose from).
//
// Arithmetic. Guessing is 25 %; the demo model reads such a fact almost always over f32 KV. bf16
// keeps 8 bits of each number and int8 8 of each row's range: within the noise of 160 questions,
// where one answer is 0.6 points and none wrong leaves up to 1.9 (95 %, the rule of three). int4
// has 16 steps for a row's range: kv_dtype_logits sees the greedy token change at 9 % of all
// positions; a choice among four values is lost less often than a choice among all tokens, so 0 to
// 9 points (TurboMind's int4: 0.1 to 3.3, of larger models).
#include <array>
#include <cstdio>
#include <filesystem>

#include "experiments/experiment.h"

namespace xpyd::experiments {
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
      return Error{ErrorCode::not_found,
                   std::string(kPython) + " is not there: `make test-clients` makes it"};
    // The server beside this program.
    std::error_code none;
    const auto bin = std::filesystem::read_symlink("/proc/self/exe", none).parent_path() / "xpyd";
    const std::string command = std::string(kPython) + " experiments/kv_points.py --bin '" +
                                bin.string() + "' --kv-dtype " + std::string(point["dtype"]) +
                                " --seed " + std::to_string(setting.seed) +
                                (setting.tiny ? " --questions 2 --facts 4" : "") + " 2>/dev/null";
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
}  // namespace xpyd::experiments
