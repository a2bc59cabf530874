#include "disagg/conductor/admission.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/table.h"

namespace xpyd::disagg {
namespace {

// A decode batch: the number of its sequences and their KV tokens.
struct Batch {
  double sequences = 0, context = 0, at_longest = 0;
  std::vector<const DecodeView*> all;
  void add(const DecodeView& s) {
    count(s, 1);
    all.push_back(&s);
  }
  void count(const DecodeView& s, double times) {
    sequences += times, context += times * double(s.context), at_longest += times * double(s.at_longest);
  }
};

// An idle instance takes any prompt. Otherwise the queue gets one second shorter each second, which gives the retry
// time.
Refusal prefill_load(const ClusterAdmission& view) {
  if (view.ttft_s <= view.objectives.ttft_s || view.idle) return {};
  return {Refusal::ttft, view.ttft_s, view.objectives.ttft_s,
          std::min(view.ttft_s - view.objectives.ttft_s, view.queue_s)};
}

// Returns the seconds until enough sequences have ended that the rest `fits`. A sequence ends when it is known to, or
// after the mean duration of earlier decodes.
template <class Fits>
double seconds_until(const ClusterAdmission& view, Batch batch, const Fits& fits) {
  const auto ends_s = [&](const DecodeView* s) { return s->ends_s >= 0 ? s->ends_s : s->joins_s + view.mean_s; };
  std::ranges::sort(batch.all, {}, ends_s);
  double until_s = view.now_s;
  for (const DecodeView* s : batch.all) {
    if (fits(batch)) break;
    batch.count(*s, -1);
    until_s = std::max(until_s, ends_s(s));
  }
  return until_s - view.now_s;
}

// Checks the batch with this request: first whether its KV fits, then its step time, unless the instance is idle.
Refusal decode_load(const ClusterAdmission& view, const Batch& others) {
  const DecodeView own{.context = view.prompt_tokens};
  const double room = double(view.capacity_tokens), tbt_s = view.objectives.tbt_s;
  const auto step_s = [&](Batch batch) {
    batch.count(own, 1);
    return view.cost->seconds({.decodes = batch.sequences, .decode_context = batch.context});
  };
  const auto fits = [&](const Batch& batch) {
    return batch.context + double(own.context) <= room && (batch.sequences < 1 || step_s(batch) <= tbt_s);
  };
  if (others.context + double(own.context) > room)
    return {Refusal::room, others.context + double(own.context), room, seconds_until(view, others, fits)};
  const bool idle = view.decoding.empty() && view.coming.empty();
  if (const double predicted_s = step_s(others); predicted_s > tbt_s && !idle)
    return {Refusal::tbt, predicted_s, tbt_s, seconds_until(view, others, fits)};
  return {};
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

// Saturation is the mean over the instances of max(queue / 5, KV usage / 0.8).
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

// An accepted request has room for its longest answer until it ends. Nothing is refused late, so no prefill is wasted,
// and only step times are predicted.
Refusal reserve(const ClusterAdmission& view, const AdmissionOptions&) {
  if (const Refusal p = prefill_load(view)) return p;
  const double own = double(view.prompt_tokens + view.max_tokens), room = double(view.capacity_tokens);
  Batch batch;
  for (auto sequences : {view.decoding, view.coming})
    for (const DecodeView& s : sequences) batch.add(s);
  const auto fits = [&](const Batch& b) { return b.at_longest + own <= room; };
  if (!fits(batch)) return {Refusal::room, batch.at_longest + own, room, seconds_until(view, batch, fits)};
  return decode_load(view, batch);
}

constexpr AdmissionPolicy kPolicies[] = {
    {"none", nullptr, nullptr, "vLLM, SGLang: every request is queued"},
    {"late", late, at_join, "Mooncake (arXiv v4) section 7.2, the baseline: D decides when the prompt is done"},
    {"early", early, at_join, "Mooncake (arXiv v4) section 7.2: max of both loads, on arrival"},
    {"early_in_flight", early_in_flight, at_join, "as early, with the prompts that are on their way to D"},
    {"predicted", predicted, at_join, "Mooncake (arXiv v4) section 7.4: D's load at the time of joining"},
    {"probabilistic", probabilistic, nullptr, "llm-d, probabilistic admitter: 300 saturation^5"},
    {"reserve", reserve, nullptr, "own rule: an accepted request holds its reserved blocks on D until it ends"},
};

}  // namespace

const char* refusal_name(Refusal::Why why) {
  static constexpr const char* kNames[] = {"none", "ttft", "tbt", "room", "load"};
  static_assert(std::size(kNames) == int(Refusal::load) + 1);
  return kNames[why];
}

std::span<const AdmissionPolicy> admission_policies() { return kPolicies; }

const AdmissionPolicy* find_admission_policy(std::string_view name) { return find_row(kPolicies, name); }

}  // namespace xpyd::disagg
