// Conductor: what it refuses, on arrival and when a prompt is done, and what its policy sees (admission.h).
#include <algorithm>
#include <cstdio>

#include "disagg/conductor/conductor.h"
#include "disagg/conductor/event_log.h"

namespace xpyd::disagg {

Objectives Conductor::objectives(const Request& request) const {
  const auto first = [](double own, double all, double none) { return own > 0 ? own : all > 0 ? all : none; };
  Objectives own = {first(request.slo_ttft_s, options_.objectives.ttft_s, kNoObjectives.ttft_s),
                    first(request.slo_tbt_s, options_.objectives.tbt_s, kNoObjectives.tbt_s)};
  if (request.max_tokens <= 1) own.tbt_s = kNoObjectives.tbt_s;  // nobody waits for another token
  return own;
}

ClusterAdmission Conductor::admission(const Entry& entry, InstanceId decode, double ttft_s) {
  const Request& request = *entry.request;
  const Member& member = members_.at(decode);
  ClusterAdmission view{.now_s = clock_.now(),
                        .ttft_s = ttft_s,
                        .objectives = objectives(request),
                        .prompt_tokens = int64_t(request.prompt.size()),
                        .max_tokens = request.max_tokens,
                        .capacity_tokens = int64_t(member.info.capacity_blocks) * member.info.block_tokens,
                        .mean_s = member.decodes.mean(),
                        .quantile_s = member.decodes.quantile(options_.admission_options.quantile),
                        .sheddable = request.priority > 0,
                        .random = random_.uniform()};
  decode_cost_ = board_.cost_now(member, view.now_s);
  view.cost = &decode_cost_;
  if (member.info.role == Role::prefill) return view;  // one token is wanted: nobody decodes there
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
  if (options_.answer_tokens) foresee(member);
  view.decoding = decoding_;
  view.coming = coming_;
  return view;
}

// When these sequences end: the tokens that they will have yet, each of a step with all that are there or come.
void Conductor::foresee(const Member& member) {
  StepShape batch;
  for (const auto* sequences : {&decoding_, &coming_})
    for (const DecodeView& s : *sequences) batch.decodes += 1, batch.decode_context += double(s.context);
  const double step_s = decode_cost_.seconds(batch), now_s = clock_.now();
  auto decoding = decoding_.begin(), coming = coming_.begin();
  for (AttemptId number : member.decoding) {
    const Attempt& attempt = attempts_.at(number);
    const Entry& entry = requests_.at(attempt.request);
    const bool comes = attempt.prompting || attempt.prefill < 0;
    const size_t heard = entry.choices[size_t(attempt.first)].output.size();
    const double has = comes ? 0 : double(heard);
    const double left = std::max(0.0, options_.answer_tokens(*entry.request) - has);
    const double ends_s = std::max(now_s, comes ? attempt.joins_s : 0) + left * step_s;
    for (int i = 0; i < attempt.left; ++i) (comes ? coming++ : decoding++)->ends_s = ends_s;
  }
}

// Every choice ends with why, and with what was predicted.
void Conductor::refuse(Entry& entry, const Refusal& refusal, int64_t& counted, Out& out) {
  static constexpr const char* kUnits[] = {"", " s", " s", " tokens", ""};
  char why[160];
  std::snprintf(why, sizeof why, "%s: %.4g%s predicted, at most %.4g%s wanted", refusal_name(refusal.why),
                refusal.predicted, kUnits[refusal.why], refusal.objective, kUnits[refusal.why]);
  ++counted;
  ++totals_.refused_by[refusal.why];
  for (int c = 0; c < int(entry.choices.size()); ++c)
    if (!entry.choices[size_t(c)].ended) end_choice(entry, c, FinishReason::refused, why, out, refusal.retry_s);
}

// Its prompt is done, and nothing of it has been said yet.
bool Conductor::refused_late(AttemptId number, Out& out) {
  if (!options_.admission->joins) return false;
  const Attempt attempt = attempts_.at(number);
  Entry& entry = requests_.at(attempt.request);
  if (entry.tries > 0 || attempt.count != int(entry.choices.size()) || !entry.choices[0].output.empty()) return false;
  const ClusterAdmission view = admission(entry, attempt.decode, clock_.now() - entry.request->arrival_s);
  const Refusal refusal = options_.admission->joins(view, options_.admission_options);
  if (options_.log)
    options_.log->decided(clock_.now(), "join", options_.admission->name, attempt.request, view,
                          options_.admission_options, refusal, "cost", decode_cost_.terms());
  if (!refusal) return false;
  forget(number);
  call_off(number, attempt);
  totals_.wasted_prefill_s += attempt.prompt_s;
  refuse(entry, refusal, totals_.refused_late, out);
  forget_choice(attempt.request, entry);
  return true;
}

}  // namespace xpyd::disagg
