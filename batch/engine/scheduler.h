// The scheduler decides which tokens the next step computes and which sequences hold memory. It owns the engine's two
// queues, running and waiting. Policies (batch/policies, batch/chunking) see snapshots of the queues and answer with a
// plan; apply() turns the plan into the entries of a step.
//
// Thread safety: the engine's thread.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/kv_memory.h"
#include "batch/engine/engine_parts.h"
#include "batch/sequence.h"
#include "batch/step_arrays.h"

namespace xpyd::batch {

// The steps under way when the next one is planned.
struct UnderWay {
  bool any = false;  // at least one step is under way
  // True: the model is a pipeline and the CPU samples. False: the model samples the tokens of a step under way.
  bool waves = false;
  int window = 1;  // the most steps that may be under way
  int stages = 1;  // stages that compute at the same time
};

class Scheduler {
 public:
  Scheduler(const EngineOptions& options, KvMemory& memory, EngineHooks* hooks, int n_layers, EngineStats& stats);

  // As in Engine.
  void submit(SequencePtr sequence);
  void adopt(SequencePtr sequence);
  EngineChunks& chunks() { return chunks_; }
  const EngineChunks& chunks() const { return chunks_; }
  void watch_plans(PlanWatcher watcher) { watchers_.plans = std::move(watcher); }
  void watch_loads(LoadWatcher watcher) { watchers_.loads = std::move(watcher); }
  std::vector<uint64_t> planned_requests() const;
  std::span<const SequencePtr> running() const { return running_; }
  const std::deque<SequencePtr>& waiting() const { return waiting_; }
  bool empty() const { return running_.empty() && waiting_.empty(); }
  int waiting_with_kv() const;
  int64_t pending_tokens() const;
  int blocks_wanted() const;
  bool loading() const { return loading_ > 0; }  // KV of a waiting sequence is being loaded from offload
  void check_invariants() const;

  // Lets waiting sequences start whose KV has been loaded from offload.
  void poll_loads();
  // Asks the policies for the next step. If the plan preempts sequences, memory that others got early is taken back
  // first and the plan is made again. False: a step under way must end before the plan can be applied.
  [[nodiscard]] bool plan(double now, const UnderWay& under_way);
  // Applies the plan and fills `entries` for the next step. False: nothing runs and nothing has changed.
  bool apply(double now, const UnderWay& under_way, std::vector<StepEntry>& entries);

  // remove() takes a sequence that ended or leaves from the running queue; its place is null until tidy(). A sequence
  // passed to join() enters the queue at tidy().
  SequencePtr remove(const Sequence& sequence);
  void join(SequencePtr sequence) { arrived_.push_back(std::move(sequence)); }
  void tidy();
  // Takes the sequence's memory (offload keeps what it can) and puts it back into the waiting queue.
  void preempt(SequencePtr sequence);
  void release(Sequence& sequence);
  // Calls f(sequence) for both queues. f returns true when it has taken and ended the sequence.
  template <class F>
  void drop_if(F&& f) {
    std::erase_if(running_, f);
    std::erase_if(waiting_, f);
  }

 private:
  SequenceView view_of(const Sequence& sequence) const;
  void look_at_running(const UnderWay& under_way);
  void look_at_waiting(double now);
  int choose_chunks(int block_tokens, const UnderWay& under_way);
  void make_plan(double now, const UnderWay& under_way);
  bool needs_settling(const UnderWay& under_way) const;
  void share_decodes(const UnderWay& under_way);
  void load_early(Sequence& sequence, int cached_tokens, double now);
  bool give_up_early();
  std::deque<SequencePtr>::iterator first_without_kv();
  bool reserve(Sequence& sequence, double now);
  bool fits_whole(const Sequence& sequence) const;
  bool place(Sequence& sequence, int n_tokens, double now, std::vector<StepEntry>& entries);
  bool make_room();

  // The sequences as policies see them. A sequence whose last token here is being chosen is left out.
  struct Views {
    std::vector<SequenceView> running, waiting;
    std::vector<int> runnable;    // running[i] belongs to running_[runnable[i]]
    std::vector<int> admissible;  // waiting[i] belongs to waiting_[admissible[i]]
  };
  Sequence& run_of(int index) const { return *running_[size_t(views_.runnable[size_t(index)])]; }
  Sequence& admit_of(int index) const { return *waiting_[size_t(views_.admissible[size_t(index)])]; }

  const EngineOptions& options_;
  const AdmissionRule* const admission_;
  KvMemory& memory_;
  EngineHooks* const hooks_;
  const int n_layers_;
  EngineStats& stats_;
  std::vector<SequencePtr> running_;  // oldest first; null only inside apply() and until tidy()
  // Order: sequences that keep KV, then preempted ones, then new ones by priority. Some of the last two groups hold
  // memory before their turn (Sequence::early).
  //
  // Progress: something can always move. Memory is held by running sequences, by waiting ones that keep KV, by waiting
  // ones that got it early, and by rooms of the hand-over, which end by themselves (receiver.h). If nothing runs and
  // the head does not fit, early memory is taken back first, from the last one on. Then the last sequence that keeps KV
  // is preempted, as long as two hold KV. A sequence alone always fits, because larger requests are refused. So a
  // sequence that keeps KV never waits behind one without: the head would wait for memory that nobody asks for.
  std::deque<SequencePtr> waiting_;
  // The last plan only admitted, and there was no memory: it had counted cached blocks twice (fits_whole()). The next
  // plan sees only the running sequences.
  bool refused_ = false;
  std::vector<SequencePtr> arrived_;  // new choices of this step; they join running_ at its end
  int loading_ = 0;                   // waiting sequences whose KV is being loaded from offload
  EngineChunks chunks_;
  std::vector<EngineChunks::Candidate> candidates_;
  Views views_;
  BatchPlan plan_;
  struct {
    PlanWatcher plans;
    LoadWatcher loads;
  } watchers_;
};

}  // namespace xpyd::batch
