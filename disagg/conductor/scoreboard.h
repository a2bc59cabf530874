// What the conductor knows of its instances, and the view of it in seconds that policies see (placement.h): what it
// has placed there, what they report of their memory, their prefix caches and their speed.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "disagg/conductor/placement.h"
#include "disagg/messages.h"
#include "disagg/pool/directory.h"
#include "disagg/pool/fetch_policy.h"
#include "model/cost/step_cost.h"

namespace xpyd::disagg {

// What the conductor can ask about an instance at once. Any thread.
class InstanceProbe {
 public:
  virtual ~InstanceProbe() = default;
  virtual InstanceStats stats() const = 0;
  virtual KvStats kv() const = 0;
  // Prompt tokens that it would not have to compute; none: its cache is far away, and reported.
  virtual std::optional<int> promise(std::span<const int32_t> tokens, uint64_t salt) const = 0;
  // Seconds that it would take now to bring a token's KV here from `source`, beside what the links between the two
  // carry already; none: nobody sees these links.
  virtual std::optional<double> fetch_s_per_token(InstanceId) const { return {}; }
  // Null: there is none, or none yet.
  virtual std::shared_ptr<const BlockMap> block_map() const { return {}; }
  // Another one when stats() or kv() may say something else; null: whenever they are asked.
  virtual const std::atomic<uint64_t>* version() const { return nullptr; }
};

// A prompt, charged to the instance that computes it from its placement until it is done.
struct PlacedPrompt {
  int64_t tokens = 0;  // to be computed
  StepShape work = {.steps = 0};
};

// Load that was placed on an instance and is not done, as the conductor counts it.
struct PlacedLoad {
  int queued_requests = 0;                                    // to prefill, not started
  int64_t queued_tokens = 0;                                  // uncached prompt tokens, prompt not done
  int sequences = 0;                                          // to decode, not ended
  int64_t context_tokens = 0;                                 // of these, KV
  double lends_s = 0;                                         // predicted, of prefixes that others get from it
  StepShape queued = {.steps = 0}, prompting = {.steps = 0};  // work of prompts not started, and not done
  double moved_s = 0;                                         // Clock: when a prompt last began or was done
  double ended_s = 0;                                         // Clock: when a decode last ended
};

// How long the last decodes of an instance took, in seconds.
class DecodeTimes {
 public:
  void ended(double seconds);
  double mean() const;  // 0: none has ended
  double quantile(double q) const;

 private:
  static constexpr size_t kMost = 256;
  std::vector<float> last_;
  size_t next_ = 0;
};

// One instance that the conductor knows.
struct Member {
  InstanceInfo info;
  std::shared_ptr<InstanceProbe> probe;
  PlacedLoad load;
  std::set<AttemptId> decoding;  // placed here to decode, and not ended
  DecodeTimes decodes;
  size_t row = 0;         // the scoreboard's
  int in_directory = -1;  // its number there
  bool draining = false;
  double heard_s = 0;                                  // Clock
  std::deque<std::pair<double, int64_t>> recent = {};  // prompts placed: Clock, tokens to be computed
  int64_t recent_tokens = 0;                           // of these
};

// A look reads a row for each instance; what changes neither with time nor with the prompt is computed anew when
// something was placed there or its probe has another version.
class Scoreboard {
 public:
  // `chunk_tokens` of a step. `prior`: of instances that have not said what their steps take. `fetch_s_per_token`: of
  // KV between two instances whose links nobody sees, until it is measured; 0: they do not fetch.
  // `fades`: the prior is of this model and machine, and what no step confirms decays to it (cost_now()).
  Scoreboard(int chunk_tokens, const StepCost& prior, double fetch_s_per_token = 0, bool fades = false)
      : chunk_tokens_(chunk_tokens), prior_(prior.terms()), fetch_s_per_token_(fetch_s_per_token), fades_(fades) {}

  void joined(Member& member);  // it stays where it is
  void left(Member& member);
  void drain(Member& member, bool on);
  void heard(const Member& member, const CacheReport& report) { directory_.heard(member.in_directory, report); }
  // What every instance takes. Before: there is one.
  struct Smallest {
    int max_batch, block_tokens, capacity_blocks;  // the last two of the one with the least KV
  };
  const Smallest& smallest() const { return smallest_; }
  size_t known_blocks(const Member& member) const { return directory_.blocks(member.in_directory); }

  // Of all that are not draining, in the order in which they joined, valid until the next call; ids()[i] is who
  // instances[i] is.
  ClusterView look(PromptHashes& prompt, double now_s);
  std::span<const InstanceId> ids() const { return draining_ ? staying_ids_ : ids_; }
  // Of the prompt that was looked at last: what `here` could get of it, and from whom; nobody: holders is empty.
  struct Fetch {
    FetchView view;
    std::vector<InstanceId> holders;  // kMostHolders of those that have most
    int replicas = 0;                 // instances with more than there is here that compute prompts
  };
  Fetch fetch(const Member& here, PromptHashes& prompt);
  StepCost cost(const InstanceStats& stats) const { return StepCost(terms(stats)); }
  // Whom admission asks: 5 s after its last step what an instance's steps were fitted to begins to decay, by half each
  // 5 s, to the prior. Steps of a cold start, or of a busy machine, are no reason to refuse for ever. By the last look.
  StepCost cost_now(const Member& member, double now_s) const;
  // Until a prompt's first token, of which `measured_s` is what was predicted without decay.
  double ttft_s(const Member& member, int prompt_tokens, int cached, double measured_s, double now_s) const;

  PlacedPrompt prompt(int tokens, int cached) const {
    return {tokens - cached, prompt_steps(tokens - cached, cached, chunk_tokens_)};
  }
  void placed(Member& member, const PlacedPrompt& prompt, double now_s);
  void begun(Member& member, const PlacedPrompt& prompt, double now_s);
  void done(Member& member, const PlacedPrompt& prompt, double now_s);
  void decodes(Member& member, int sequences, int64_t tokens);  // so many more

 private:
  static constexpr double kRecentSeconds = 180;  // Preble's window
  static constexpr int kKnown = 32;              // steps
  static constexpr size_t kMostHolders = 4;
  struct Row {
    Member* member;
    const std::atomic<uint64_t>* version;
    uint64_t seen = 0;
    bool stale = true;
    double until_s = 0;      // Clock: … or later
    int64_t steps = 0;       // that it has done, and
    double confirmed_s = 0;  // Clock: when it did the last of them, or later
    int in_directory, block_tokens;
    StepCost::Terms terms = {};
    double queued_s = 0, prompting_s = 0, moved_s = 0, step_s = 0;
    double fetch_s_per_token = 0;
  };
  void find_smallest();
  void refresh(Row& row, InstanceView& view, double now_s);
  void predict(const Row& row, InstanceView& view, int prompt_tokens, double now_s) const;
  void predict_fetches(int prompt_tokens);
  const StepCost::Terms& terms(const InstanceStats& stats) const {
    return stats.cost == StepCost::Terms{} ? prior_ : stats.cost;
  }
  double trust(const Row& row, double now_s) const;  // of what was fitted, 0 to 1
  const StepCost::Terms& like_others(Role role, const InstanceStats& stats);

  const int chunk_tokens_;
  const StepCost::Terms prior_;
  const double fetch_s_per_token_;
  const bool fades_;
  CacheDirectory directory_;
  std::vector<Row> rows_;
  std::vector<InstanceView> views_, staying_;
  std::vector<InstanceId> ids_, staying_ids_;
  int draining_ = 0;
  Smallest smallest_ = {};
  StepCost::Terms measured_[3] = {};  // by role: what was last heard of one that has done kKnown steps
};

}  // namespace xpyd::disagg
