// Room on D for KV that comes: what is promised only if it fits now, held while a peer may write
// there, and given to others only when nobody can any more.
//
// Thread safety: the instance's thread.
#pragma once

#include <span>
#include <vector>

#include "batch/engine.h"
#include "disagg/attempts.h"

namespace xpyd::disagg::handover {

inline constexpr KvLease kNoLease = -1;
inline constexpr TransferId kNoTransfer = -1;

// Of one prompt.
struct Place {
  KvHandle kv = kNoKv;  // kNoKv: nothing is held, or the wire is zero-copy
  KvLease lease = kNoLease;
  int cached_tokens = 0;             // there already
  WindowKey window;                  // the peer may write
  TransferId reading = kNoTransfer;  // pull: on its way here
};

class Room {
 public:
  enum class Answer { none, loading, all };

  Room(InstanceParts& parts, const Engine& engine) : parts_(parts), engine_(engine) {}

  // A place in the batch for `n_choices` beside those of the engine and `promised`, and where bytes
  // are to be copied blocks for all of `tokens`, less what is cached. `loading`: what a tier has of
  // it comes meanwhile, and no more is held; to be asked again.
  Answer take(Place& place, std::span<const int32_t> tokens, uint64_t salt, int n_choices, int promised);
  Status open(Place& place, InstanceId peer, int n_tokens);
  // True: nobody writes there any more.
  bool close(Place& place);
  // The KV is not wanted. Its blocks come back once nobody can touch them any more.
  void give_up(Place& place);
  bool sweep();  // true: some have
  bool empty() const { return quarantine_.empty(); }

 private:
  InstanceParts& parts_;
  const Engine& engine_;
  std::vector<Place> quarantine_;
};

}  // namespace xpyd::disagg::handover
