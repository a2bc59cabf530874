// The cluster as the conductor sees it. ClusterState has its instances, when each one was last heard, and which ones
// are silent. Its Scoreboard gives policies a view of them in counts and seconds (placement.h).
//
// Thread safety: none; the conductor locks.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "disagg/conductor/conductor_options.h"
#include "disagg/pool/directory.h"

namespace xpyd::disagg {

// InstanceProbe answers the conductor's questions about an instance without waiting. Thread safety: any thread.
class InstanceProbe {
 public:
  virtual ~InstanceProbe() = default;
  virtual InstanceStats stats() const = 0;
  // Returns the prompt tokens that it need not compute; none: its cache is in another process and is known by reports.
  virtual std::optional<int> matched_tokens(std::span<const int32_t> tokens, uint64_t salt) const = 0;
  // Returns the seconds that fetching one token's KV from `source` would take now, beside the present load of the
  // links; none: the links cannot be observed.
  virtual std::optional<double> fetch_s_per_token(InstanceId) const { return {}; }
  // Changes when stats() may have changed; null: assume that every call differs.
  virtual const std::atomic<uint64_t>* version() const { return nullptr; }
};

// A prompt that is charged to the instance that computes it, from placement until it is done.
struct PlacedPrompt {
  int64_t tokens = 0;  // to be computed
  StepShape work = {.steps = 0};
};

// The load placed on an instance and not done, as the conductor counts it.
struct PlacedLoad {
  int queued_requests = 0;                                    // prompts not started
  int64_t queued_tokens = 0;                                  // uncached tokens of prompts not done
  int sequences = 0;                                          // sequences that decode or will, not ended
  int64_t context_tokens = 0;                                 // KV tokens of these sequences
  StepShape queued = {.steps = 0}, prompting = {.steps = 0};  // work of prompts not started; not done
  double moved_s = 0;                                         // Clock: when a prompt last began or was done
};

// One instance as the conductor knows it.
struct Member {
  InstanceInfo info;
  std::shared_ptr<InstanceProbe> probe;
  PlacedLoad load;
  std::set<AttemptId> decoding;  // placed here to decode, not ended
  double decode_s = 0;           // moving mean of the duration of its decodes; 0: none has ended
  size_t row = 0;                // index into the scoreboard's rows
  int in_directory = -1;         // its number in the cache directory
  bool draining = false;
  double heard_s = 0;  // Clock
};

// Combines what the conductor has placed on its instances with what they report about memory, prefix cache and speed.
// look() reads one row for each instance. The part of a row that depends on neither time nor prompt is recomputed only
// after a placement there, or when its probe has a new version.
class Scoreboard {
 public:
  // `chunk_tokens`: tokens of a prompt in one step. `prior`: step cost of instances that have not reported one.
  // `fetch_s_per_token`: cost of fetching KV over links that cannot be observed, until it is measured; 0: instances do
  // not fetch.
  Scoreboard(int chunk_tokens, const StepCost& prior, double fetch_s_per_token = 0)
      : chunk_tokens_(chunk_tokens), prior_(prior.terms()), fetch_s_per_token_(fetch_s_per_token) {}

  void joined(Member& member);  // `member` must not move until left()
  void left(Member& member);
  void drain(Member& member, bool on);  // look() leaves out draining instances
  void heard(const Member& member, const CacheReport& report) { directory_.heard(member.in_directory, report); }
  size_t known_blocks(const Member& member) const { return directory_.blocks(member.in_directory); }

  // Returns a view of all instances that are not draining, in the order in which they joined. It is valid until the
  // next call. ids()[i] is the id of instances[i].
  ClusterView look(PromptHashes& prompt, double now_s);
  std::span<const InstanceId> ids() const { return draining_ ? staying_ids_ : ids_; }
  // Returns what `here` could fetch of the last look()'s prompt, and from which holder.
  struct Fetch {
    FetchView view;
    InstanceId holder = -1;  // the first of those that have most; -1: no instance has more than `here`
  };
  Fetch fetch(const Member& here, PromptHashes& prompt);
  // Predicts a step of this instance that has the last look()'s prompt, of `tokens` in all, beside its batch and the
  // prompts placed there. kNever: one step does not hold all of them.
  double joined_step_s(const Member& member, int tokens) const;
  StepCost cost(const InstanceStats& stats) const { return StepCost(terms(stats)); }

  PlacedPrompt prompt(int tokens, int cached) const {
    return {tokens - cached, prompt_steps(tokens - cached, cached, chunk_tokens_)};
  }
  // A prompt is placed on the instance, has begun there, and is done. Each call belongs to exactly one placed().
  void placed(Member& member, const PlacedPrompt& prompt, double now_s);
  void begun(Member& member, const PlacedPrompt& prompt, double now_s);
  void done(Member& member, const PlacedPrompt& prompt, double now_s);
  void decodes(Member& member, int sequences, int64_t tokens);  // adds to the load

 private:
  static constexpr int kKnown = 32;  // steps after which a fitted cost is trusted
  struct Row {
    Member* member;
    const std::atomic<uint64_t>* version;
    uint64_t seen = 0;
    bool stale = true;
    int in_directory, block_tokens;
    StepCost::Terms terms = {};
    double queued_s = 0, prompting_s = 0, moved_s = 0, step_s = 0;
    double fetch_s_per_token = 0;
  };
  void refresh(Row& row, InstanceView& view);
  void predict(const Row& row, InstanceView& view, int prompt_tokens, double now_s) const;
  void predict_fetches(int prompt_tokens);
  const StepCost::Terms& terms(const InstanceStats& stats) const {
    return stats.cost == StepCost::Terms{} ? prior_ : stats.cost;
  }
  const StepCost::Terms& like_others(Role role, const InstanceStats& stats);

  const int chunk_tokens_;
  const StepCost::Terms prior_;
  const double fetch_s_per_token_;
  CacheDirectory directory_;
  std::vector<Row> rows_;
  std::vector<InstanceView> views_, staying_;
  std::vector<InstanceId> ids_, staying_ids_;
  int draining_ = 0;
  StepCost::Terms measured_[3] = {};  // by role: the last cost from an instance with kKnown steps
};

class ClusterState {
 public:
  explicit ClusterState(ConductorContext& context);

  InstanceId new_id() { return ++last_id_; }
  // Adds an instance, and tells it and all others about each other.
  void join(InstanceInfo info, std::shared_ptr<InstanceProbe> probe);
  // Removes an instance and tells the others. Returns false if it is unknown.
  bool leave(InstanceId id);
  // Notes that a message from the instance has just arrived. Returns false if it is unknown.
  bool heard(InstanceId from);
  // Returns the instances that have sent nothing for a lease. Requires: it is called at least every quarter of a lease.
  // If the gap is longer, this process has slept and has messages to read, so that time does not count as silence.
  std::vector<InstanceId> silent();

  const Member* find(InstanceId id) const;
  Member* find(InstanceId id) { return const_cast<Member*>(std::as_const(*this).find(id)); }
  Member& at(InstanceId id) { return members_.at(id); }
  std::map<InstanceId, Member>& members() { return members_; }
  const std::map<InstanceId, Member>& members() const { return members_; }
  // See Service::trouble().
  std::string trouble() const;

  Scoreboard& board() { return board_; }
  const Scoreboard& board() const { return board_; }

 private:
  ConductorContext& context_;
  std::map<InstanceId, Member> members_;
  Scoreboard board_;
  double ticked_s_ = 0;  // Clock: last call of silent(); 0: none yet
  InstanceId last_id_ = -1;
};

}  // namespace xpyd::disagg
