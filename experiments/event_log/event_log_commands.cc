// xpyd replay, trace, explain and calibrate: commands that read an event log (disagg/conductor/event_log.h).
#include <cstdio>

#include "allocator/eviction.h"
#include "base/table.h"
#include "batch/policies/policy.h"
#include "disagg/conductor/admission.h"
#include "disagg/conductor/placement.h"
#include "experiments/event_log/calibrate.h"
#include "experiments/event_log/explain.h"
#include "experiments/event_log/replay.h"
#include "experiments/event_log/trace_view.h"
#include "experiments/published_routers.h"
#include "experiments/subcommands.h"
#include "server/cli/commands.h"

namespace xpyd::server {

int replay_main(const Options& options) {
  ReplayOptions again;
  for (auto [option, kind] : {std::pair{"placement", "place"},
                              {"admission", "admit"},
                              {"admission", "join"},
                              {"disagg", "order"},
                              {"batching", "plan"},
                              {"host-eviction", "evict"}})
    if (!options.text(option).empty()) again.instead[kind] = options.text(option);
  const auto counts = need(replay(options.positional(), again, [](const std::string& line, const std::string& answer) {
    std::printf("%s\n  now: %s\n", line.c_str(), answer.c_str());
  }));
  bool differs = false;
  for (const auto& [kind, count] : counts) {
    std::printf("%-8s %lld decisions, %lld differ", kind.c_str(), static_cast<long long>(count.decisions),
                static_cast<long long>(count.differ));
    if (kind == "place" && count.decisions > 0)
      std::printf(", regret ratio %.4f, now %.4f", count.regret / double(count.decisions),
                  count.regret_now / double(count.decisions));
    std::printf("\n");
    differs |= count.differ > 0;
  }
  return differs ? 1 : 0;
}

int trace_main(const Options& options) {
  need(write_trace(options.positional(), stdout));
  return 0;
}

int explain_main(const Options& options) {
  const int64_t number = options.integer("request");
  auto traces = need(read_traces(options.positional()));
  if (number >= 0) {
    std::erase_if(traces, [number](const RequestTrace& trace) { return trace.request != uint64_t(number); });
    if (traces.empty())
      throw Error{ErrorCode::not_found,
                  "request " + std::to_string(number) + " is not in the event log or has not ended"};
  }
  for (const RequestTrace& trace : traces)
    if (number >= 0) std::printf("%s\n", attribution_line(trace).c_str());
  std::printf("%s\n", attribution_header().c_str());
  for (const RequestTrace& trace : traces) std::printf("%s\n", attribution_row(trace).c_str());
  return 0;
}

int calibrate_main(const Options& options) {
  const Calibration c = need(calibrate(options.positional()));
  std::printf("%s\n", hardware_json(c).c_str());
  std::fprintf(
      stderr,
      "%.0f steps: mean error %.1f %% (bias %+.1f %%); links of %.0f instances: mean error %.1f %% (bias %+.1f %%)\n",
      c.step_error.n, 100 * c.step_error.mape(), 100 * c.step_error.bias(), c.link_error.n, 100 * c.link_error.mape(),
      100 * c.link_error.bias());
  return 0;
}

std::vector<OptionRow> event_log_options() {
  using enum OptionKind;
  // Static, because the rows keep pointers into these strings.
  static const std::string placements = router_names(), slo_admissions = names_of(admission_policies(), "|"),
                           orders = names_of(disagg_policies(), "|"), batchings = names_of(batch_policies(), "|"),
                           evictions = names_of(kEvictionPolicies, "|");
  return {
      {"placement", text, "", "", placements.c_str(), 0, 0,
       "another policy, whose decisions are compared with the recorded ones; empty: the recorded policy", "replay"},
      {"admission", text, "", "", slo_admissions.c_str(), 0, 0, "another admission policy; see --placement", "replay"},
      {"disagg", text, "", "", orders.c_str(), 0, 0, "another disaggregation policy; see --placement", "replay"},
      {"batching", text, "", "", batchings.c_str(), 0, 0, "another batching policy; see --placement", "replay"},
      {"host-eviction", text, "", "", evictions.c_str(), 0, 0,
       "another policy of evictions from the host and disk tiers; see --placement", "replay"},
      {"request", integer, "-1", "", "", -1, 9e15, "number of the request; -1: all requests, one CSV row each",
       "explain"},
  };
}

}  // namespace xpyd::server
