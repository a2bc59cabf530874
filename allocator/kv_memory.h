// KvMemory: who owns which KV bytes of one instance. Specification of every memory scheme.
//
// Physical memory is a KvPool of equal blocks. A scheme decides how a sequence's tokens are laid on blocks: `paged`
// gives it a table of small blocks, `contiguous` one block, a slot, of the maximum length. All arithmetic above
// (policies, admission) is ceil(tokens / block_tokens) and holds for both.
//
// Thread safety: one KvMemory belongs to one thread, its instance's engine. The pool beneath may be shared by several
// instances (that is what makes the zero-copy hand-off possible) and locks for itself.
#pragma once

#include <climits>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "allocator/kv/kv_layout.h"
#include "allocator/kv/kv_shards.h"
#include "allocator/kv_capabilities.h"
#include "allocator/offload_options.h"
#include "base/status.h"

namespace xpyd {
class Clock;
class Device;
class DeviceQueue;
}  // namespace xpyd

namespace xpyd::allocator {

class KvPool;     // kv_pool.h
struct PoolPlan;  // schemes.h

// What contiguous memory does with a prompt that begins like another sequence (vattention, slots).
enum class KvShare : uint8_t {
  off,
  alias,     // maps the other's whole page groups a second time, copies the rest (vattention only)
  takeover,  // goes on in the slot of a sequence that has ended
  copy,      // copies the KV
};

struct VattentionOptions {
  size_t page_group_bytes = 65536;  // what one map call backs
  int max_sequences = 0;            // at once, in one memory: slots of virtual addresses
  bool on_card = false;             // a card's addresses: its kernels count rows in 32 bits (KvRows), and the
                                    // system's limit of mappings is none there
  bool map_ahead = true;            // in the background, what the next steps need
  double page_call_us = 0;          // PageGroupOptions
  bool guard = false;               // PageGroupOptions
  KvShare share = KvShare::off;     // (slots always take over)
};

struct KvOptions {
  KvShape shape;
  KvOrder order = KvOrder::layer_major;
  size_t pool_bytes = 0;        // exactly this much is allocated; the tail below one block stays unused
  int block_tokens = 16;        // paged
  int max_sequence_tokens = 0;  // contiguous: tokens of a slot; both: the longest sequence allowed
  bool prefix_cache = true;     // contiguous memory has no shareable block and never hits
  bool radix = false;           // paged, token: it finds a prefix to the token (radix_tree.h), not to the block
  int proof_tokens = INT_MAX;   // PrefixIndex; a simulation's prompts are known by the first token of each block
  int n_memories = 1;           // of this process, with such options: they share its mappings
  bool keep_idle = true;        // slots keep what they hold; off where other memories share the pool
  int slot_chunk = 0;           // slots that get memory at a time, when one is first used; 0: all, at the start
  VattentionOptions vattention;
  // The others' pool, too, is page groups, in order: the same pages as vattention's, where one
  // allocation has huge ones if the system grants them.
  bool pool_in_groups = false;
  std::vector<std::shared_ptr<CacheListener>>
      listeners;                                        // are told of its prefix cache, where no other memory shares it
  OffloadOptions tiers;                                 // below this pool
  Clock* clock = nullptr;                               // of the instance, for its tiers; null: the machine's
  Device* device = nullptr;                             // where the pool is; null: the CPU
  std::vector<std::shared_ptr<std::byte>> rank_memory;  // [n_ranks] the pool's, made elsewhere; empty: it is allocated
  DeviceQueue* queue = nullptr;  // of the instance, on that device, for its copies; null: the CPU's
};

struct VattentionStats {  // cumulative: calls, and what of them the engine waited for
  int64_t map_calls = 0, unmap_calls = 0, waited_jobs = 0;
  double map_wait_seconds = 0;
};

// Blocks by state; free + active + cached + in_transfer == capacity, always. Of a pool that
// processes share (block_ledger.h): what this one holds, and what nobody holds.
struct KvStats {
  int capacity = 0;
  int free = 0;             // hold nothing
  int active = 0;           // referenced by a sequence
  int cached = 0;           // referenced by none, kept for a prefix hit, evictable
  int in_transfer = 0;      // held by a lease: being sent or received
  int reserved_blocks = 0;  // of the free and the cached ones: set aside for sequences (KvMemory::escrow)
  int elsewhere = 0;        // beside the capacity: only other processes hold them
  int block_tokens = 0;
  int64_t prefix_query_tokens = 0, prefix_hit_tokens = 0;  // cumulative, this KvMemory
  int64_t evictions = 0, cow_copies = 0;                   // cumulative blocks
  VattentionStats vattention;
  // Where the pool's bytes are now. `written` counts a byte that several sequences share once.
  // capacity_bytes = written + reserved + internal + idle + external, always.
  int64_t capacity_bytes = 0;  // pool_bytes
  int64_t written_bytes = 0;   // KV of sequences
  int64_t reserved_bytes = 0;  // held for tokens that a sequence may yet have (contiguous, slots)
  int64_t internal_bytes = 0;  // held by a sequence because blocks are not smaller
  int64_t idle_bytes = 0;      // free, or cached and evictable
  int64_t external_bytes = 0;  // in no block: cannot be given to anybody
  int64_t mapped_bytes = 0;    // behind addresses (vattention, slots in chunks; else capacity_bytes)
  int64_t mappings = 0;        // of these bytes, as the system counts them (VMAs); else one a rank
  OffloadStats tiers;
  // Blocks that an append can get for whom none are set aside.
  int available() const { return free + cached - reserved_blocks; }
};

struct KvReservation {
  KvHandle handle = kNoKv;
  int cached_tokens = 0;  // KV of the first `cached_tokens` tokens is there already
  bool loading = false;   // … or on its way from a tier: not before ready(), or its arrival()
};

class KvMemory {
 public:
  virtual ~KvMemory() = default;
  const char* name() const { return name_; }
  // Where it lies, from its beginning to its end; layout() is of all ranks together (KvPlaces::whole).
  const KvPlaces& places() const { return places_; }
  const KvLayout& layout() const { return places_.whole; }
  std::byte* base(int rank = 0) const { return places_.base(rank); }
  int n_ranks() const { return int(places_.ranks.size()); }
  const KvShards* shards() const { return places_.shards ? &*places_.shards : nullptr; }

  // Starts a sequence that is about to compute `tokens`. Attaches the longest cached prefix with the same salt, of full
  // blocks where the cache knows no more, but never the last token (its logits are wanted). Contiguous takes its slot
  // here. Error `unavailable`: no slot now. Blocks for the uncached rest are taken by append.
  virtual Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) = 0;

  // Makes room for `n_tokens` more tokens after those written, evicting cached blocks as needed, and makes the block of
  // the next token private (copy-on-write). False: not enough blocks, and nothing has changed.
  [[nodiscard]] virtual bool append(KvHandle handle, int n_tokens) = 0;

  // The KV of `tokens` (the next ones after those written) is in place: full blocks become findable.
  virtual void commit(KvHandle handle, std::span<const int32_t> tokens) = 0;

  // Room without written tokens is given back (an aborted step, a refused speculation).
  virtual void rollback(KvHandle handle) = 0;

  // A second sequence with the same written tokens: paged shares blocks, contiguous copies to another slot. Trims the
  // first: its next write needs an append, which makes the shared last block private.
  virtual Result<KvHandle> fork(KvHandle handle) = 0;

  // Gives the sequence up. Blocks that a lease or another sequence holds stay; full ones stay cached.
  virtual void free(KvHandle handle) = 0;

  // Where the sequence's KV is, on that rank. Valid until the next append, fork, trim or free of this handle.
  virtual KvView view(KvHandle handle, int rank = 0) const = 0;
  virtual int written_tokens(KvHandle handle) const = 0;
  virtual std::span<const int32_t> blocks(KvHandle handle) const = 0;
  // The next append must copy the last block first: one block more than the arithmetic says.
  virtual bool tail_shared(KvHandle handle) const = 0;

  virtual KvStats stats() const = 0;  // any thread
  // Recounts everything from the tables (free + cached + active + in_transfer = capacity, every reference accounted
  // for, every index entry valid) and aborts on a difference. `complete`: this memory is the only user of its pool, so
  // that reference counts must be equal and not just large enough.
  virtual void check_invariants(bool complete = true) const = 0;

  // Beside these: kv_capabilities.h says what each does.
  KvHandoff& handoff() { return offers_.handoff; }
  KvLeases& leases() { return offers_.leases; }
  KvCache& cache() { return offers_.cache; }
  const KvCache& cache() const { return offers_.cache; }
  KvLease pin(KvHandle handle, int token_begin, int token_end) { return leases().pin(handle, token_begin, token_end); }
  KvLease pin(KvHandle handle) { return pin(handle, 0, INT_MAX); }  // all of them
  void unpin(KvLease lease) { leases().unpin(lease); }
  int probe(std::span<const int32_t> tokens, uint64_t salt) const { return cache().probe(tokens, salt); }
  void keep_private(KvHandle handle) { cache().keep_private(handle); }
  void clear_prefix_cache() { cache().clear_prefix_cache(); }
  std::vector<KvState> states() const { return cache().states(); }
  // A memory that does not count room that is set aside takes it now.
  [[nodiscard]] bool reserve_blocks(KvHandle handle, int n_tokens) {
    return offers_.reserver ? offers_.reserver->reserve_blocks(handle, n_tokens) : append(handle, n_tokens);
  }
  int reserved_blocks(KvHandle handle) const {
    return offers_.reserver ? offers_.reserver->reserved_blocks(handle) : 0;
  }
  // Without tiers below, what there is is there.
  bool ready(KvHandle handle) { return !loader() || loader()->ready(handle); }
  void load_by_layer() {
    if (loader()) loader()->load_by_layer();
  }
  std::shared_ptr<KvArrival> arrival(KvHandle handle) { return loader() ? loader()->arrival(handle) : nullptr; }
  bool poll() { return loader() && loader()->poll(); }
  bool copying() const { return loader() && loader()->copying(); }
  int matched_tokens(std::span<const int32_t> tokens, uint64_t salt) const {
    return loader() ? loader()->matched_tokens(tokens, salt) : probe(tokens, salt);
  }
  void loads_if(KvLoader::Worth worth) {
    if (loader()) loader()->loads_if(std::move(worth));
  }
  Result<KvReservation> reserve_loaded(std::span<const int32_t> tokens, uint64_t salt) {
    return loader() ? loader()->reserve_loaded(tokens, salt) : reserve(tokens, salt);
  }
  void swap_out(KvHandle handle) { loader() ? loader()->swap_out(handle) : free(handle); }

 protected:
  // What the memory, or one beneath it, implements.
  struct Offers {
    KvHandoff& handoff;
    KvLeases& leases;
    KvCache& cache;
    KvBlockReserver* reserver = nullptr;  // null: room is taken, not set aside
    KvLoader* loader = nullptr;           // null: no tiers
  };
  KvMemory(const char* name, KvPlaces places, const Offers& offers)
      : name_(name), places_(std::move(places)), offers_(offers) {}

 private:
  KvLoader* loader() const { return offers_.loader; }

  const char* const name_;
  const KvPlaces places_;
  const Offers offers_;
};

// A pool on one rank, from which several memories can draw. Bytes: options.pool_bytes, allocated
// and touched here. Before: plan_pool (schemes.h, which has those on several ranks) takes the
// options. Error `unavailable`: the device has not that much memory.
Result<std::shared_ptr<KvPool>> make_block_pool(const std::string& scheme, const KvOptions& options);

// A row of the table of schemes, which stands in the scheme's own file: what it is called, how it
// is made, and what everybody else may know of it. Who asks what a scheme can do asks a field.
struct KvScheme {
  const char* name;
  const char* source;
  const char* unit;                                 // what it calls a block of its pool
  int (*block_tokens)(const KvOptions& options);    // tokens of one
  size_t (*block_bytes)(const KvOptions& options);  // its bytes; before: tokens of one >= 1
  Status (*check)(const KvOptions& options);        // what only this scheme asks of options
  Result<std::shared_ptr<KvPool>> (*make_pool)(const PoolPlan& plan);
  std::unique_ptr<KvMemory> (*make)(std::shared_ptr<KvPool> pool, const KvOptions& options);
  bool contiguous = false;    // views have no block table: a sequence is one piece of addresses
  bool whole_slots = false;   // a block is as long as the longest sequence
  bool prefix_index = false;  // its pool finds the blocks of a prefix
  // Its blocks have an address only where a memory maps them: instances on several ranks share no
  // pool, nor do processes.
  bool page_groups = false;
};

std::span<const KvScheme> kv_schemes();
const KvScheme* find_kv_scheme(const std::string& name);  // null: no such scheme

}  // namespace xpyd::allocator
