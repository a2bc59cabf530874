// The engine: plan -> forward -> emit, over one model and one KV memory. There is no other loop:
// colocated, prefill and decode instances are this engine, and differ in what their hooks do with a
// finished prompt.
//
// Thread safety: one thread calls everything. It owns the model, the memory and every sequence inside.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "allocator/kv_memory.h"
#include "base/clock.h"
#include "batch/drafter.h"
#include "batch/engine/engine_chunks.h"
#include "batch/policies/admission.h"
#include "batch/policies/policy.h"
#include "batch/sequence.h"
#include "batch/step_arrays.h"
#include "model/cost/step_cost.h"
#include "model/model.h"

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
  double wait_seconds = 0;        // in forward() or waiting for a step to end
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

class Engine final : private LayerObserver {
 public:
  Engine(Model& model, KvMemory& memory, EngineOptions options, Clock& clock, EngineHooks* hooks);

  // A request from the start: it waits for its turn (FCFS within a priority).
  void submit(SequencePtr sequence);
  // A sequence whose first `computed` tokens have their KV in sequence->kv already.
  void adopt(SequencePtr sequence);
  // One iteration. False: nothing could move. Cancelled and late sequences end here, between iterations.
  bool step();
  // Ends every sequence (shutdown).
  void end_all(FinishReason reason, const std::string& error);

  // Called with every plan that moves something.
  using PlanWatcher = std::function<void(const BatchView& view, const BatchPlan& plan)>;
  void watch_plans(PlanWatcher watcher) { watcher_ = std::move(watcher); }
  // Of that plan: whose its runs, admits and preempts are, in this order.
  std::vector<uint64_t> planned_requests() const;
  // … and with every waiting sequence whose KV a tier has loaded, since Sequence::load_s: so much that it can begin.
  using LoadWatcher = std::function<void(const Sequence& sequence)>;
  void watch_loads(LoadWatcher watcher) { load_watcher_ = std::move(watcher); }
  // … and with every decision of the chunk policy, when its step begins.
  void watch_chunks(ChunkWatcher watcher) { chunks_.watcher = std::move(watcher); }
  // What a step takes, for the chunk policy; fitted to so many.
  void know_cost(const StepCost::Terms& cost, double steps_seen);

  int running() const { return int(running_.size()); }
  int waiting() const { return int(waiting_.size()); }
  int waiting_with_kv() const;
  int64_t pending_tokens() const;  // to compute, of those that wait and those that run
  int blocks_wanted() const;       // by those that wait without any
  // f(request, handle) of each sequence that holds KV here. Between steps.
  template <class F>
  void each_holder(F&& f) const {
    const auto look = [&f](const auto& sequences) {
      for (const SequencePtr& s : sequences)
        if (s->kv != kNoKv) f(s->request->id, s->kv);
    };
    look(running_), look(waiting_);
    for (const auto& step : under_way_) look(step->ended);
  }
  bool idle() const { return running_.empty() && waiting_.empty() && under_way_.empty(); }
  // A prompt may begin with a KvArrival: a step is one call on this thread, between whose layers it can wait.
  bool by_layer() const { return by_layer_; }
  // The time of its steps is that of stages, of waves that have ended.
  bool in_waves() const { return window_ > 1 && !model_.chooses(); }
  const EngineStats& stats() const { return stats_; }
  void check_invariants() const;  // the order of those that wait

 private:
  using Entry = StepEntry;
  struct Step {
    std::vector<Entry> entries;
    std::vector<SequencePtr> ended;  // those whose last step it is: their KV is in use until it ends
    std::vector<float> logits;       // [n_logits, vocab], of a wave
    StepShape shape;
    int layers_told = 0;  // to the hooks
  };

  void layer_reads(int layer) override;
  void layer_done(int layer) override;
  void drop_ended(double now);
  void load_early(Sequence& sequence, int cached_tokens);
  void poll_loads();
  bool give_up_early();
  void make_plan();
  int choose_chunks(const KvStats& kv);
  void keep_chunks();
  void charge_shared_blocks();
  void share_decodes();
  bool needs_settling() const;
  bool apply_plan(double now);
  bool make_room();
  void charge(double now);
  std::deque<SequencePtr>::iterator first_without_kv();
  bool append(const Sequence& sequence, int n_tokens);
  bool reserve(Sequence& sequence);
  bool place(SequencePtr& sequence, int n_tokens, double now);
  static StepEntry entry_of(Sequence& sequence, int n_tokens);
  void add_drafts(int spare_rows);
  void keep_hidden(const Entry& entry) const;
  StepInput gather();
  bool chosen_by_model() const;
  void forward();
  void begin();
  bool iterate(double now);
  bool look_at_waves();
  bool wait();
  void finish();
  void choose(Step& step, const float* logits, double now);
  void tell_layers(Step& step, int layers);
  void settle_arrivals(Step& step);
  void kv_in_place(Step& step);
  void tidy(Step& step);
  void open_choice(Sequence& sequence, int choice);
  void choose_checked(const Entry& entry, const float* logits, double now);
  bool take_token(Sequence& sequence, int at, Sampled sampled, uint64_t row_hash, double now);
  void split(Sequence& sequence, const float* logits, double now);
  SequencePtr remove(const Sequence& sequence);
  bool accept_token(Sequence& sequence, size_t at, Sampled sampled, uint64_t row_hash, double now);
  void share_kv(std::vector<SequencePtr> choices);
  void preempt(SequencePtr sequence);
  void release(Sequence& sequence);
  void retire(SequencePtr sequence);
  void end(SequencePtr sequence, FinishReason reason, const std::string& error, double now);
  SequenceView view_of(const Sequence& sequence) const;
  BatchView view_of(std::span<const SequenceView> running, int available_blocks, const KvStats& kv,
                    int step_tokens) const;

  Model& model_;
  KvMemory& memory_;
  EngineOptions options_;
  const AdmissionRule* admission_;
  const int window_;  // steps under way
  const bool by_layer_;
  Clock& clock_;
  EngineHooks* hooks_;

  std::vector<SequencePtr> running_;  // oldest first; null only inside apply_plan and finish
  // Those that keep KV, then preempted ones, then new ones by priority. Some of those that keep none hold memory before
  // their turn (Sequence::early).
  //
  // Something can always move. Memory is held by those that run, by those that keep KV, by those that hold some early,
  // and by rooms of the hand-over, which end by themselves (receiver.h). Where nothing runs and the first one does not
  // fit, the early ones give theirs up, the last of them first; then the last one that keeps KV is preempted, as long
  // as two hold some. One that is alone fits, since no request is taken that does not. So nobody who keeps KV may stand
  // behind one who has none: that one would wait for memory which nobody is asked for.
  std::deque<SequencePtr> waiting_;
  std::vector<SequencePtr> arrived_;  // split off in this step, join running_ at its end

  // Reused from step to step.
  std::vector<SequenceView> running_views_, waiting_views_;
  BatchPlan plan_;
  EngineChunks chunks_;
  std::unique_ptr<Drafter> drafter_;  // null: no drafts
  std::vector<DraftWish> wishes_;
  DraftCredit draft_credit_;
  PlanWatcher watcher_;
  LoadWatcher load_watcher_;
  std::vector<int> by_output_left_;  // indices of running_views_
  std::vector<uint64_t> charged_;    // [block]: the last charge_ in which it was counted
  uint64_t charge_ = 0;
  std::vector<int> runnable_;    // running_views_[i] is of running_[runnable_[i]]
  std::vector<int> admissible_;  // waiting_views_[i] is of waiting_[admissible_[i]]
  int loading_ = 0;              // of waiting_: their KV is on its way from a tier
  std::unique_ptr<Step> next_ = std::make_unique<Step>();
  std::deque<std::unique_ptr<Step>> under_way_;  // oldest first
  std::vector<std::unique_ptr<Step>> spare_;     // their memory
  StepArrays arrays_;
  std::vector<float> logits_;
  std::vector<float> hidden_;  // HiddenStates::rows, of a model with a multi-token head
  std::vector<Draw> draws_;
  std::vector<Chosen> chosen_;
  SamplerScratch sampler_scratch_;
  double charged_s_ = 0;  // Clock: until when KV that is held is counted
  EngineStats stats_;
};

}  // namespace xpyd::batch
