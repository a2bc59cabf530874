// Instance: the lines that it writes into the event log.
#include "disagg/conductor/event_log.h"
#include "disagg/instance/instance.h"
#include "disagg/request_trace.h"

namespace xpyd::disagg {

void Instance::watch() {
  engine_.watch_plans([this](const BatchView& view, const BatchPlan& plan) {
    options_.log->decided(parts_.clock.now(), "plan", options_.engine.policy->name, 0, view, NoOptions{}, plan,
                          "instance", options_.name, "admission", view.admission->name, "requests",
                          engine_.planned_requests());
  });
  engine_.watch_loads([this](const Sequence& s) {
    options_.log->happened("fetch", FetchTrace{.instance = options_.name,
                                               .request = s.request->id,
                                               .t = s.load_s,
                                               .seconds = parts_.clock.now() - s.load_s,
                                               .tokens = s.computed});
  });
  kv_.fetcher.ended = [this](const pool::Fetched& f) {
    options_.log->happened("fetch", FetchTrace{.instance = options_.name,
                                               .request = f.request,
                                               .t = f.begin_s,
                                               .seconds = f.end_s - f.begin_s,
                                               .tokens = f.tokens,
                                               .from = peers_.name_of(f.from),
                                               .worth_s = f.worth_s,
                                               .bytes = double(f.bytes) * options_.bytes_scale});
  };
  parts_.moved = [this](const Moved& moved) {
    options_.log->happened("transfer", TransferTrace{.kind = moved.kind,
                                                     .from = peers_.name_of(moved.from),
                                                     .to = peers_.name_of(moved.to),
                                                     .request = moved.request,
                                                     .t = moved.begin_s,
                                                     .seconds = moved.end_s - moved.begin_s,
                                                     .tokens = moved.tokens,
                                                     .bytes = double(moved.bytes) * options_.bytes_scale});
  };
}

void Instance::log_step(const StepCosts::Took& took) {
  const StepShape& step = took.step;
  const KvStats kv = memory_->stats();
  const ExpertLoad before = std::exchange(logged_experts_, engine_.expert_load()), &experts = logged_experts_;
  const int64_t layers = experts.layers - before.layers;
  const auto since = [](std::vector<int64_t> now, const std::vector<int64_t>& then) {
    for (size_t i = 0; i < then.size(); ++i) now[i] -= then[i];
    return now;
  };
  options_.log->happened("step",
                         StepTrace{.instance = options_.name,
                                   .t = took.end_s - took.seconds,
                                   .seconds = took.seconds,
                                   .steps = int(step.steps),
                                   .tokens = int(step.tokens),
                                   .prefix = step.prefix,
                                   .attended = step.attended,
                                   .decodes = int(step.decodes / step.steps),
                                   .context = int64_t(step.decode_context / step.steps),
                                   .running = engine_.running(),
                                   .waiting = engine_.waiting(),
                                   .free = kv.free,
                                   .active = kv.active,
                                   .cached = kv.cached,
                                   .in_transfer = kv.in_transfer,
                                   .evicted = int(kv.evictions - std::exchange(logged_evictions_, kv.evictions)),
                                   .wire_s_per_byte = parts_.rate.s_per_byte() / options_.bytes_scale,
                                   .expert_rows = since(experts.rows, before.rows),
                                   .rank_rows = since(experts.rank_rows, before.rank_rows),
                                   .imbalance = layers ? (experts.imbalance - before.imbalance) / double(layers) : 0,
                                   .exchanged_bytes = experts.exchanged_bytes - before.exchanged_bytes});
}

}  // namespace xpyd::disagg
