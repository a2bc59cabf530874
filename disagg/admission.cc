#include "disagg/admission.h"

#include <algorithm>
#include <cmath>

#include "base/table.h"

namespace xpyd::disagg {
namespace {

// What a decode batch is: so many sequences, with so many tokens of KV.
struct Batch {
  double sequences = 0, context = 0;
  void add(const DecodeView& s) { sequences += 1, context += double(s.context); }
};

Refusal prefill_load(const ClusterAdmission& view) {
  if (view.ttft_s <= view.objectives.ttft_s) return {};
  return {Refusal::ttft, view.ttft_s, view.objectives.ttft_s, view.ttft_s - view.objectives.ttft_s};
}

// With this request in the batch: first whether its KV has room, then its steps.
Refusal decode_load(const ClusterAdmission& view, Batch batch) {
  batch.add({.context = view.prompt_tokens});
  if (batch.context > double(view.capacity_tokens))
    return {Refusal::room, batch.context, double(view.capacity_tokens), view.mean_s};
  const double tbt_s = view.cost->seconds({.decodes = batch.sequences, .decode_context = batch.context});
  if (tbt_s <= view.objectives.tbt_s) return {};
  return {Refusal::tbt, tbt_s, view.objectives.tbt_s, view.mean_s};
}

Batch decoding_now(const ClusterAdmission& view) {
  Batch batch;
  for (const DecodeView& s : view.decoding) batch.add(s);
  return batch;
}

double t_d(const ClusterAdmission& view, const AdmissionOptions& options) {
  const double seconds = options.decode == DecodeSeconds::fixed      ? options.fixed_s
                         : options.decode == DecodeSeconds::quantile ? view.quantile_s
                                                                     : view.mean_s;
  return seconds * options.factor;
}

Refusal at_join(const ClusterAdmission& view, const AdmissionOptions&) { return decode_load(view, decoding_now(view)); }

Refusal late(const ClusterAdmission& view, const AdmissionOptions&) { return prefill_load(view); }

// max(prefill load, decode load), both of now: D's load is read one prefill too early, and both swing against each
// other.
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

// The batch at the time when this one would join it: whoever comes before, less whoever will have ended.
Refusal predicted(const ClusterAdmission& view, const AdmissionOptions& options) {
  if (const Refusal p = prefill_load(view)) return p;
  const double joins_s = view.now_s + view.ttft_s, lasts_s = t_d(view, options);
  auto there = [&](const DecodeView& s) {
    const bool known = options.decode == DecodeSeconds::oracle && s.ends_s >= 0;
    return s.joins_s <= joins_s && s.joins_s + (known ? (s.ends_s - s.joins_s) * options.factor : lasts_s) > joins_s;
  };
  Batch batch;
  for (const DecodeView& s : view.decoding)
    if (there(s)) batch.add(s);
  for (const DecodeView& s : view.coming)
    if (there(s)) batch.add(s);
  return decode_load(view, batch);
}

// Saturation is the mean over the instances of the worse of queue / 5 and KV / 0.8.
Refusal probabilistic(const ClusterAdmission& view, const AdmissionOptions&) {
  double sum = 0;
  for (const InstanceView& i : view.instances) {
    const double used = i.capacity_tokens > 0 ? 1 - double(i.available_tokens) / double(i.capacity_tokens) : 0;
    sum += std::max(i.queued / 5.0, used / 0.8);
  }
  const double saturation = view.instances.empty() ? 0 : sum / double(view.instances.size());
  const double refused = std::min(1.0, 300 * std::pow(saturation, 5));
  if (!view.sheddable || view.random >= refused) return {};
  return {Refusal::load, refused, view.random, 1};
}

// Whoever was accepted has its room, at its longest, whatever overtakes it: nothing is refused late, so no prefill is
// wasted, and nothing is predicted but the time of a step.
Refusal reserve(const ClusterAdmission& view, const AdmissionOptions&) {
  if (const Refusal p = prefill_load(view)) return p;
  double held = double(view.prompt_tokens + view.max_tokens);
  Batch batch;
  for (auto sequences : {view.decoding, view.coming})
    for (const DecodeView& s : sequences) batch.add(s), held += double(s.at_longest);
  if (held > double(view.capacity_tokens)) return {Refusal::room, held, double(view.capacity_tokens), view.mean_s};
  return decode_load(view, batch);
}

constexpr AdmissionPolicy kPolicies[] = {
    {"none", nullptr, nullptr, "vLLM, SGLang: whoever comes is queued"},
    {"late", late, at_join, "Mooncake (arXiv v4) section 7.2, the baseline: D decides when the prompt is done"},
    {"early", early, at_join, "Mooncake (arXiv v4) section 7.2: max of both loads, on arrival"},
    {"early_in_flight", early_in_flight, at_join, "…, with the prompts that are on their way to D"},
    {"predicted", predicted, at_join, "Mooncake (arXiv v4) section 7.4: D's load at the time of joining"},
    {"probabilistic", probabilistic, nullptr, "llm-d, probabilistic admitter: 300 saturation^5"},
    {"reserve", reserve, nullptr, "ours: an accepted request holds its room on D until it ends"},
};

}  // namespace

const char* refusal_name(Refusal::Why why) {
  static constexpr const char* kNames[] = {"none", "ttft", "tbt", "room", "load"};
  static_assert(std::size(kNames) == kRefusals);
  return kNames[why];
}

std::span<const AdmissionPolicy> admission_policies() { return kPolicies; }

const AdmissionPolicy* find_admission_policy(std::string_view name) { return find_row(kPolicies, name); }

}  // namespace xpyd::disagg
