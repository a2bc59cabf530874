#include "disagg/conductor/planner.h"

#include <algorithm>
#include <utility>

#include "disagg/conductor/event_log.h"

namespace xpyd::disagg {
namespace {

// Returns prompt and output. If there is output, both are joined in `both`.
std::span<const int32_t> tokens_of(const Request& request, const std::vector<int32_t>& output,
                                   std::vector<int32_t>& both) {
  if (output.empty()) return request.prompt;
  both = request.prompt;
  both.insert(both.end(), output.begin(), output.end());
  return both;
}

}  // namespace

AttemptPlan::AttemptPlan(const RequestTable::Entry& of, int first, int count, int jobs)
    : entry(of),
      attempt{.request = of.request->id, .first = first, .count = count, .left = count},
      prefill_jobs(jobs),
      tokens(tokens_of(*of.request, choice().output, joined)),
      prompt(tokens, of.request->cache_salt) {}

bool Planner::choose(AttemptPlan& plan) {
  const ConductorOptions& options = context_.options;
  const Request& request = *plan.entry.request;
  plan.seen = cluster_.board().look(plan.prompt, context_.clock.now());
  plan.seen.number = uint64_t(context_.totals.attempts);
  plan.seen.random = context_.random.next();
  plan.seen.objectives = context_.objectives(request);
  plan.placed = options.placement->place(plan.seen, options.placement_options);
  Placement& placed = plan.placed;
  if (placed.prefill < 0 || placed.decode < 0) return false;
  if (options.log)
    options.log->decided(context_.clock.now(), "place", options.placement->name, request.id, plan.seen,
                         options.placement_options, placed);
  // A one-token request ends where its prompt is computed; no KV moves.
  if (int(plan.choice().output.size()) + 1 >= request.max_tokens) placed.decode = placed.prefill;
  plan.attempt.prefill = id_of(placed.prefill);
  plan.attempt.decode = id_of(placed.decode);
  return true;
}

void Planner::decide_fetch(AttemptPlan& plan) {
  const ConductorOptions& options = context_.options;
  const InstanceView& p = plan.at_prefill();
  const bool moved = plan.placed.source >= 0;  // placement relies on this fetch
  const Member& prefill = cluster_.at(plan.attempt.prefill);
  Scoreboard::Fetch& fetch = plan.fetch;
  if (!options.zero_copy && plan.entry.tries == 0 && (options.fetch->fetches || moved))
    fetch = cluster_.board().fetch(prefill, plan.prompt);
  plan.fetches = moved && fetch.holder >= 0;
  if (fetch.holder >= 0 && options.fetch->fetches) {
    const bool answer = options.fetch->fetches(fetch.view);
    plan.fetches |= answer;
    if (options.log)
      options.log->decided(context_.clock.now(), "fetch_or_compute", options.fetch->name, plan.attempt.request,
                           fetch.view, NoOptions{}, answer, "instance", prefill.info.name);
  }
  plan.fetch_s = moved ? p.fetch_s : fetch_seconds(fetch.view);
  plan.attempt.prompt_s = plan.fetches ? p.prefill_s - fetch.view.saved_s : p.prefill_s;
  plan.ttft_s = p.queue_s + (plan.fetches ? plan.fetch_s : 0) + plan.attempt.prompt_s;
}

void Planner::decide_order(AttemptPlan& plan) {
  const auto tokens = int(plan.tokens.size());
  Attempt& attempt = plan.attempt;
  int cached = plan.held_tokens();
  if (plan.placed.prefill != plan.placed.decode) {
    const ConductorOptions& options = context_.options;
    const DisaggView view{.tokens = tokens,
                          .cached_decode = plan.at_decode().held_tokens(),
                          .prefill_jobs = plan.prefill_jobs,
                          .joined_step_s = cluster_.board().joined_step_s(cluster_.at(attempt.decode), tokens),
                          .tbt_s = plan.seen.objectives.tbt_s};
    attempt.order = options.disagg->decide(view, options.disagg_options);
    if (options.log)
      options.log->decided(context_.clock.now(), "order", options.disagg->name, attempt.request, view,
                           options.disagg_options, attempt.order, "instance", cluster_.at(attempt.decode).info.name);
    if (attempt.order != DisaggOrder::local) attempt.order = options.remote_order();
    // In decode_first, P returns no prompt logprobs.
    if (attempt.order == DisaggOrder::decode_first && plan.entry.request->prompt_logprobs >= 0)
      attempt.order = DisaggOrder::local;
    if (attempt.order == DisaggOrder::local) cached = plan.at_decode().held_tokens();
    if (attempt.order == DisaggOrder::local || attempt.order == DisaggOrder::decode_first) plan.fetches = false;
  }
  if (attempt.order == DisaggOrder::local) attempt.prefill = attempt.decode;
  if (attempt.order == DisaggOrder::decode_first) attempt.prefill = -1;  // until an instance takes the job
  attempt.prompt = cluster_.board().prompt(tokens, cached);
  attempt.context = tokens;
  attempt.joins_s = context_.clock.now() + plan.ttft_s;
}

void Planner::check_fetch(AttemptPlan& plan) {
  const bool wanted = plan.fetches && plan.entry.request->prompt_logprobs < 0;  // they need every token computed
  if (!wanted) plan.fetch.holder = -1;
}

}  // namespace xpyd::disagg
