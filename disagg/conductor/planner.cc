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
  context_.totals.regret += regret_ratio(plan.seen, placed.prefill);
  if (options.disagg->appends_at && placed.decode != placed.prefill) choose_append(plan);
  plan.attempt.prefill = id_of(placed.prefill);
  plan.attempt.decode = id_of(placed.decode);
  return true;
}

// append_cost: considers the decode instance with the longest cached prefix, and takes it if it would compute the
// prompt itself.
void Planner::choose_append(AttemptPlan& plan) {
  const ConductorOptions& options = context_.options;
  const int at = options.disagg->appends_at(plan.seen);
  if (options.log)
    options.log->decided(context_.clock.now(), "append", options.disagg->name, plan.attempt.request, plan.seen,
                         NoOptions{}, at);
  if (at < 0) return;
  const DisaggOrder order = order_at(plan, at);
  if (order == DisaggOrder::local) plan.placed.decode = at;
  if (plan.placed.decode == at) plan.ordered = order;
}

DisaggOrder Planner::order_at(AttemptPlan& plan, int at) {
  const ConductorOptions& options = context_.options;
  const InstanceView &p = plan.at_prefill(), &d = plan.seen.instances[size_t(at)];
  const Member &prefill = cluster_.at(id_of(plan.placed.prefill)), &decode = cluster_.at(id_of(at));
  DisaggView view{.tokens = int(plan.tokens.size()),
                  .cached_decode = d.held_tokens(),
                  .cached_prefill = p.held_tokens(),
                  .prefill_jobs = plan.prefill_jobs,
                  .prefill_queued_tokens = p.queued_tokens,
                  .decode_queued_tokens = d.queued_tokens,
                  .decode_sequences = d.sequences,
                  .decode_life_s = decode.decodes.mean()};
  add_costs(view, prefill.probe->stats(), decode.probe->stats(), prefill.info.layout.shape);
  const DisaggOrder order = options.disagg->decide(view, options.disagg_options);
  if (options.log)
    options.log->decided(context_.clock.now(), "order", options.disagg->name, plan.attempt.request, view,
                         options.disagg_options, order, "instance", decode.info.name);
  return order;
}

// Sets the cost of a prompt token on either side, and of a step on D. Where nothing has been measured the prior counts,
// so that a new instance looks neither free nor out of reach.
void Planner::add_costs(DisaggView& view, const InstanceStats& prefill, const InstanceStats& decode,
                        const KvShape& shape) const {
  const ConductorOptions& options = context_.options;
  const Scoreboard& board = cluster_.board();
  const std::optional<CostPrior>& prior = options.prior;
  const bool pull = options.disagg_options.pull;
  const auto per_token = [&](const InstanceStats& where, int cached) {
    const PlacedPrompt prompt = board.prompt(view.tokens, std::min(cached, view.tokens - 1));
    return board.cost(where).seconds(prompt.work) / double(prompt.tokens);
  };
  view.prefill_s_per_token = per_token(prefill, view.cached_prefill);
  view.decode_s_per_token = per_token(decode, view.cached_decode);
  const int sequences = std::max(1, view.decode_sequences);
  StepShape step;
  step.add_decodes(sequences, double(sequences) * view.tokens);
  view.step_s = board.cost(decode).seconds(step);
  view.kv_s_per_token = (pull ? decode : prefill).wire_s_per_byte * double(shape.token_bytes());
  if (prior && view.kv_s_per_token == 0 && !options.zero_copy)  // a local copy is the lower bound of any transport
    view.kv_s_per_token = 2 * double(shape.token_bytes()) / prior->rates.bytes_per_s;
  view.chunk_tokens = options.step_tokens;
  view.overlap = overlap(options.stream_kv, pull, shape.n_layers, view.tokens - view.cached_prefill,
                         options.step_tokens);
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
    attempt.order = plan.ordered ? *plan.ordered : order_at(plan, plan.placed.decode);
    if (attempt.order != DisaggOrder::local) attempt.order = context_.options.remote_order();
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

void Planner::charge_fetch(AttemptPlan& plan) {
  if (!plan.fetches || plan.entry.request->prompt_logprobs >= 0) {  // prompt logprobs need every token computed
    plan.fetch.holder = -1;
    return;
  }
  plan.attempt.lender = plan.fetch.holder;
  plan.attempt.lends_s = plan.fetch.view.bytes_s;
}

}  // namespace xpyd::disagg
