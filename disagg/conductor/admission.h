// Admission policies: whether the cluster takes a request, given what its client wants (Mooncake, FAST '25 section 4
// and arXiv 2407.00079v4 section 7). Pure functions over a snapshot, asked twice: when a request comes, before anything
// is computed for it, and when its prompt is done and it would join a decode batch.
//
// Load is relative to the objectives: predicted TTFT / --slo-ttft of prefill, predicted TBT / --slo-tbt of decode;
// above 1 a request is refused (HTTP 429), unless nobody else is there: what is predicted comes from steps, so who is
// idle and refuses would never learn that it is faster than it was. Who is refused hears when it would be taken.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "disagg/conductor/placement.h"
#include "model/cost/step_cost.h"

namespace xpyd::disagg {

// A sequence of the chosen decode instance: it decodes there, or its prompt is still computed.
struct DecodeView {
  double joins_s = 0;      // Clock: when it joined, or is predicted to
  double ends_s = -1;      // Clock: where it is known (a simulation's oracle); -1: it is not
  int64_t context = 0;     // tokens of KV that it has, or will have when it joins
  int64_t at_longest = 0;  // … at most: prompt and max_tokens
};

// How long a decode is said to last (arXiv section 7.4: t_d, one number for all). oracle: each as long as it will,
// where that is known; else as mean.
enum class DecodeSeconds : uint8_t { fixed, mean, quantile, oracle };

struct AdmissionOptions {
  DecodeSeconds decode = DecodeSeconds::mean;
  double fixed_s = 20, quantile = 0.9, factor = 1;  // t_d is multiplied by `factor`
};

struct ClusterAdmission {
  double now_s = 0;         // Clock
  double ttft_s = 0;        // predicted, at the chosen prefill instance
  double queue_s = kNever;  // … of it, until no other prompt is there
  bool idle = false;        // no other prompt is there
  Objectives objectives = kNoObjectives;
  int64_t prompt_tokens = 0, max_tokens = 0;
  std::span<const DecodeView> decoding;   // on the chosen decode instance
  std::span<const DecodeView> coming;     // … whose prompts are computed now
  int64_t capacity_tokens = 0;            // of its KV
  const model::StepCost* cost = nullptr;  // of its steps
  double mean_s = 0, quantile_s = 0;      // of decodes that have ended there
  std::span<const InstanceView> instances;
  bool sheddable = true;  // llm-d: a request of negative priority
  double random = 0;      // [0, 1)
};

const char* refusal_name(Refusal::Why why);  // "ttft", "tbt", "room", "load"

struct AdmissionPolicy {  // null: whoever comes is taken
  const char* name;
  Refusal (*arrives)(const ClusterAdmission& view, const AdmissionOptions& options);
  Refusal (*joins)(const ClusterAdmission& view, const AdmissionOptions& options);
  const char* source;
};

std::span<const AdmissionPolicy> admission_policies();
const AdmissionPolicy* find_admission_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
