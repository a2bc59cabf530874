// A TransferPlan lists the bytes that cross from one instance's KV to another's. Layouts and block sizes of the two
// sides may differ. Copies are coalesced as far as both layouts allow; their number is the number of descriptors of the
// transfer: about 2 * layers * blocks for layer_major, blocks for token_major.
//
// A ShardMap says which rank of one instance sends which rectangle of KV (layers x heads) to which rank of another. The
// shapes may differ: P with tp=a, pp=p to D with tp=b, pp=q, for any of them. Either side may hold copies of KV heads
// (tp > kv heads; MLA has one head).
//
// The plan follows from the two shapes, so both sides compute it, and a request sends only block ids (KvPlace).
//
// Thread safety: functions and plain values. Peers: the instance's thread.
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

// Plans the copies of a region between two views on one rank each. Replaces the contents of `plan`.
void plan_transfer(const KvView& source, const KvView& destination, const KvRegion& region, TransferPlan& plan);

// One rectangle from a source rank to a destination rank, in layer and head numbers of the whole model. If several
// source ranks hold the same head, different destinations ask different ones of them. Each byte has one source.
struct ShardMove {
  int source_rank = 0, destination_rank = 0;
  KvRect rect;
};

struct ShardMap {
  KvShards source, destination;
  std::vector<ShardMove> moves;  // by destination rank, then layers, then heads
};
// Requires: both shapes pass check_shards and belong to one model.
ShardMap map_shards(const KvShards& source, const KvShards& destination);

// Plans the copies of a region of one sequence between the ranks of two instances. Layers are numbers of the whole
// model; heads of `region` are ignored. source[r] and destination[r] are the sequence in the KV of rank r of either
// side.
void plan_sharded_transfer(const ShardMap& map, std::span<const KvView> source, std::span<const KvView> destination,
                           const KvRegion& region, TransferPlan& plan);

// Returns the blocks, or the slot, behind a registration.
KvPlace place_of(const KvMemory& memory, KvHandle kv, const RemoteKey& registration, int cached_tokens);
// Returns the bytes of tokens [token_begin, token_end) in all layers of every rank, in as few pieces as the layout
// allows. A registration covers them.
std::vector<MemoryRange> rows_of(const KvMemory& memory, KvHandle kv, int token_begin, int token_end);

// Returns the shape of a memory on one rank or several.
KvShards shards_of(const KvMemory& memory);

// Peers keeps the instances with which this one exchanges KV, and the shard maps for transfers to and from each.
class Peers {
 public:
  Peers(const KvMemory& memory, const KvTransport& transport) : memory_(memory), transport_(transport) {}
  void add(PeerId peer, const KvLayout& layout, const KvShards& shards);  // requires: the peer has the same model
  void erase(PeerId peer) { known_.erase(peer); }
  bool contains(PeerId peer) const { return known_.contains(peer); }
  bool empty() const { return known_.empty(); }

  // Plan the copies of a region (layers of the whole model) from a sequence here to a place at a peer, and from there.
  // The shapes of the two instances may differ. Requires: the peer is known.
  void plan_write(KvHandle kv, PeerId peer, const KvPlace& place, const KvRegion& region, TransferPlan& plan) const;
  void plan_read(PeerId peer, const KvPlace& place, KvHandle kv, const KvRegion& region, TransferPlan& plan) const;

 private:
  struct Peer {
    KvLayout layout;
    std::vector<KvLayout> of_ranks;
    ShardMap to, from;  // moves from here to the peer, and from the peer to here
  };
  std::vector<KvView> views(PeerId peer, const KvPlace& place) const;  // [n_ranks]

  const KvMemory& memory_;
  const KvTransport& transport_;
  std::unordered_map<PeerId, Peer> known_;
};

}  // namespace xpyd::disagg
