// What a memory offers beside what an engine calls for every step (kv_memory.h): its prefix cache (KvCache), holds for
// peers that read or write a sequence's KV (KvLeases) and zero-copy hand-over (KvHandoff), which every memory has; room
// that is promised before it is taken (KvBlockReserver); KV that comes back from a tier (KvLoader).
//
// Thread safety: as KvMemory, unless it says more.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"

namespace xpyd::allocator {

struct KvReservation;  // kv_memory.h

using KvHandle = int32_t;  // one sequence's memory; valid from reserve/fork/adopt to free
inline constexpr KvHandle kNoKv = -1;

enum class KvState : uint8_t { free, active, cached, in_transfer };  // of a block, as KvStats counts them
inline constexpr int kKvStates = 4;

// What is kept of prompts, and where it lies.
class KvCache {
 public:
  // Cached tokens that are in this memory, at this moment. Any thread may call it.
  virtual int probe(std::span<const int32_t> tokens, uint64_t salt) const = 0;
  // Tokens that are written from now on are found by nobody else (paged, and tiers over it; a slot keeps what it has).
  virtual void keep_private(KvHandle) {}
  virtual void clear_prefix_cache() = 0;  // drops cached blocks that nobody uses; any thread
  // Of each block of the pool. What only other processes hold is free here. Any thread.
  virtual std::vector<KvState> states() const = 0;

 protected:
  ~KvCache() = default;
};

using KvLease = int32_t;  // valid from pin to unpin

class KvLeases {
 public:
  // Holds the blocks with tokens [token_begin, token_end) of those that the sequence has now, beyond its free(), until
  // unpin; the others go when it does. Contiguous memory holds its slot, vattention the rows up to token_end: a slot
  // gives back rows from its end. Before: 0 <= begin < end.
  virtual KvLease pin(KvHandle handle, int token_begin, int token_end) = 0;
  virtual void unpin(KvLease lease) = 0;

 protected:
  ~KvLeases() = default;
};

class KvBlockReserver {
 public:
  // Sets room for `n_tokens` more tokens after those written aside, as a number: nobody else gets it, and nothing is
  // evicted until this sequence's append() draws from it. trim() and free() give back what is left. False: so much is
  // not available, and nothing has changed.
  [[nodiscard]] virtual bool reserve_blocks(KvHandle handle, int n_tokens) = 0;
  virtual int reserved_blocks(KvHandle handle) const = 0;  // blocks that are set aside for it

 protected:
  ~KvBlockReserver() = default;
};

// A sequence on its way between two memories over one pool: block ids and the references that they
// carry. A plain value that owns references: it must be adopted or discarded exactly once.
//
// Between processes (block_ledger.h) it owns the giver's references alone, and travels as a copy:
// the giver discards its own once it knows that the other one has adopted, or will not. Until then
// the taker can adopt; later it is refused.
struct KvHandover {
  std::vector<int32_t> blocks;
  int tokens = 0;  // written
  // Between processes:
  std::vector<uint32_t> generations;  // of the blocks
  int giver = -1;                     // its slot in the ledger
  bool between_processes() const { return giver >= 0; }
};

// Zero-copy hand-off: a sequence goes from one memory to another over the same pool, and no byte moves. Both memories
// must be of the same scheme over the same pool.
class KvHandoff {
 public:
  // Gives the sequence up without giving up its blocks.
  virtual KvHandover hand_over(KvHandle handle) = 0;
  // Takes one over. kNoKv where there are no addresses for it now (vattention: no slot, or no mappings left), or where
  // the giver, another process, does not hold those blocks any more; the KV is given up then.
  virtual KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) = 0;
  // Ends a hand-over that nobody adopts; between processes the giver's, and nobody else's.
  virtual void discard(KvHandover handover) = 0;

 protected:
  ~KvHandoff() = default;
};

// KV of a sequence's first tokens that comes while its first step here computes, layer by layer: from a tier
// (KvLoader::arrival), or from another instance (disagg/pool/fetcher.h). That of the first layer is there.
//
// Thread safety: the engine's thread.
class KvArrival {
 public:
  virtual ~KvArrival() = default;
  // Returns when that layer's is there, or will not come: false.
  virtual bool wait(int layer) = 0;
  virtual bool is_whole() = 0;  // all of it is there. After wait() of the last layer
};

// What a memory with tiers below it (offloaded_memory.h) can do beside: a prompt's KV that is not there may be on its
// way.
class KvLoader {
 public:
  // Whether what reserve() found is in place. Once it says so, written_tokens() is what there is: a
  // failed read leaves less than reserve() promised. Until then: free() or wait.
  virtual bool ready(KvHandle handle) = 0;
  // From now on a load ends layer by layer, where it can. Before any use.
  virtual void load_by_layer() {}
  // Until it is ready(), what a step can wait for; null: not yet, or it comes whole. Who has it may append() to the
  // sequence and pin it; nothing is written() or handed over before it is whole. Once for each load.
  virtual std::shared_ptr<KvArrival> arrival(KvHandle handle) {
    (void)handle;
    return nullptr;
  }
  // Cached tokens that reserve() would promise: more than probe() where it would load some from a
  // tier. Any thread may call it.
  virtual int matched_tokens(std::span<const int32_t> tokens, uint64_t salt) const = 0;
  // Whether tokens [from, to) of a prompt of `tokens` are worth a load that is predicted to take load_s; what is not is
  // computed (promise() does not ask). Asked where OffloadOptions::load_by_cost says so. Before any use.
  using Worth = std::function<bool(int from, int to, int tokens, double load_s)>;
  virtual void loads_if(Worth worth) = 0;
  // reserve(), where nobody would compute: all that a tier has of the tokens is loaded, and Worth is not asked.
  virtual Result<KvReservation> reserve_loaded(std::span<const int32_t> tokens, uint64_t salt) = 0;
  // Lets what goes on in the background (copies to and from tiers) make progress: its ends are
  // noticed here and in the calls that change a sequence. The owner calls it now and then. True:
  // something was under way, so that memory may have come free.
  virtual bool poll() = 0;
  // Something is under way: until poll() says otherwise, time alone changes what there is.
  virtual bool copying() const = 0;
  // free() of a sequence that will be reserved again: what of it a tier has not is kept there
  // first, and waited for, since somebody wants the blocks now.
  virtual void swap_out(KvHandle handle) = 0;

 protected:
  ~KvLoader() = default;
};

}  // namespace xpyd::allocator
