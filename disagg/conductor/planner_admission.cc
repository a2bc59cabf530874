// Planner: refusals on arrival and when a prompt is done, and the view that admission policies read (admission.h).
#include "disagg/conductor/event_log.h"
#include "disagg/conductor/planner.h"

namespace xpyd::disagg {

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
