#include "disagg/conductor/planner.h"

#include <algorithm>
#include <utility>

#include "disagg/conductor/event_log.h"
#include "disagg/conductor/placement_costs.h"

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

// Returns the decode instance with the fewest sequences among those that have all whole blocks of the prompt, or -1.
int holder_of_copy(const ClusterView& view, const Request& request) {
  if (view.instances.empty()) return -1;
  const int whole = (int(request.prompt.size()) - 1) / view.block_tokens * view.block_tokens;
  const auto holds = [&](const InstanceView& i) { return decodes(i) && whole > 0 && i.held_tokens() >= whole; };
  return least(view, holds, [](const InstanceView& i) { return i.sequences; });
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
  // A choice whose decode instance is lost continues where a copy of its prompt is, without a prefill instance.
  const int copy = options.decode_copies > 1 && plan.entry.tries > 0 ? holder_of_copy(plan.seen, request) : -1;
  if (copy < 0 && (placed.prefill < 0 || placed.decode < 0)) return false;
  if (options.log)
    options.log->decided(context_.clock.now(), "place", options.placement->name, request.id, plan.seen,
                         options.placement_options, placed);
  if (copy >= 0) placed = {copy, copy};
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
  int cached = plan.fetches ? plan.fetch.view.holder_tokens : plan.at_prefill().held_tokens();
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

StartRequest Planner::message(const AttemptPlan& plan, AttemptId number) const {
  constexpr double kPatience = 30;  // seconds that a fetch may take where its policy has no limit
  const Attempt& attempt = plan.attempt;
  const RequestTable::Choice& choice = plan.choice();
  const bool fetches = plan.fetches && plan.entry.request->prompt_logprobs < 0;  // they need every token computed
  const double saved_s = plan.fetch.view.saved_s, most = context_.options.fetch->most;
  return {.attempt = number,
          .request = plan.entry.request,
          .state = {.choice = attempt.first,
                    .stands_for = attempt.count,
                    .output = choice.output,
                    .logits_hash = choice.logits_hash,
                    .queued_s = plan.entry.request->arrival_s,
                    .scheduled_s = choice.scheduled_s},
          .remote = attempt.order != DisaggOrder::local,
          .decode = attempt.decode,
          .fetch = {.holder = fetches ? plan.fetch.holder : -1,
                    .tokens = plan.fetch.view.holder_tokens,
                    .worth_s = saved_s,
                    .limit_s = most > 0 ? most * saved_s : kPatience}};
}

// ---- Refusals, on arrival and when a prompt is done.

Refusal Planner::refuses(const AttemptPlan& plan) {
  const ConductorOptions& options = context_.options;
  if (plan.entry.tries > 0 || !options.admission->arrives) return {};
  const Member& prefill = cluster_.at(plan.attempt.prefill);
  ClusterAdmission asked = look_at(plan.entry, plan.attempt.decode, plan.ttft_s);
  asked.idle = prefill.load.prompting.steps == 0 && plan.prefill_jobs == 0;
  const Refusal refusal = options.admission->arrives(asked, options.admission_options);
  if (options.log)
    options.log->decided(context_.clock.now(), "admit", options.admission->name, plan.attempt.request, asked,
                         options.admission_options, refusal, "cost", decode_cost_.terms());
  return refusal;
}

Refusal Planner::refuses_late(const Attempt& attempt) {
  const ConductorOptions& options = context_.options;
  if (!options.admission->joins) return {};
  const RequestTable::Entry& entry = requests_.at(attempt.request);
  if (entry.tries > 0 || attempt.count != int(entry.choices.size()) || !entry.choices[0].output.empty()) return {};
  const ClusterAdmission view = look_at(entry, attempt.decode, context_.clock.now() - entry.request->arrival_s);
  const Refusal refusal = options.admission->joins(view, options.admission_options);
  if (options.log)
    options.log->decided(context_.clock.now(), "join", options.admission->name, attempt.request, view,
                         options.admission_options, refusal, "cost", decode_cost_.terms());
  return refusal;
}

ClusterAdmission Planner::look_at(const RequestTable::Entry& entry, InstanceId decode, double ttft_s) {
  const Request& request = *entry.request;
  const Member& member = cluster_.at(decode);
  ClusterAdmission view{.now_s = context_.clock.now(),
                        .ttft_s = ttft_s,
                        .objectives = context_.objectives(request),
                        .prompt_tokens = int64_t(request.prompt.size()),
                        .max_tokens = request.max_tokens,
                        .capacity_tokens = int64_t(member.info.capacity_blocks) * member.info.block_tokens,
                        .mean_s = member.decode_s};
  decode_cost_ = cluster_.board().cost(member.probe->stats());
  view.cost = &decode_cost_;
  if (member.info.role == Role::prefill) return view;  // a one-token request does not decode
  decoding_.clear();
  coming_.clear();
  for (AttemptId number : member.decoding) {
    const Attempt& attempt = attempts_.at(number);
    if (attempt.request == request.id) continue;  // the policies count it themselves
    const Request& other = *requests_.at(attempt.request).request;
    const bool comes = attempt.prompting || attempt.prefill < 0;
    const DecodeView sequence{.joins_s = attempt.joins_s,
                              .context = attempt.context,
                              .at_longest = int64_t(other.prompt.size()) + other.max_tokens};
    auto& where = comes ? coming_ : decoding_;
    where.insert(where.end(), size_t(attempt.left), sequence);
  }
  view.decoding = decoding_;
  view.coming = coming_;
  return view;
}

}  // namespace xpyd::disagg
