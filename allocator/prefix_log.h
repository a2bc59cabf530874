// CacheListener is told which blocks a prefix cache, or an offload tier, makes findable and which it loses. Blocks are
// named by their chained hash (prefix_hash.h).
//
// PrefixLog is a listener that collects the changes for a remote reader: a conductor that places requests by the cached
// prefixes of its workers (Dynamo's KV events, Mooncake's conductor).
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace xpyd::allocator {

// Where an instance keeps KV: in its prefix cache, or in an offload tier.
enum class Tier : uint8_t { device, host, disk };
inline constexpr int kTiers = 3;

// Each tier reports for itself, so one block may be in several. Called under the reporter's lock: an implementation
// must neither block nor call back.
class CacheListener {
 public:
  virtual ~CacheListener() = default;
  // `tokens` [block_tokens] follow the block `parent`. nullopt: it is a first block.
  virtual void stored(Tier tier, uint64_t hash, std::optional<uint64_t> parent, std::span<const int32_t> tokens) = 0;
  virtual void removed(Tier tier, uint64_t hash) = 0;
};

struct PrefixChanges {
  std::vector<uint64_t> stored, removed;
};

class PrefixLog final : public CacheListener {
 public:
  void stored(Tier tier, uint64_t hash, std::optional<uint64_t>, std::span<const int32_t>) override {
    note(tier, hash, 1);
  }
  void removed(Tier tier, uint64_t hash) override { note(tier, hash, -1); }
  // Returns the changes since the last call. A block that came and went in between is left out.
  PrefixChanges take(Tier tier) {
    PrefixChanges changes;
    std::lock_guard lock(mutex_);
    auto& pending = pending_[int(tier)];
    for (const auto& [hash, by] : pending) (by > 0 ? changes.stored : changes.removed).push_back(hash);
    pending.clear();
    return changes;
  }
  // For a reader that knows nothing yet: the next take() returns everything that is present.
  void begin_anew() {
    std::lock_guard lock(mutex_);
    for (int tier = 0; tier < kTiers; ++tier) {
      pending_[tier].clear();
      for (const uint64_t hash : there_[tier]) pending_[tier].emplace(hash, 1);
    }
  }

 private:
  void note(Tier tier, uint64_t hash, int by) {
    std::lock_guard lock(mutex_);
    if (by > 0)
      there_[int(tier)].insert(hash);
    else
      there_[int(tier)].erase(hash);
    auto& pending = pending_[int(tier)];
    auto at = pending.try_emplace(hash, 0).first;
    if ((at->second += by) == 0) pending.erase(at);
  }

  std::mutex mutex_;
  std::unordered_set<uint64_t> there_[kTiers];
  std::unordered_map<uint64_t, int> pending_[kTiers];  // by how much the presence has changed; never 0
};

}  // namespace xpyd::allocator
