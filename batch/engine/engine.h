// The engine runs one loop, schedule -> run -> emit, over one model and one KV memory. Colocated, prefill and decode
// instances all use it. They differ only in what their hooks do with a finished prompt.
//
// It has three parts. The Scheduler decides which tokens the next step computes and which sequences hold memory. Steps
// are the steps that the model is computing. Drafts proposes tokens ahead. The engine itself turns logits into tokens,
// text and events.
//
// Thread safety: one thread calls everything. It owns the model, the memory and every sequence inside.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/kv_memory.h"
#include "base/clock.h"
#include "batch/engine/drafts.h"
#include "batch/engine/engine_parts.h"
#include "batch/engine/scheduler.h"
#include "batch/engine/steps.h"
#include "model/model.h"
#include "model/sampler.h"

namespace xpyd::batch {

class Engine final {
 public:
  // `hooks` may be null if no sequence leaves. All references and `hooks` must outlive the engine.
  Engine(Model& model, KvMemory& memory, EngineOptions options, Clock& clock, EngineHooks* hooks);

  // Takes a request from its start. It waits for its turn: first come, first served within a priority.
  void submit(SequencePtr sequence);
  // Takes a sequence whose first `computed` tokens already have their KV in sequence->kv.
  void adopt(SequencePtr sequence);
  // Runs one iteration. Cancelled and late sequences end here, between iterations. False: nothing could move.
  bool step();
  // Ends every sequence (shutdown). Waits for steps under way first.
  void end_all(FinishReason reason, const std::string& error);

  void watch_plans(PlanWatcher watcher) { scheduler_.watch_plans(std::move(watcher)); }
  void watch_loads(LoadWatcher watcher) { scheduler_.watch_loads(std::move(watcher)); }
  // Request ids of the plan that the PlanWatcher sees: its runs, then its admits, then its preempts.
  std::vector<uint64_t> planned_requests() const { return scheduler_.planned_requests(); }
  // Sets the cost model of steps for the chunk policy and for drafts.
  void know_cost(const StepCost::Terms& cost) { scheduler_.chunks().know_cost(cost); }

  int running() const { return int(scheduler_.running().size()); }
  int waiting() const { return int(scheduler_.waiting().size()); }
  int waiting_with_kv() const { return scheduler_.waiting_with_kv(); }
  int64_t pending_tokens() const { return scheduler_.pending_tokens(); }  // of waiting and running ones
  int blocks_wanted() const { return scheduler_.blocks_wanted(); }        // by waiting sequences that hold none
  bool idle() const { return scheduler_.empty() && steps_.empty(); }
  // True: steps are waves of a pipeline. Their seconds are those of the slowest stage, known when the wave ends.
  bool in_waves() const { return steps_.in_waves(); }
  const EngineStats& stats() const { return stats_; }
  ExpertLoad expert_load() const { return steps_.expert_load(); }
  void check_invariants() const { scheduler_.check_invariants(); }  // the order of the waiting queue

 private:
  bool iterate(double now);
  void charge(double now);
  void drop_ended(double now);
  void run();
  bool wait();
  void finish();
  void kv_in_place(EngineStep& step);
  void take_chosen(EngineStep& step, double now);
  void choose(EngineStep& step, double now);
  void choose_checked(const StepEntry& entry, const float* row, double now);
  Sampled draw(Sequence& sequence, const float* row);
  bool emit(Sequence& sequence, int at, Sampled sampled, uint64_t row_hash, double now);
  bool take_token(Sequence& sequence, int at, Sampled sampled, uint64_t row_hash, double now);
  void split(Sequence& sequence, const float* row, double now);
  void share_kv(std::vector<SequencePtr> choices);
  void retire(SequencePtr sequence);
  void end(SequencePtr sequence, FinishReason reason, const std::string& error, double now);

  KvMemory& memory_;
  const EngineOptions options_;
  const size_t vocab_;
  const int n_layers_;
  Clock& clock_;
  EngineHooks* const hooks_;
  EngineStats stats_;
  Scheduler scheduler_;
  Steps steps_;
  std::optional<Drafts> drafts_;
  SamplerScratch scratch_;
  double charged_s_ = 0;  // Clock: up to when held KV has been counted
};

}  // namespace xpyd::batch
