// xpyd_experiments COMMAND: what experiments/run.py calls. Answers are JSON on stdout.
//   list                   every experiment and its device
//   machine                provenance, and the devices of this machine or why there are none
//   peak                   the device's measured limits
//   points NAME            the points of one experiment
//   run NAME               reads points from stdin, one JSON object per line as `points` prints them;
//                          answers each with a line {"rows": [...]} or {"error": "..."}
// Options: --device cpu|cuda  --seed N  --traces DIR  --tiny
// Exit codes: 0 success; 1 it ran and failed, or a point did; 2 misuse.
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <iostream>

#include "base/peak/peak.h"
#include "base/version.h"
#include "experiments/experiment.h"

namespace xpyd::experiments {
namespace {

int fail(int code, const std::string& message) {
  std::fprintf(stderr, "xpyd_experiments: %s\n", message.c_str());
  return code;
}

void print(const std::string& json) { std::printf("%s\n", json.c_str()); }

const Experiment* find(const std::string& name, const std::string& device) {
  for (const Experiment& e : all_experiments())
    if (name == e.name && (e.device == device || e.device == std::string("any"))) return &e;
  return nullptr;
}

Values machine_values() {
  Values out;
  for (const auto& [key, value] : provenance()) out[key] = value;
  Result<std::string> card = cuda_card();
  out["cuda"] = card ? card.value() : "";
  out["cuda_missing"] = card ? "" : card.error().message;
  return out;
}

std::string cpu_peaks() {
  cpu_set_t set;
  int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  ThreadTeam team(cores);
  return to_json(measure_peak(team));
}

int answer(const std::vector<Values>& points, const Measure& measure) {
  int code = 0;
  for (std::string line; std::getline(std::cin, line);) {
    const Values point = Values::parse(line);
    // Only points of the experiment itself, so that everything that runs was planned.
    const bool known = std::find(points.begin(), points.end(), point) != points.end();
    Result<Finding> found = known ? measure(point) : invalid(line + " is not a point of this experiment");
    const std::string error = !found                        ? found.error().message
                              : found.value().wrong.empty() ? ""
                                                            : "wrong result, not timed: " + found.value().wrong;
    if (!error.empty()) code = 1;
    print(error.empty() ? "{\"rows\":" + dump(found.value().rows) + "}" : Values{{"error", error}}.dump());
    std::fflush(stdout);
  }
  return code;
}

int run(const std::vector<std::string>& words) {
  Setting setting;
  std::vector<std::string> plain;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--tiny") {
      setting.tiny = true;
    } else if (word == "--device" || word == "--seed" || word == "--traces") {
      if (++i == words.size()) return fail(2, word + ": expected a value");
      const std::string& value = words[i];
      if (word == "--traces") {
        setting.traces = value;
      } else if (word == "--device") {
        if (value != "cpu" && value != "cuda") return fail(2, "--device: expected cpu or cuda");
        setting.device = value;
      } else {
        auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), setting.seed);
        if (error != std::errc() || end != value.data() + value.size())
          return fail(2, "--seed: expected a whole number");
      }
    } else if (word.starts_with("--")) {
      return fail(2, "unknown option " + word);
    } else {
      plain.push_back(word);
    }
  }
  const std::string command = plain.empty() ? "" : plain[0];
  const size_t n = plain.size();
  if (command == "list" && n == 1) {
    std::vector<Values> out;
    for (const Experiment& e : all_experiments()) out.push_back({{"name", e.name}, {"device", e.device}});
    print(dump(out));
    return 0;
  }
  if (command == "machine" && n == 1) return print(machine_values().dump()), 0;
  if (setting.device == "cuda")
    if (Result<std::string> card = cuda_card(); !card) return fail(1, card.error().message);
  if (command == "peak" && n == 1) return print(setting.device == "cuda" ? cuda_peaks().dump() : cpu_peaks()), 0;
  if (!((command == "points" || command == "run") && n == 2))
    return fail(2, "expected list, machine, peak, points NAME or run NAME");
  const Experiment* experiment = find(plain[1], setting.device);
  if (!experiment) return fail(2, "no experiment '" + plain[1] + "' for device " + setting.device + "; see `list`");
  const std::vector<Values> points = experiment->points(setting);
  if (command == "points") return print(dump(points)), 0;
  return answer(points, experiment->open(setting));
}

}  // namespace

}  // namespace xpyd::experiments

int main(int argc, char** argv) {
  try {
    return xpyd::experiments::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {  // out of memory, or a bug: our code throws nothing on purpose
    std::fprintf(stderr, "xpyd_experiments: %s\n", error.what());
    return 1;
  }
}
