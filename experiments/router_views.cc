// router_views: what stale views cost a router: events of prefix caches that come late or are lost, and several routers
// that do not know of each other (experiments/simulate/routers.h).
//
// The simulator: eight instances of 8 x A800 with Llama-3-70B as 4P4D, 1,000 requests of Mooncake's conversation, its
// ticks of 3 s spread, arrivals such that the P's would work for 0.9 of the time if they found nothing. Three draws:
// parts of the trace. Of each router's view its own load, the instances' memory and their prefix caches by events, each
// event `delay_s` late or lost with a chance of `loss`. One of delay, loss and number of routers at a time, then all.
// mooncake fetches prefixes from instances that it sees to have more.
//
// Arithmetic. A prompt takes 1.5 to 2 s, and a conversation's next turn comes after tens of seconds: a delay of 2 s
// hides the prefix of few turns, and the bursts of the common start are found soon: hits .95 to 1, TTFT 1 to 1.15. A
// block whose storing was not heard hides what is behind it for as long as it stays: of a prefix of 20 blocks with
// 5 % lost (1 - .95^20) / (20 x .05) = .64 is seen, but whoever gets the prompt for what is seen has all of it, so only
// what is lost at the start goes elsewhere: hits .8 to 1. Several routers share a cache's contents and not the queue of
// prompts: each of four sees a quarter of the load, too little to avoid a busy instance: the queue of a service and a
// half comes nearer to that of a router that does not look at loads, TTFT 1.1 to 4 times with four, and less with two.

#include "experiments/draws.h"

namespace xpyd::experiments::router_views_experiment {
namespace {

using namespace disagg;

constexpr int kDraws = 3;

std::vector<Values> points(const Setting& setting) {
  if (setting.traces.empty()) return {};
  struct View {
    double delay_s, loss;
    int routers;
  };
  constexpr View kViews[] = {{0, 0, 1},    {0.1, 0, 1}, {0.5, 0, 1}, {2, 0, 1},   {0, 0.01, 1},
                             {0, 0.05, 1}, {0, 0, 2},   {0, 0, 4},   {2, 0.05, 4}};
  std::vector<Values> all;
  for (const char* placement : {"prefix_aware", "mooncake", "lmetric", "dynamo"})
    for (const View& view : kViews)
      for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
        all.push_back({{"placement", placement},
                       {"delay_s", view.delay_s},
                       {"loss", view.loss},
                       {"routers", view.routers},
                       {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Trace& all, const Setting& setting) {
  const size_t n = setting.tiny ? 60 : 1000, apart = (all.requests.size() - n) / (kDraws - 1);
  Trace trace = window(all, apart * size_t(int(point["sample"])), n);
  Result<SimulationOptions> options = simulated("a800x8", "llama-3-70b", "4P4D", trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  trace = faster(std::move(trace), 0.9 * 4 / prefill_load(o, trace));
  o.conductor.placement = find_placement_policy(std::string(point["placement"]));
  o.conductor.objectives = {30, 0.1};
  o.routers = {.routers = point["routers"], .event_delay_s = point["delay_s"], .event_loss = point["loss"]};
  Result<Simulation> run = simulate(o, trace);
  if (!run) return run.error();
  Finding found;
  found.rows.push_back(outcome(run.value(), o.conductor.objectives, found.wrong));
  return found;
}

Measure open(const Setting& setting) {
  return over_draws(setting, [setting](const Values& point, const Trace& trace) { return run(point, trace, setting); });
}

REGISTER_EXPERIMENT("router_views", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::router_views_experiment
