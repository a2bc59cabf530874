// TransferPlan: which bytes cross from one instance's KV to another's. Layouts and block sizes may differ on the two
// sides; the result is a list of copies, coalesced as far as both layouts allow. Its length is the number of
// descriptors of the transfer: about 2 * layers * blocks for layer_major, blocks for token_major.
//
// Between ranks: which rank of one instance sends which rectangle of KV, layers x heads, to which rank of another
// whose shape may differ: P tp=a, pp=p to D tp=b, pp=q, for any of them, kv heads copied on either
// side (tp > kv heads; MLA, which has one) included.
//
// The plan follows from the two shapes alone: both sides compute it, and per request only block ids need to cross, in a
// KvPlace. Checksums of what crosses are end to end: computed from the sender's memory and again from the receiver's,
// whatever their layouts, block sizes and ranks, and the wire between.
//
// Thread safety: functions and plain values; Peers: the instance's thread.
#pragma once

#include <cstddef>
#include <span>
#include <unordered_map>
#include <vector>

#include "allocator/kv/kv_copy.h"
#include "allocator/kv/kv_shards.h"
#include "allocator/kv_memory.h"
#include "disagg/messages.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg {

void plan_transfer(const KvView& source, const KvView& destination, const KvRegion& region, TransferPlan& plan);

// One rectangle from a source rank to a destination rank, in numbers of the whole model. Of the ranks that hold the
// same head, one sends it to each destination, another to the next: every byte leaves from one place.
struct ShardMove {
  int source_rank = 0, destination_rank = 0;
  KvRect rect;
};

struct ShardMap {
  KvShards source, destination;
  std::vector<ShardMove> moves;  // by destination rank, then layers, then heads
};
// Before: both shapes pass check_shards and are of one model.
ShardMap map_shards(const KvShards& source, const KvShards& destination);

// The copies of a region of one sequence (tokens; layers in numbers of the whole model; heads are not looked at),
// between any of the ranks' regions. source[r], destination[r]: the sequence in the KV of rank r of either side.
void plan_sharded_transfer(const ShardMap& map, std::span<const KvView> source, std::span<const KvView> destination,
                           const KvRegion& region, TransferPlan& plan);

// The blocks, or the slot, that lie behind the window.
KvPlace place_of(const KvMemory& memory, KvHandle kv, const RemoteKey& registration, int cached_tokens);
// The bytes of tokens [token_begin, token_end), all layers, of every rank, in as few pieces as the
// layout allows: what a window opens.
std::vector<MemoryRange> rows_of(const KvMemory& memory, KvHandle kv, int token_begin, int token_end);

inline constexpr int kChecksumTokens = 64;

// XXH3-64 over the rows [layer][K|V][token][head] of each kChecksumTokens tokens from token_begin
// on. `views`: of each rank of `shards`; where several hold the same head, the `replica`th of them
// is read. Before: the CPU can read them.
std::vector<uint64_t> kv_checksums(std::span<const KvView> views, const KvShards& shards, int token_begin,
                                   int token_end, int replica = 0);
std::vector<uint64_t> kv_checksums(const KvMemory& memory, KvHandle kv, int token_begin, int token_end);
// Whether these are those of the KV here, of every copy of a head.
bool checksums_are(const KvMemory& memory, KvHandle kv, int token_begin, int token_end,
                   const std::vector<uint64_t>& expected);

// Of a memory on one rank, too.
KvShards shards_of(const KvMemory& memory);

// The instances that this one exchanges KV with, and what planning transfers with each takes.
class Peers {
 public:
  Peers(const KvMemory& memory, const KvTransport& transport) : memory_(memory), transport_(transport) {}
  // The error: it has another model, or an impossible shape.
  Status add(PeerId peer, const KvLayout& layout, const KvShards& shards);
  void erase(PeerId peer) { known_.erase(peer); }
  bool contains(PeerId peer) const { return known_.contains(peer); }
  bool empty() const { return known_.empty(); }

  // Copies of a region (layers of the whole model) of a sequence here to a place at a peer, or from
  // there, whatever the shapes of the two instances. Before, as for what follows: the peer is known.
  void plan_write(KvHandle kv, PeerId peer, const KvPlace& place, const KvRegion& region, TransferPlan& plan) const;
  void plan_read(PeerId peer, const KvPlace& place, KvHandle kv, const KvRegion& region, TransferPlan& plan) const;
  // Whether n_tokens of a sequence have a place at a peer where it says: it comes from another
  // process. The error: what is amiss.
  Status check_place(PeerId peer, const KvPlace& place, int n_tokens) const;

 private:
  struct Peer {
    KvLayout layout;
    std::vector<KvLayout> of_ranks;
    ShardMap to, from;  // who sends what to whom, from here and to here
  };
  std::vector<KvView> views(PeerId peer, const KvPlace& place) const;  // of each rank

  const KvMemory& memory_;
  const KvTransport& transport_;
  std::unordered_map<PeerId, Peer> known_;
};

}  // namespace xpyd::disagg
