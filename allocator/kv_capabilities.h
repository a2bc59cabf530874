// The capabilities of a memory beside the calls of every step (kv_memory.h). Every memory has a prefix cache (KvCache)
// and holds for peers that read or write a sequence's KV (KvLeases). Block tables also have zero-copy hand-over
// (KvHandoff). Some load KV from offload tiers (KvLoader).
//
// Thread safety: as KvMemory, unless a call says otherwise.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"

namespace xpyd::allocator {

struct KvReservation;  // kv_memory.h

// A sequence in one memory, from reserve, fork or adopt to free or hand_over. A call with a handle that is not in use
// aborts; a later sequence may get the same number.
using KvHandle = int32_t;
inline constexpr KvHandle kNoKv = -1;

enum class KvState : uint8_t { free, active, cached, in_transfer };  // of a block, as KvStats counts it
inline constexpr int kKvStates = 4;

// The prefix cache: the KV that is kept of prompts.
class KvCache {
 public:
  // Returns the cached tokens that are in this memory at this moment. Any thread.
  virtual int probe(std::span<const int32_t> tokens, uint64_t salt) const = 0;
  virtual void clear_prefix_cache() = 0;  // drops cached blocks that nobody uses; any thread
  // Returns the state of each block of the pool. Any thread.
  virtual std::vector<KvState> states() const = 0;

 protected:
  ~KvCache() = default;
};

using KvLease = int32_t;  // valid from pin to unpin

class KvLeases {
 public:
  // Holds the blocks with tokens [token_begin, token_end) of the sequence's present blocks until unpin, even after its
  // free(), so that a peer may read or write them. The other blocks go with free(). Contiguous memory holds the slot;
  // vattention holds the rows up to token_end, because a slot gives rows back from its end. Requires: 0 <= begin < end.
  virtual KvLease pin(KvHandle handle, int token_begin, int token_end) = 0;
  virtual void unpin(KvLease lease) = 0;

 protected:
  ~KvLeases() = default;
};

// A sequence on its way between two memories over one pool: block ids, and the references that go with them. A plain
// value that owns references: it must be adopted or discarded exactly once.
struct KvHandover {
  std::vector<int32_t> blocks;
  int tokens = 0;  // written tokens
};

// Zero-copy hand-over: a sequence moves from one memory to another, and no byte moves. Requires: both memories have
// block tables over the same pool.
class KvHandoff {
 public:
  // Ends the sequence here, and keeps its blocks for the taker.
  virtual KvHandover hand_over(KvHandle handle) = 0;
  // Takes a sequence over.
  virtual KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) = 0;
  // Ends a hand-over that nobody adopts.
  virtual void discard(KvHandover handover) = 0;

 protected:
  ~KvHandoff() = default;
};

// Implemented by a memory with offload tiers below it (offloaded_memory.h). The KV of a prompt's prefix may still be
// loading.
class KvLoader {
 public:
  // True once the KV that reserve() found is in place or lost; written_tokens() then says how much there is. After a
  // failed read that is less than reserve() announced. Until then the sequence may only wait or be freed.
  virtual bool ready(KvHandle handle) = 0;
  // Returns the matched tokens: the cached tokens that reserve() would announce. This is more than probe() if some
  // would be loaded from an offload tier. Any thread.
  virtual int matched_tokens(std::span<const int32_t> tokens, uint64_t salt) const = 0;
  // Makes progress on copies to and from offload tiers, and notices their ends. Calls that change a sequence do so too.
  // The owner calls it from time to time. True: something was under way, so memory may have become free.
  virtual bool poll() = 0;
  // True while something is under way: then waiting alone may change what is available.
  virtual bool copying() const = 0;

 protected:
  ~KvLoader() = default;
};

}  // namespace xpyd::allocator
