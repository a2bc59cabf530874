// KvRoom is the only part of an instance that reserves KV outside the engine: for prompts that leave (reservation.h),
// for KV that arrives (receiver.h) and for prefixes that are fetched (pool/fetcher.h). It reserves all tokens or none.
// If an offload tier holds a part, that part is loaded first, and the prompt holds only the loaded part meanwhile. If
// the load ends and there is no room for the rest, the part is given back at once, because others could wait for its
// memory for ever. The loaded blocks stay cached until their memory is needed.
//
// An attempt that holds room at a decode instance (D) never waits for memory at a prefill instance (P). No instance is
// both. All waits therefore go from P to D and cannot form a circle:
//   push          A prompt asks D when it begins at P. It begins only if all of it fits, beside what the prompts that
//                 have begun still need (batch/engine/scheduler.h). With --reservation escrow P's room is held first.
//   pull          A prompt asks D when it is computed.
//   zero-copy     D takes over P's blocks and is asked for no room.
//   decode_first  All waits go from D to P: an attempt that holds room at P already has D's room.
// Two orders in one cluster could form a circle. So the order is a constant of the cluster, and an instance learns it
// when it joins (InstanceParts::order). Policies only decide which prompts stay local. All other waits end by
// themselves: for an offload tier, for a fetch (it has a time limit), for a peer (leases), and inside one engine
// (Scheduler).
//
// Thread safety: the instance's thread.
#pragma once

#include <optional>
#include <span>

#include "batch/engine/engine.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg::handover {

inline constexpr KvLease kNoLease = -1;
inline constexpr TransferId kNoTransfer = -1;

// Room for one prompt whose KV arrives.
struct Place {
  KvHandle kv = kNoKv;  // kNoKv: nothing is held, or the transport is zero-copy
  KvLease lease = kNoLease;
  int cached_tokens = 0;             // prefix that this instance already has
  RemoteKey registration;            // of the registration that the peer may write through
  TransferId reading = kNoTransfer;  // pull: the read in flight
};

class KvRoom {
 public:
  KvRoom(KvMemory& memory, const Engine& engine) : memory_(memory), engine_(engine) {}

  // Reserves the blocks of a prompt that leaves. False: there is no room yet; a part that an offload tier loads may
  // stay held. `alone`: nothing here computes or sends, so no memory is spared for others.
  bool leave(Sequence& sequence, bool alone) const;
  void give_back(Sequence& sequence) const;  // gives back the reserved blocks, then the prefix
  // CHECKs that P's part is held. A sender calls it before it asks D for room.
  static void check_asks(const KvMemory& memory, const Sequence& sequence);

  // Gets room for all tokens that arrive and are not cached. Room is memory and not a place in the batch; KV that has
  // arrived waits for that place. `granted`: sequences that hold such room already. `loading`: ask again later.
  enum class Got { none, loading, all };
  Got arrive(Place& place, std::span<const int32_t> tokens, uint64_t salt, int granted) const;

  // Gets room for the first `wanted` tokens, some of which another instance has. Returns nothing if there is no
  // room, if the tokens are here already, or if an offload tier here loads some of them.
  std::optional<KvReservation> fetch(std::span<const int32_t> tokens, uint64_t salt, int wanted) const;

 private:
  std::optional<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt, int wanted, int spare) const;
  int share(int n) const { return memory_.stats().capacity / n; }

  KvMemory& memory_;
  const Engine& engine_;
};

}  // namespace xpyd::disagg::handover
