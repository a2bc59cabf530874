// What the conductor knows of its instances, and the view of it in seconds that policies see (placement.h): what it
// has placed there, what they report of their memory, their prefix caches and their speed.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "disagg/cache_directory.h"
#include "disagg/messages.h"
#include "disagg/placement.h"
#include "model/step_cost.h"

namespace xpyd::disagg {

// Steps of a simulated instance that have ended, and that it tells of later: of each sequence so many tokens, in all
// so many, and blocks that they have taken.
struct Unsaid {
  int steps = 0, blocks = 0;
  int64_t tokens = 0;
};

// What the conductor can ask about an instance at once. Any thread.
class InstanceProbe {
 public:
  virtual ~InstanceProbe() = default;
  virtual InstanceStats stats() const = 0;
  virtual KvStats kv() const = 0;
  // Prompt tokens that it would not have to compute; none: its cache is far away, and reported.
  virtual std::optional<int> promise(std::span<const int32_t> tokens, uint64_t salt) const = 0;
  virtual Unsaid unsaid() const { return {}; }
  // Another one when stats() or kv() may say something else; 0: whenever they are asked.
  virtual uint64_t version() const { return 0; }
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
  StepShape queued = {.steps = 0}, prompting = {.steps = 0};  // work of prompts not started, and not done
  double moved_s = 0;                                         // Clock: when a prompt last began or was done

  void place(const PlacedPrompt& prompt, double now_s);
  void begin(const PlacedPrompt& prompt, double now_s);
  void done(const PlacedPrompt& prompt, double now_s);
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
  uint64_t version = 0;  // of the probe, when these were read:
  StepCost cost;
  int available_blocks = 0, cached_blocks = 0;
  int in_directory = -1;  // its number there
  bool draining = false;
  double heard_s = 0;                                  // Clock
  std::deque<std::pair<double, int64_t>> recent = {};  // prompts placed: Clock, tokens to be computed
  int64_t recent_tokens = 0;                           // of these
};

class Scoreboard {
 public:
  // `chunk_tokens` of a step. `prior`: of instances that have not said what their steps take.
  Scoreboard(int chunk_tokens, const StepCost& prior) : chunk_tokens_(chunk_tokens), prior_(prior) {}

  void joined(Member& member) { member.in_directory = directory_.joined(member.info.capacity_blocks); }
  void left(const Member& member) { directory_.left(member.in_directory); }
  void heard(const Member& member, const CacheReport& report) { directory_.heard(member.in_directory, report); }
  size_t known_blocks(const Member& member) const { return directory_.blocks(member.in_directory); }

  // Of all that are not draining, valid until the next call; ids()[i] is who instances[i] is.
  ClusterView look(std::map<InstanceId, Member>& members, PromptHashes& prompt, double now_s);
  std::span<const InstanceId> ids() const { return ids_; }
  int promised(const Member& member, PromptHashes& prompt);  // tokens
  StepCost cost(const InstanceStats& stats) const;

  PlacedPrompt prompt(int tokens, int cached) const {
    return {tokens - cached, prompt_steps(tokens - cached, cached, chunk_tokens_)};
  }
  void placed(Member& member, const PlacedPrompt& prompt, double now_s);

 private:
  void refresh(Member& member) const;
  static constexpr double kRecentSeconds = 180;  // Preble's window
  void predict(InstanceView& view, const Member& member, int prompt_tokens, double now_s) const;

  const int chunk_tokens_;
  const StepCost prior_;
  CacheDirectory directory_;
  std::vector<InstanceView> views_;
  std::vector<InstanceId> ids_;
};

}  // namespace xpyd::disagg
