#include "experiments/event_log/calibrate.h"

#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "disagg/conductor/event_log.h"
#include "disagg/request_trace.h"
#include "experiments/event_log/json_in.h"

namespace xpyd::disagg {
namespace {

struct Seen {
  std::vector<std::pair<StepShape, double>> steps;  // each step's shape and seconds
  std::map<std::string, double> links;              // instance -> s/byte
};

Result<Seen> look_into(std::span<const std::string> logs) {
  Seen seen;
  const Status read = read_event_logs(logs, [&](const std::string&, const nlohmann::json& line) {
    if (line.value("e", "") != "step") return;
    JsonIn::Keep keep;
    JsonIn in(line, keep);
    StepTrace step;
    columns(in, step);
    StepShape shape{
        .steps = double(step.steps), .tokens = double(step.tokens), .prefix = step.prefix, .attended = step.attended};
    shape.add_decodes(double(step.decodes) * step.steps, double(step.context) * step.steps);
    seen.steps.emplace_back(shape, step.seconds);
    if (step.wire_s_per_byte > 0) seen.links[step.instance] = step.wire_s_per_byte;
  });
  if (!read) return read.error();
  if (seen.steps.empty()) return invalid("the event log has no steps");
  return seen;
}

void judge(Calibration& c, const Seen& seen) {
  c.step_error = c.link_error = {};
  for (const auto& [shape, seconds] : seen.steps) c.step_error.add(model::seconds(c.step_terms, shape), seconds);
  for (const auto& [instance, s_per_byte] : seen.links) c.link_error.add(1 / c.link_bytes_per_s, s_per_byte);
}

}  // namespace

Result<Calibration> calibrate(std::span<const std::string> logs) {
  const Result<Seen> seen = look_into(logs);
  if (!seen) return seen.error();
  Calibration c;
  StepCost cost;
  for (const auto& [shape, seconds] : seen.value().steps) cost.saw(shape, seconds, 1);
  c.step_terms = cost.terms();
  double s_per_byte = 0;
  for (const auto& [instance, of_it] : seen.value().links) s_per_byte += of_it;
  if (s_per_byte > 0) c.link_bytes_per_s = double(seen.value().links.size()) / s_per_byte;
  judge(c, seen.value());
  return c;
}

Result<Calibration> compare(const Calibration& calibration, std::span<const std::string> logs) {
  const Result<Seen> seen = look_into(logs);
  if (!seen) return seen.error();
  Calibration c = calibration;
  judge(c, seen.value());
  return c;
}

std::string hardware_json(const Calibration& c) {
  nlohmann::json file = {{"name", "measured"}, {"step_terms", c.step_terms}};
  if (c.link_bytes_per_s > 0) file["link_bytes_per_s"] = c.link_bytes_per_s, file["link_s"] = 0;
  return file.dump();
}

}  // namespace xpyd::disagg
