#include "disagg/conductor/admission.h"

#include "base/table.h"

namespace xpyd::disagg {
namespace {

// A decode batch: the number of its sequences and their KV tokens.
struct Batch {
  double sequences = 0, context = 0, at_longest = 0;
  void add(const DecodeView& s) { sequences += 1, context += double(s.context), at_longest += double(s.at_longest); }
};

// An idle instance takes any prompt.
Refusal prefill_load(const ClusterAdmission& view) {
  if (view.ttft_s <= view.objectives.ttft_s || view.idle) return {};
  return {Refusal::ttft, view.ttft_s, view.objectives.ttft_s};
}

// Checks the batch with this request: first whether its KV fits, then its step time, unless the instance is idle.
Refusal decode_load(const ClusterAdmission& view, Batch batch) {
  batch.add({.context = view.prompt_tokens});
  if (const auto room = double(view.capacity_tokens); batch.context > room) return {Refusal::room, batch.context, room};
  const double step_s = view.cost->seconds({.decodes = batch.sequences, .decode_context = batch.context});
  const bool idle = view.decoding.empty() && view.coming.empty();
  if (step_s > view.objectives.tbt_s && !idle) return {Refusal::tbt, step_s, view.objectives.tbt_s};
  return {};
}

Batch decoding_now(const ClusterAdmission& view) {
  Batch batch;
  for (const DecodeView& s : view.decoding) batch.add(s);
  return batch;
}

Refusal at_join(const ClusterAdmission& view, const AdmissionOptions&) { return decode_load(view, decoding_now(view)); }

Refusal late(const ClusterAdmission& view, const AdmissionOptions&) { return prefill_load(view); }

// max(prefill load, decode load), both as they are now. D's load is thus read one prefill too early, and the two loads
// oscillate against each other.
Refusal early(const ClusterAdmission& view, const AdmissionOptions&) {
  const Refusal p = prefill_load(view);
  return p ? p : decode_load(view, decoding_now(view));
}

Refusal early_in_flight(const ClusterAdmission& view, const AdmissionOptions&) {
  if (const Refusal p = prefill_load(view)) return p;
  Batch batch = decoding_now(view);
  for (const DecodeView& s : view.coming) batch.add(s);
  return decode_load(view, batch);
}

// The batch at the time when this request would join it: sequences that join before, without those that will have
// ended.
Refusal predicted(const ClusterAdmission& view, const AdmissionOptions& options) {
  if (const Refusal p = prefill_load(view)) return p;
  const double joins_s = view.now_s + view.ttft_s, lasts_s = view.mean_s * options.factor;
  auto there = [&](const DecodeView& s) { return s.joins_s <= joins_s && s.joins_s + lasts_s > joins_s; };
  Batch batch;
  for (const DecodeView& s : view.decoding)
    if (there(s)) batch.add(s);
  for (const DecodeView& s : view.coming)
    if (there(s)) batch.add(s);
  return decode_load(view, batch);
}

// An accepted request has room for its longest answer until it ends. Nothing is refused late, so no prefill is wasted,
// and only step times are predicted.
Refusal reserve(const ClusterAdmission& view, const AdmissionOptions&) {
  if (const Refusal p = prefill_load(view)) return p;
  const double own = double(view.prompt_tokens + view.max_tokens), room = double(view.capacity_tokens);
  Batch batch;
  for (auto sequences : {view.decoding, view.coming})
    for (const DecodeView& s : sequences) batch.add(s);
  if (batch.at_longest + own > room) return {Refusal::room, batch.at_longest + own, room};
  return decode_load(view, batch);
}

constexpr AdmissionPolicy kPolicies[] = {
    {"none", nullptr, nullptr, "vLLM, SGLang: every request is queued"},
    {"late", late, at_join, "Mooncake (arXiv v4) section 7.2, the baseline: D decides when the prompt is done"},
    {"early", early, at_join, "Mooncake (arXiv v4) section 7.2: max of both loads, on arrival"},
    {"early_in_flight", early_in_flight, at_join, "as early, with the prompts that are on their way to D"},
    {"predicted", predicted, at_join, "Mooncake (arXiv v4) section 7.4: D's load at the time of joining"},
    {"reserve", reserve, nullptr, "own rule: an accepted request holds its reserved blocks on D until it ends"},
};

}  // namespace

std::span<const AdmissionPolicy> admission_policies() { return kPolicies; }

const AdmissionPolicy* find_admission_policy(std::string_view name) { return find_row(kPolicies, name); }

}  // namespace xpyd::disagg
