// The scheduler decides whose tokens are in the next step, and who holds memory. It owns the two queues of an engine:
// sequences that run and sequences that wait. Policies (batch/policies, batch/chunking) see snapshots of them and
// answer with a plan; apply() turns the plan into the entries of a step.
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

// A block that several sequences hold is charged to the one of them that will hold it longest.
class SharedBlocks {
 public:
  // views[i] is of running[runnable[i]]. Sets SequenceView::n_shared_blocks.
  void charge(std::span<SequenceView> views, std::span<const SequencePtr> running, std::span<const int> runnable,
              const KvMemory& memory);

 private:
  std::vector<int> by_output_left_;  // indices of views
  std::vector<uint64_t> charged_;    // [block]: the last charge_ in which it was counted
  uint64_t charge_ = 0;
};

// The steps that are under way when the next one is planned.
struct UnderWay {
  bool any = false;  // there is one
  // The model is a pipeline, and the CPU chooses its tokens. False: the model chooses those of a step under way.
  bool waves = false;
  int window = 1;  // steps that may be under way
  int stages = 1;  // that compute at the same time
};

class Scheduler {
 public:
  Scheduler(const EngineOptions& options, KvMemory& memory, EngineHooks* hooks, int n_layers, EngineStats& stats);

  // As Engine's.
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
  bool loading() const { return loading_ > 0; }  // KV of a waiting sequence is on its way from a tier
  void check_invariants() const;

  // Waiting sequences whose KV a tier has brought may start.
  void poll_loads();
  // Asks the policies what the next step is. Where memory that sequences hold early lets the plan preempt nobody, they
  // give it up first. False: a step that is under way has to end before the plan can be applied.
  [[nodiscard]] bool plan(double now, const UnderWay& under_way);
  // Carries the plan out. `entries`: the next step's. False: nothing runs, and nothing was changed either.
  bool apply(double now, const UnderWay& under_way, std::vector<StepEntry>& entries);

  // What a step gives. A sequence that is over, or leaves, is taken out of those that run, and leaves a null until
  // tidy(); one that is split off in this step joins them then.
  SequencePtr remove(const Sequence& sequence);
  void join(SequencePtr sequence) { arrived_.push_back(std::move(sequence)); }
  void tidy();
  // It gives its memory up, keeps in a tier what that takes, and waits for its turn again.
  void preempt(SequencePtr sequence);
  void release(Sequence& sequence);
  // f(sequence) takes those that end out of both queues; true: it has ended, and was taken.
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
  bool place(Sequence& sequence, int n_tokens, double now, std::vector<StepEntry>& entries);
  bool make_room();

  // Sequences as the policies see them. A sequence whose last token here is being chosen is not among them.
  struct Views {
    std::vector<SequenceView> running, waiting;
    std::vector<int> runnable;    // running[i] is of running_[runnable[i]]
    std::vector<int> admissible;  // waiting[i] is of waiting_[admissible[i]]
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
  int loading_ = 0;                   // of waiting_: their KV is on its way from a tier
  EngineChunks chunks_;
  std::vector<EngineChunks::Candidate> candidates_;
  Views views_;
  SharedBlocks shared_;
  BatchPlan plan_;
  struct {
    PlanWatcher plans;
    LoadWatcher loads;
  } watchers_;
};

}  // namespace xpyd::batch
