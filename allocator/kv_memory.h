// KvMemory: the owner of the KV bytes of one instance. This is the specification of every memory scheme.
//
// Physical memory is a KvPool of equal blocks. A scheme decides how a sequence's tokens are laid on blocks: `paged`
// gives a sequence a table of small blocks, `contiguous` gives it one block of the maximum length, a slot. Code above
// the memory (policies, admission) computes ceil(tokens / block_tokens), which holds for both.
//
// Thread safety: one KvMemory belongs to one thread, its instance's engine. Several instances may share the pool
// beneath, which makes the zero-copy hand-over possible; the pool locks for itself.
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

// How contiguous memory (vattention, slots) shares the KV of a prompt that begins like another sequence.
enum class KvShare : uint8_t {
  off,
  alias,     // maps the other's full page-group rows a second time, copies the rest (vattention only)
  takeover,  // continues in the slot of a sequence that has ended
  copy,      // copies the KV
};

struct VattentionOptions {
  size_t page_group_bytes = 65536;  // bytes that one map call backs
  int max_sequences = 0;            // of one memory at once: the number of slots of virtual addresses
  bool on_card = false;             // addresses of a card: its kernels count rows in 32 bits (KvRows), and its
                                    // mappings have no system limit
  bool map_ahead = true;            // maps in the background what the next steps need
  bool guard = false;               // PageGroupOptions
  KvShare share = KvShare::off;     // slots always take over
};

struct KvOptions {
  KvShape shape;
  KvOrder order = KvOrder::layer_major;
  size_t pool_bytes = 0;        // exactly this much is allocated; a tail below one block stays unused
  int block_tokens = 16;        // paged: tokens of a block
  int max_sequence_tokens = 0;  // contiguous: tokens of a slot; all: the longest sequence allowed
  bool prefix_cache = true;     // contiguous has no shareable block and never hits
  bool radix = false;           // paged: finds a prefix to the token (radix_tree.h), not to the block
  int proof_tokens = INT_MAX;   // PrefixIndex compares so many tokens of a block; 1 is enough for simulated prompts
  int n_memories = 1;           // memories of this process with such options; they share its limit of mappings
  int slot_chunk = 0;           // slots that get memory at a time, at first use; 0: all slots, at the start
  VattentionOptions vattention;
  // Allocates the pool of the other schemes as page groups too, mapped in order. The pages are then the same as
  // vattention's; a plain allocation has huge pages if the system grants them.
  bool pool_in_groups = false;
  std::vector<std::shared_ptr<CacheListener>> listeners;  // are told of its prefix cache, if no other memory shares it
  OffloadOptions tiers;                                   // the offload tiers below this pool
  Clock* clock = nullptr;                                 // the instance's, for offload tiers; null: the machine's
  Device* device = nullptr;                               // holds the pool; null: the CPU
  std::vector<std::shared_ptr<std::byte>> rank_memory;  // [n_ranks] the pool's, made elsewhere; empty: it is allocated
  DeviceQueue* queue = nullptr;  // the instance's, on that device, for its copies; null: the CPU's
};

struct VattentionStats {  // cumulative
  int64_t map_calls = 0, unmap_calls = 0;
  double map_wait_seconds = 0;  // of the engine: for calls of its own, and for the second thread
};

// Blocks by state. free + active + cached + in_transfer == capacity, always.
struct KvStats {
  int capacity = 0;
  int free = 0;         // have no content
  int active = 0;       // referenced by a sequence
  int cached = 0;       // referenced by none, kept for a prefix hit, evictable
  int in_transfer = 0;  // held by a lease or a hand-over: being sent or received
  int reserved_blocks = 0;  // reserved for sequences (reserve_blocks()), among the free and cached ones
  int block_tokens = 0;
  int64_t prefix_query_tokens = 0, prefix_hit_tokens = 0;  // cumulative, of this KvMemory
  int64_t evictions = 0, cow_copies = 0;                   // cumulative blocks
  VattentionStats vattention;
  // The state of the pool's bytes. `written` counts a byte that several sequences share once. capacity_bytes = written
  // + reserved + internal + idle + external, always.
  int64_t capacity_bytes = 0;  // pool_bytes; on several ranks, the bytes of all blocks
  int64_t written_bytes = 0;   // KV of sequences
  int64_t reserved_bytes = 0;  // held for tokens that a sequence may still get (contiguous, slots)
  int64_t internal_bytes = 0;  // held by sequences only because blocks are not smaller
  int64_t idle_bytes = 0;      // free, or cached and evictable
  int64_t external_bytes = 0;  // in no block, so never usable
  int64_t mapped_bytes = 0;    // has addresses (vattention, slots in chunks; otherwise capacity_bytes)
  int64_t mappings = 0;        // mappings of these bytes as the system counts them (VMAs); otherwise one per rank
  OffloadStats tiers;
  // Blocks that an append without reserved blocks can get.
  int available() const { return free + cached - reserved_blocks; }
};

struct KvReservation {
  KvHandle handle = kNoKv;
  int cached_tokens = 0;  // the KV of the first `cached_tokens` tokens is there already
  bool loading = false;   // or it is coming from an offload tier: wait for ready()
};

struct KvHeld {                     // what a sequence holds
  std::span<const int32_t> blocks;  // its block table, its slot, or its page-group rows
  int written = 0;                  // tokens
  int reserved = 0;                 // blocks reserved for it (reserve_blocks())
  bool tail_shared = false;  // the next append must copy the last block: it takes one more than the arithmetic says
};

class KvMemory {
 public:
  virtual ~KvMemory() = default;
  const char* name() const { return name_; }
  // The memory's places and layout, fixed when it is made. layout() is that of all ranks together (KvPlaces::whole).
  const KvPlaces& places() const { return places_; }
  const KvLayout& layout() const { return places_.whole; }
  std::byte* base(int rank = 0) const { return places_.base(rank); }
  int n_ranks() const { return int(places_.ranks.size()); }
  const KvShards* shards() const { return places_.shards ? &*places_.shards : nullptr; }

  // Starts a sequence that will compute `tokens`. Attaches the longest cached prefix with the same salt, in whole
  // blocks or to the token, but never the last token, because the model must compute its logits. Contiguous memory
  // takes its slot here. Other blocks are taken by append(). Error `unavailable`: no slot is free now.
  virtual Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) = 0;

  // Makes room for `n_tokens` more tokens after the written ones, and evicts cached blocks as needed. Makes the block
  // of the next token private (copy-on-write). False: there are not enough blocks, and the sequence is as before.
  [[nodiscard]] virtual bool append(KvHandle handle, int n_tokens) = 0;

  // Reserves the blocks that append(handle, n_tokens) would take, as a number. Others have so many fewer available, and
  // nothing is evicted until this sequence's appends draw on them. rollback() and free() give the rest back. False: not
  // so many are available, and nothing has changed. Contiguous memory takes its room at once.
  [[nodiscard]] virtual bool reserve_blocks(KvHandle handle, int n_tokens) { return append(handle, n_tokens); }

  // Commits `tokens`, which follow those written so far: the step or transfer that wrote their KV has ended. Full
  // blocks become findable.
  virtual void commit(KvHandle handle, std::span<const int32_t> tokens) = 0;

  // Rolls back to the written tokens: gives back all other room and reserved blocks (an aborted step, rejected drafts).
  virtual void rollback(KvHandle handle) = 0;

  // Makes a second sequence with the same written tokens. Paged memory shares the blocks; contiguous memory copies to
  // another slot. Rolls the first sequence back, so its next write needs an append, which makes the shared last block
  // private. Error `unavailable`: no slot is free now.
  virtual Result<KvHandle> fork(KvHandle handle) = 0;

  // Ends the sequence. Blocks that a lease or another sequence holds stay. Full blocks stay cached.
  virtual void free(KvHandle handle) = 0;

  // Where the sequence's KV is on that rank. Valid until the handle's next append, rollback, fork or free.
  virtual KvView view(KvHandle handle, int rank = 0) const = 0;
  virtual KvHeld held(KvHandle handle) const = 0;
  std::span<const int32_t> blocks(KvHandle handle) const { return held(handle).blocks; }
  int written_tokens(KvHandle handle) const { return held(handle).written; }
  bool tail_shared(KvHandle handle) const { return held(handle).tail_shared; }

  virtual KvStats stats() const = 0;  // any thread
  // Recounts everything from the tables (free + cached + active + in_transfer = capacity, every reference accounted
  // for, every index entry valid) and aborts on a difference. `complete`: this memory is the only user of its pool, so
  // that reference counts must be equal and not only large enough.
  virtual void check_invariants(bool complete = true) const = 0;

  // Forwards to the capabilities; kv_capabilities.h specifies each call.
  KvHandoff& handoff() {
    XPYD_CHECK(offers_.handoff, std::string(name_) + " hands no sequence over");
    return *offers_.handoff;
  }
  KvLeases& leases() { return offers_.leases; }
  KvCache& cache() { return offers_.cache; }
  const KvCache& cache() const { return offers_.cache; }
  KvLease pin(KvHandle handle, int token_begin, int token_end) { return leases().pin(handle, token_begin, token_end); }
  KvLease pin(KvHandle handle) { return pin(handle, 0, INT_MAX); }  // all its tokens
  void unpin(KvLease lease) { leases().unpin(lease); }
  int probe(std::span<const int32_t> tokens, uint64_t salt) const { return cache().probe(tokens, salt); }
  void clear_prefix_cache() { cache().clear_prefix_cache(); }
  std::vector<KvState> states() const { return cache().states(); }
  // Without offload tiers, everything is ready, and nothing more can be loaded.
  bool ready(KvHandle handle) { return !loader() || loader()->ready(handle); }
  bool poll() { return loader() && loader()->poll(); }
  bool copying() const { return loader() && loader()->copying(); }
  int matched_tokens(std::span<const int32_t> tokens, uint64_t salt) const {
    return loader() ? loader()->matched_tokens(tokens, salt) : probe(tokens, salt);
  }

 protected:
  // Implemented by the memory itself, or by one beneath it.
  struct Offers {
    KvLeases& leases;
    KvCache& cache;
    KvHandoff* handoff = nullptr;  // null: contiguous memory, which the options never let share a pool
    KvLoader* loader = nullptr;    // null: no offload tiers
  };
  KvMemory(const char* name, KvPlaces places, const Offers& offers)
      : name_(name), places_(std::move(places)), offers_(offers) {}

 private:
  KvLoader* loader() const { return offers_.loader; }

  const char* const name_;
  const KvPlaces places_;
  const Offers offers_;
};

// Makes a pool on one rank, from which several memories can draw. Allocates and touches options.pool_bytes. Requires:
// plan_pool() (schemes.h) accepts the options. Error `unavailable`: the device has not that much memory. For several
// ranks see schemes.h.
Result<std::shared_ptr<KvPool>> make_block_pool(const std::string& scheme, const KvOptions& options);

// A row of the table of schemes; each scheme's own file has its row. It says how the scheme is called and made, and
// what others may know of it. Code that asks what a scheme can do asks a field here.
struct KvScheme {
  const char* name;
  const char* source;
  const char* unit;                                 // its name for a block of its pool
  int (*block_tokens)(const KvOptions& options);    // tokens of a block
  size_t (*block_bytes)(const KvOptions& options);  // bytes of a block; requires: block_tokens >= 1
  Status (*check)(const KvOptions& options);        // checks that only this scheme makes
  Result<std::shared_ptr<KvPool>> (*make_pool)(const PoolPlan& plan);
  std::unique_ptr<KvMemory> (*make)(std::shared_ptr<KvPool> pool, const KvOptions& options);
  bool contiguous = false;    // views have no block table: a sequence has contiguous addresses
  bool whole_slots = false;   // a block is as long as the longest sequence
  bool prefix_index = false;  // its pool has a prefix cache
  bool page_groups = false;   // a block has an address only where a memory maps it
};

std::span<const KvScheme> kv_schemes();
const KvScheme* find_kv_scheme(const std::string& name);  // null: no such scheme

}  // namespace xpyd::allocator
