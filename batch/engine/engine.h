// The engine: schedule -> run -> emit, over one model and one KV memory. There is no other loop: colocated, prefill and
// decode instances are this engine, and differ in what their hooks do with a finished prompt.
//
// It has four parts. The Scheduler decides whose tokens are in the next step, and who holds memory; Steps are those
// that the model computes; Emission makes tokens, text and events of logits; Drafts guess tokens ahead.
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
#include "batch/engine/emission.h"
#include "batch/engine/engine_parts.h"
#include "batch/engine/scheduler.h"
#include "batch/engine/steps.h"
#include "model/model.h"

namespace xpyd::batch {

class Engine final {
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

  void watch_plans(PlanWatcher watcher) { scheduler_.watch_plans(std::move(watcher)); }
  void watch_loads(LoadWatcher watcher) { scheduler_.watch_loads(std::move(watcher)); }
  void watch_chunks(ChunkWatcher watcher) { scheduler_.chunks().watch(std::move(watcher)); }
  // Of the plan that is watched: whose its runs, admits and preempts are, in this order.
  std::vector<uint64_t> planned_requests() const { return scheduler_.planned_requests(); }
  // What a step takes, for the chunk policy; fitted to so many.
  void know_cost(const StepCost::Terms& cost, double steps_seen) { scheduler_.chunks().know_cost(cost, steps_seen); }

  int running() const { return int(scheduler_.running().size()); }
  int waiting() const { return int(scheduler_.waiting().size()); }
  int waiting_with_kv() const { return scheduler_.waiting_with_kv(); }
  int64_t pending_tokens() const { return scheduler_.pending_tokens(); }  // of those that wait and those that run
  int blocks_wanted() const { return scheduler_.blocks_wanted(); }        // by those that wait without any
  // f(request, handle) of each sequence that holds KV here. Between steps.
  template <class F>
  void each_holder(F&& f) const {
    const auto look = [&f](const SequencePtr& s) {
      if (s->kv != kNoKv) f(s->request->id, s->kv);
    };
    for (const SequencePtr& s : scheduler_.running()) look(s);
    for (const SequencePtr& s : scheduler_.waiting()) look(s);
    steps_.each_held(look);
  }
  bool idle() const { return scheduler_.empty() && steps_.empty(); }
  // A prompt may begin with a KvArrival: a step is one call on this thread, between whose layers it can wait.
  bool by_layer() const { return by_layer_; }
  // The time of its steps is that of stages, of waves that have ended.
  bool in_waves() const { return steps_.in_waves(); }
  const EngineStats& stats() const { return stats_; }
  void check_invariants() const { scheduler_.check_invariants(); }  // the order of those that wait

 private:
  bool iterate(double now);
  void charge(double now);
  void drop_ended(double now);
  void run();
  bool wait();
  void finish();
  void settle_arrivals(EngineStep& step);
  void kv_in_place(EngineStep& step);
  void take_chosen(EngineStep& step, double now);
  void choose(EngineStep& step, double now);
  void choose_checked(const StepEntry& entry, const float* row, double now);
  bool take_token(Sequence& sequence, int at, Sampled sampled, uint64_t row_hash, double now);
  void split(Sequence& sequence, const float* row, double now);
  void share_kv(std::vector<SequencePtr> choices);
  void retire(SequencePtr sequence);
  void end(SequencePtr sequence, FinishReason reason, const std::string& error, double now);

  KvMemory& memory_;
  const EngineOptions options_;
  const bool by_layer_;
  const size_t vocab_;
  const int n_layers_;
  Clock& clock_;
  EngineHooks* const hooks_;
  EngineStats stats_;
  Scheduler scheduler_;
  Steps steps_;
  Emission emission_;
  std::optional<Drafts> drafts_;
  double charged_s_ = 0;  // Clock: until when KV that is held is counted
};

}  // namespace xpyd::batch
