// KvMemory: who owns which KV bytes of one instance. Specification of every memory
// scheme.
//
// Physical memory is a BlockPool of equal blocks. A scheme decides how a sequence's tokens are laid
// on blocks: `paged` gives it a table of small blocks, `contiguous` one block, a slot, of the
// maximum length. All arithmetic above (policies, admission) is ceil(tokens / block_tokens) and
// holds for both.
//
// Thread safety: one KvMemory belongs to one thread, its instance's engine. The pool beneath may be
// shared by several instances (that is what makes the zero-copy hand-off possible) and locks for
// itself.
#pragma once

#include <climits>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/kv_layout.h"
#include "allocator/kv_tier_options.h"
#include "base/status.h"

namespace xpyd {

class BlockPool;
class Clock;
class Device;
class DeviceQueue;
struct KvShards;  // kv_shards.h

// What contiguous memory does with a prompt that begins like another sequence (vattention, slots).
enum class KvShare : uint8_t {
  off,
  alias,     // maps the other's whole page groups a second time, copies the rest (vattention only)
  takeover,  // goes on in the slot of a sequence that has ended
  copy,      // copies the KV
};

struct KvOptions {
  KvShape shape;
  KvOrder order = KvOrder::layer_major;
  size_t pool_bytes = 0;        // exactly this much is allocated; the tail below one block stays unused
  int block_tokens = 16;        // paged
  int max_sequence_tokens = 0;  // contiguous: tokens of a slot; both: the longest sequence allowed
  bool prefix_cache = true;     // paged; contiguous memory has no shareable block and never hits
  // vattention:
  size_t page_group_bytes = 65536;  // what one map call backs
  int max_sequences = 0;            // at once, in one memory: slots of virtual addresses
  int n_memories = 1;               // of this process, with such options: they share its mappings
  bool on_card = false;             // a card's addresses: its kernels count rows in 32 bits (KvRows), and the
                                    // system's limit of mappings is none there
  bool map_ahead = true;            // in the background, what the next steps need
  bool keep_idle = true;            // deferred reclamation; off where other memories share the pool
  double page_call_us = 0;          // PageGroupOptions
  bool guard = false;               // PageGroupOptions
  // The others' pool, too, is page groups, in order: the same pages as vattention's, where one
  // allocation has huge ones if the system grants them.
  bool pool_in_groups = false;
  bool lockstep = false;         // one of several memories that must decide alike (sharded.h): nothing
                                 // that goes on in the background may be seen in a decision
  KvShare share = KvShare::off;  // vattention; slots always take over
  KvTierOptions tiers;           // below this pool
  Clock* clock = nullptr;        // of the instance, for its tiers; null: the machine's
  Device* device = nullptr;      // where the pool is; null: the CPU
  DeviceQueue* queue = nullptr;  // of the instance, on that device, for its copies; null: the CPU's
};

// Blocks by state; free + active + cached + in_transfer == capacity, always. Of a pool that
// processes share (block_ledger.h): what this one holds, and what nobody holds.
struct KvStats {
  int capacity = 0;
  int free = 0;         // hold nothing
  int active = 0;       // referenced by a sequence
  int cached = 0;       // referenced by none, kept for a prefix hit, evictable
  int in_transfer = 0;  // held by a lease: being sent or received
  int elsewhere = 0;    // beside the capacity: only other processes hold them
  int block_tokens = 0;
  int64_t prefix_query_tokens = 0, prefix_hit_tokens = 0;  // cumulative, this KvMemory
  int64_t evictions = 0, cow_copies = 0;                   // cumulative blocks
  // vattention, cumulative: calls, and what of them the engine waited for.
  int64_t map_calls = 0, unmap_calls = 0, waited_jobs = 0;
  double map_wait_seconds = 0;
  // Where the pool's bytes are now. `written` counts a byte that several sequences share once.
  // capacity_bytes = written + reserved + internal + idle + external, always.
  int64_t capacity_bytes = 0;  // pool_bytes
  int64_t written_bytes = 0;   // KV of sequences
  int64_t reserved_bytes = 0;  // held for tokens that a sequence may yet have (contiguous, slots)
  int64_t internal_bytes = 0;  // held by a sequence because blocks are not smaller
  int64_t idle_bytes = 0;      // free, or cached and evictable
  int64_t external_bytes = 0;  // in no block: cannot be given to anybody
  int64_t mapped_bytes = 0;    // behind addresses (vattention; else capacity_bytes)
  int64_t mappings = 0;        // of these bytes, as the system counts them (VMAs); else one a rank
  KvTierStats tiers;
  int available() const { return free + cached; }  // blocks that an append can get
};

using KvHandle = int32_t;  // one sequence's memory; valid from reserve/fork/adopt to free
inline constexpr KvHandle kNoKv = -1;
using KvLease = int32_t;  // valid from pin to unpin

struct KvReservation {
  KvHandle handle = kNoKv;
  int cached_tokens = 0;  // KV of the first `cached_tokens` tokens is there already
  bool loading = false;   // … or on its way from a tier: not before ready()
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

class KvMemory {
 public:
  virtual ~KvMemory() = default;
  virtual const char* name() const = 0;
  virtual const KvLayout& layout() const = 0;
  // Where it lies: of every view's pool.
  virtual std::byte* base() const = 0;

  // Starts a sequence that is about to compute `tokens`. Attaches the longest cached prefix of full
  // blocks with the same salt, but never the last token (its logits are wanted). Contiguous takes
  // its slot here. Error `unavailable`: no slot now. Blocks for the uncached rest are taken by
  // append.
  virtual Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) = 0;

  // Whether what reserve() found is in place. Once it says so, written_tokens() is what there is: a
  // failed read leaves less than reserve() promised. Until then: free() or wait.
  virtual bool ready(KvHandle handle) {
    (void)handle;
    return true;
  }

  // Cached tokens that are in this memory, at this moment. Any thread may call it.
  virtual int probe(std::span<const int32_t> tokens, uint64_t salt) const = 0;

  // Cached tokens that reserve() would promise: more than probe() where it would load some from a
  // tier. Any thread may call it.
  virtual int promise(std::span<const int32_t> tokens, uint64_t salt) const { return probe(tokens, salt); }

  // Lets what goes on in the background (copies to and from tiers) make progress: its ends are
  // noticed here and in the calls that change a sequence. The owner calls it now and then. True:
  // something was under way, so that memory may have come free.
  virtual bool poll() { return false; }

  // Makes room for `n_tokens` more tokens after those written, evicting cached blocks as needed,
  // and makes the block of the next token private (copy-on-write). False: not enough blocks, and
  // nothing has changed.
  [[nodiscard]] virtual bool append(KvHandle handle, int n_tokens) = 0;

  // The KV of `tokens` (the next ones after those written) is in place: full blocks become
  // findable.
  virtual void written(KvHandle handle, std::span<const int32_t> tokens) = 0;

  // Room without written tokens is given back (an aborted step, a refused speculation).
  virtual void trim(KvHandle handle) = 0;

  // A second sequence with the same written tokens: paged shares blocks, contiguous copies to
  // another slot. Trims the first: its next write needs an append, which makes the shared last
  // block private.
  virtual Result<KvHandle> fork(KvHandle handle) = 0;

  // Gives the sequence up. Blocks that a lease or another sequence holds stay; full ones stay
  // cached.
  virtual void free(KvHandle handle) = 0;

  // The same of a sequence that will be reserved again: what of it a tier has not is kept there
  // first, and waited for, since somebody wants the blocks now.
  virtual void set_aside(KvHandle handle) { free(handle); }

  // Holds the blocks with tokens [token_begin, token_end) of those that the sequence has now,
  // beyond its free(), until unpin; the others go when it does. Contiguous memory holds its slot,
  // vattention the rows up to token_end: a slot gives back rows from its end. Before: 0 <= begin <
  // end.
  virtual KvLease pin(KvHandle handle, int token_begin, int token_end) = 0;
  KvLease pin(KvHandle handle) { return pin(handle, 0, INT_MAX); }  // all of them
  virtual void unpin(KvLease lease) = 0;

  // Zero-copy hand-off: gives the sequence up without giving up its blocks, and takes one over.
  // Both memories must be of the same scheme over the same pool. adopt gives kNoKv where there are
  // no addresses for it now (vattention: no slot, or no mappings left), or where the giver, another
  // process, does not hold those blocks any more; the KV is given up then. discard() ends a
  // hand-over that nobody adopts; between processes the giver's, and nobody else's.
  virtual KvHandover hand_over(KvHandle handle) = 0;
  virtual KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) = 0;
  virtual void discard(KvHandover handover) = 0;

  // Where the sequence's KV is. Valid until the next append, fork, trim or free of this handle.
  virtual KvView view(KvHandle handle) const = 0;

  // An instance on several ranks has its KV in as many places (sharded.h): one view for each, valid
  // as long; view() and base() are those of rank 0. shards(): which layers and heads are where;
  // null on one rank.
  virtual int n_ranks() const { return 1; }
  virtual const KvShards* shards() const { return nullptr; }
  virtual std::byte* rank_base(int rank) const {
    XPYD_CHECK(rank == 0);
    return base();
  }
  virtual KvView rank_view(KvHandle handle, int rank) const {
    XPYD_CHECK(rank == 0);
    return view(handle);
  }
  virtual int written_tokens(KvHandle handle) const = 0;
  virtual std::span<const int32_t> blocks(KvHandle handle) const = 0;
  // The next append must copy the last block first: one block more than the arithmetic says.
  virtual bool tail_shared(KvHandle handle) const = 0;

  virtual KvStats stats() const = 0;      // any thread
  virtual void clear_prefix_cache() = 0;  // drops cached blocks that nobody uses; any thread

  // Recounts everything from the tables (free + cached + active + in_transfer = capacity, every
  // reference accounted for, every index entry valid) and aborts on a difference. `complete`: this
  // memory is the only user of its pool, so that reference counts must be equal and not just large
  // enough.
  virtual void check_invariants(bool complete = true) const = 0;
};

// A pool that several memories can draw from. Bytes: options.pool_bytes, allocated and touched
// here. Before: plan_pool (kv_plan.h) takes the options. Error `unavailable`: the device has not
// that much memory.
Result<std::shared_ptr<BlockPool>> make_block_pool(const std::string& scheme, const KvOptions& options);

struct KvScheme {
  const char* name;
  std::unique_ptr<KvMemory> (*make)(std::shared_ptr<BlockPool> pool, const KvOptions& options);
  // Of one block of the pool under this scheme: tokens, and bytes (null: those of the tokens).
  int (*block_tokens)(const KvOptions& options);
  size_t (*block_bytes)(const KvOptions& options);
  bool contiguous;  // views have no block table: a sequence is one piece of addresses
  const char* source;
};

std::span<const KvScheme> kv_schemes();
const KvScheme* find_kv_scheme(const std::string& name);  // null: no such scheme

}  // namespace xpyd
