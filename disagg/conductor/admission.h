// Admission policies decide whether the cluster takes a request (Mooncake, FAST '25, section 4, and arXiv 2407.00079v4,
// section 7). They are pure functions of a snapshot. They are asked twice: on arrival, before anything is computed, and
// when the prompt is done and would join a decode batch.
//
// Load is relative to the objectives: predicted TTFT / --slo-ttft for prefill, predicted TBT / --slo-tbt for decode.
// Above 1 the request is refused (HTTP 429). An idle instance never refuses, because predictions are
// fitted to steps: without steps it could not learn that it is faster than predicted.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "disagg/conductor/placement.h"
#include "model/cost/step_cost.h"

namespace xpyd::disagg {

// A sequence of the chosen decode instance. It decodes there, or its prompt is still being computed.
struct DecodeView {
  double joins_s = 0;      // Clock: when it joined the batch, or is predicted to
  int64_t context = 0;     // KV tokens that it has, or will have when it joins
  int64_t at_longest = 0;  // KV tokens at most: prompt and max_tokens
};

// `predicted` takes the mean duration of decodes (arXiv section 7.4: t_d, one number for all) times `factor`.
struct AdmissionOptions {
  double factor = 1;
};

struct ClusterAdmission {
  double now_s = 0;   // Clock
  double ttft_s = 0;  // predicted, at the chosen prefill instance
  bool idle = false;  // no other prompt is at the prefill instance
  Objectives objectives = kNoObjectives;
  int64_t prompt_tokens = 0, max_tokens = 0;
  std::span<const DecodeView> decoding;   // sequences in the batch of the chosen decode instance
  std::span<const DecodeView> coming;     // sequences on their way there, whose prompts are computed now
  int64_t capacity_tokens = 0;            // KV tokens of the decode instance
  const model::StepCost* cost = nullptr;  // of its steps
  double mean_s = 0;                      // mean duration of decodes that have ended there
};

struct AdmissionPolicy {  // arrives, joins: null if it does not check at this moment
  const char* name;
  Refusal (*arrives)(const ClusterAdmission& view, const AdmissionOptions& options);
  Refusal (*joins)(const ClusterAdmission& view, const AdmissionOptions& options);
  const char* source;
};

std::span<const AdmissionPolicy> admission_policies();
const AdmissionPolicy* find_admission_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
