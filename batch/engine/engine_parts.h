// What the parts of an engine share: its options, what it counts, and the hooks that hear of KV that leaves.
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
  int max_batch = 64;                        // sequences running at once; the model's max_logits is at least this
  int step_tokens = 512;  // tokens of one step; the model's max_step_tokens is at least max(this, max_batch)
  ChunkOptions chunks;    // of these, how many are whose
  bool ahead = true;      // plan the next steps while the model computes some, where the model can
  bool by_layer = true;   // a prompt begins with the first layer of KV that comes for it, where its step can wait
  SpeculationOptions speculation;  // drafts take what a step has left of step_tokens and of max_batch rows of logits
  std::vector<int> eos_tokens;
  const Tokenizer* tokenizer = nullptr;  // null: tokens only, no text
};

// Cumulative.
struct EngineStats {
  int64_t steps = 0, generated_tokens = 0, preemptions = 0;
  int64_t prompt_tokens = 0;  // computed: without cached ones, and again each time that they are computed again
  int64_t draft_tokens = 0, accepted_tokens = 0;          // computed before anybody knew them; of these, right
  int64_t chunk_decisions = 0, chunk_extrapolations = 0;  // of the chunk policy; of these, ChunkChoice::extrapolates
  double step_seconds = 0;        // forward and sampling; of waves: their slowest stage, beside this thread
  double wait_seconds = 0;        // waiting for a step to end; of a model that computes in begin(), in there
  double schedule_seconds = 0;    // everything else of step()
  StepShape work = {.steps = 0};  // of all steps
  double flops = 0;               // … as the model counts them (Model::work)
  // Blocks that sequences held, times the seconds: until their prompt was done, and from then on. One that several hold
  // counts for each.
  double prompt_block_s = 0, decode_block_s = 0;
};

// What happens to sequences whose KV goes to another instance (Sequence::leaves). All calls come
// from inside step(), on the engine's thread.
class EngineHooks {
 public:
  virtual ~EngineHooks() = default;
  // It has memory and is about to compute for the first time.
  virtual void prefill_started(const Sequence& sequence) { (void)sequence; }
  // True: kv_written is called layer by layer; false: once after a step, or, of a wave, after each of its stages.
  virtual bool layerwise() const { return false; }
  // A layer, or where not layerwise a step, has been computed: the kv_written of all sequences follow.
  virtual void layer_ended() {}
  // KV of tokens [token_begin, token_end) in layers [layer_begin, layer_end) is in place here.
  virtual void kv_written(Sequence& sequence, int layer_begin, int layer_end, int token_begin, int token_end) {
    (void)sequence, (void)layer_begin, (void)layer_end, (void)token_begin, (void)token_end;
  }
  // The prompt is done and its choices have their first tokens. Those that go on are in `choices` (at least one); the
  // KV, shared by all, is choices[0]->kv of the engine's memory, and the callee's from now on.
  virtual void prefill_done(std::vector<SequencePtr> choices) { (void)choices; }
  // A leaving sequence ended here (abort, timeout, one-token output): nothing will be handed over.
  virtual void prefill_cancelled(const Sequence& sequence) { (void)sequence; }
  // … and what was told of it is not so: the KV that it began with has not come.
  virtual void prefill_broken(const Sequence& sequence) { (void)sequence; }
};

// Called with every plan that moves something.
using PlanWatcher = std::function<void(const BatchView& view, const BatchPlan& plan)>;
// … and with every waiting sequence whose KV a tier has loaded, since Sequence::load_s: so much that it can begin.
using LoadWatcher = std::function<void(const Sequence& sequence)>;

}  // namespace xpyd::batch
