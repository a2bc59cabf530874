// The one place of an instance that reserves KV: for prompts that leave (reservation.h), for KV that arrives
// (receiver.h) and for prefixes that are fetched (pool/fetcher.h). Room is for all tokens that are wanted, or there is
// none. A part that a tier has is loaded first; the prompt holds only that part meanwhile. If there is no room for the
// rest when the load has ended, the part is given back at once, because others could wait for its memory for ever. The
// loaded blocks stay cached until their memory is wanted.
//
// Who holds room at a decode instance (D) waits for nobody at a prefill instance (P). No instance is both, so waits
// that all go from P to D close no circle:
//   push          A prompt asks D when it begins at P, which is where all of it fits beside what those need that have
//                 begun (batch/engine/scheduler.h); with --reservation escrow, when all of it is set aside.
//   pull          It asks D when it is computed.
//   zero-copy     D takes P's blocks over, and has no room to be asked for.
//   decode_first  All waits go the other way: who holds room at P has D's, and waits for nobody there.
// Two orders that meet would close circles. So the order is a constant of the cluster, which an instance is told when
// it joins (InstanceParts::remote); policies say only who stays. All other waits end by themselves: for a tier, for a
// fetch (holders answer at once, and it has a limit), for a peer (leases), within one engine (Scheduler).
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
  KvHandle kv = kNoKv;  // kNoKv: nothing is held, or the wire is zero-copy
  KvLease lease = kNoLease;
  int cached_tokens = 0;             // there already
  RemoteKey registration;            // the peer may write
  TransferId reading = kNoTransfer;  // pull: on its way here
};

class KvRoom {
 public:
  KvRoom(KvMemory& memory, const Engine& engine) : memory_(memory), engine_(engine) {}

  // Sets room aside for a prompt that leaves. False: not yet; a part that a tier loads, or that arrives while a step
  // computes, may be held. `alone`: nothing here computes or sends, so no memory is spared for others.
  bool leave(Sequence& sequence, bool alone) const;
  void give_back(Sequence& sequence) const;  // all that it has: the escrow, then the lease
  // A prompt asks for D's room: it has begun, and P's is there. Ends in a CHECK where it is not.
  static void check_asks(const KvMemory& memory, const Sequence& sequence);

  // Room for KV that arrives, of all tokens that are not cached: memory, never a place in the batch, for which KV that
  // has come waits. `promised`: sequences that have such room. `loading`: to be asked again.
  enum class Got { none, loading, all };
  Got arrive(Place& place, std::span<const int32_t> tokens, uint64_t salt, int promised) const;

  // Room for the first `wanted` tokens, some of which other instances have. `keep`: the fetched KV stays findable for
  // other prompts. Nothing: there is no room, they are here, or a tier here has more of them.
  std::optional<KvReservation> fetch(std::span<const int32_t> tokens, uint64_t salt, int wanted, bool keep) const;

 private:
  std::optional<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt, int wanted, int spare) const;
  int share(int n) const { return memory_.stats().capacity / n; }

  KvMemory& memory_;
  const Engine& engine_;
};

}  // namespace xpyd::disagg::handover
