// The structs that the parts of an engine share: options, statistics, and the hooks that hear of KV that leaves.
//
// Thread safety: values; the engine's thread calls the hooks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "batch/drafter.h"
#include "batch/engine/engine_chunks.h"
#include "batch/policies/admission.h"
#include "batch/policies/policy.h"
#include "batch/sequence.h"
#include "model/cost/step_cost.h"

namespace xpyd::batch {

struct EngineOptions {
  const BatchPolicy* policy = nullptr;
  const AdmissionRule* admission = nullptr;  // null: the policy's own
  int max_batch = 64;                        // sequences that run at once; at most the model's max_logits
  int step_tokens = 512;                // tokens per step; the model's max_step_tokens is at least max(this, max_batch)
  const ChunkPolicy* chunks = nullptr;  // how step_tokens are divided among prompts; null: fixed
  bool ahead = true;                    // plan the next steps while the model computes, if the model can
  SpeculationOptions speculation;  // drafts use what a step leaves of step_tokens and of max_batch rows of logits
  std::vector<int> eos_tokens;
  const Tokenizer* tokenizer = nullptr;  // null: tokens only, no text
};

// Cumulative counters.
struct EngineStats {
  int64_t steps = 0, generated_tokens = 0, preemptions = 0;
  int64_t prompt_tokens = 0;                      // computed: without cached ones, and again after each preemption
  int64_t draft_tokens = 0, accepted_tokens = 0;  // drafts computed; drafts accepted
  double step_seconds = 0;        // forward and sampling; for waves the slowest stage, beside this thread
  double wait_seconds = 0;        // waiting for a step to end; includes begin() of a model that computes there
  double schedule_seconds = 0;    // the rest of step()
  StepShape work = {.steps = 0};  // of all steps
  double flops = 0;               // of all steps, as Model::work counts them
  // Blocks held by sequences times seconds, before and after the first token. A block held by several sequences counts
  // for each.
  double prompt_block_s = 0, decode_block_s = 0;
};

// Hooks for sequences whose KV goes to another instance (Sequence::leaves). The engine's thread makes all calls from
// inside step().
class EngineHooks {
 public:
  virtual ~EngineHooks() = default;
  // The sequence has memory and is about to compute for the first time.
  virtual void prefill_started(const Sequence& sequence) { (void)sequence; }
  // True: kv_written is called layer by layer. False: it is called once after a step or, for a wave, after each stage.
  virtual bool layerwise() const { return false; }
  // A layer (or, if not layerwise, a step) has been computed. The kv_written calls of all its sequences follow.
  virtual void layer_ended() {}
  // The KV of tokens [token_begin, token_end) in layers [layer_begin, layer_end) is in place here.
  virtual void kv_written(Sequence& sequence, int layer_begin, int layer_end, int token_begin, int token_end) {
    (void)sequence, (void)layer_begin, (void)layer_end, (void)token_begin, (void)token_end;
  }
  // The prompt is computed and its choices have their first tokens. `choices` holds those that continue (at least one).
  // choices[0]->kv is the KV that all share; from now on the callee owns it.
  virtual void prefill_done(std::vector<SequencePtr> choices) { (void)choices; }
  // A leaving sequence ended here (abort, timeout, one-token output). Nothing will be handed over. The engine frees its
  // KV next, so the callee has pinned what it still sends.
  virtual void prefill_cancelled(const Sequence& sequence) { (void)sequence; }
};

// Called with every plan that moves something.
using PlanWatcher = std::function<void(const BatchView& view, const BatchPlan& plan)>;
// Called with every waiting sequence when its KV is loaded from offload. The load began at
// Sequence::load_s.
using LoadWatcher = std::function<void(const Sequence& sequence)>;

}  // namespace xpyd::batch
