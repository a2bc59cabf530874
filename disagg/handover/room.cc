#include "disagg/handover/room.h"

#include "disagg/place.h"

namespace xpyd::disagg::handover {

// Preempted sequences take no place: they wait for memory, and with a shared pool that memory may
// be what the prompts to be handed over hold.
Room::Answer Room::take(Place& place, std::span<const int32_t> tokens, uint64_t salt, int n_choices, int promised) {
  const int sequences = engine_.running() + engine_.waiting_with_kv() + promised;
  bool loading = place.kv != kNoKv;
  const Answer held = loading ? Answer::loading : Answer::none;
  if (sequences > 0 && sequences + n_choices > parts_.max_batch) return held;
  if (parts_.wire.zero_copy()) return Answer::all;
  KvMemory& memory = parts_.memory;
  if (!loading) {
    const KvStats kv = memory.stats();
    const int spare = sequences == 0 ? 0 : kv.capacity / 100;
    const int need = (int(tokens.size()) + kv.block_tokens - 1) / kv.block_tokens -
                     memory.probe(tokens, salt) / kv.block_tokens;
    if (need + spare > kv.available()) return Answer::none;
    const Result<KvReservation> reserved = memory.reserve(tokens, salt);
    if (!reserved) return Answer::none;
    place.kv = reserved.value().handle;
    loading = reserved.value().loading;
  }
  // What a tier of this instance has need not cross: it is loaded while the other one computes.
  // Until it is there those who came later wait, too.
  if (!memory.ready(place.kv)) return Answer::loading;
  place.cached_tokens = memory.written_tokens(place.kv);
  if (!memory.append(place.kv, int(tokens.size()) - place.cached_tokens)) {
    if (loading) return Answer::loading;
    memory.free(std::exchange(place.kv, kNoKv));
    return Answer::none;
  }
  place.lease = memory.pin(place.kv);
  return Answer::all;
}

Status Room::open(Place& place, InstanceId peer, int n_tokens) {
  if (parts_.wire.zero_copy()) return ok();
  Result<WindowKey> window = parts_.wire.open(peer, KvOp::write,
                                              rows_of(parts_.memory, place.kv, place.cached_tokens, n_tokens));
  if (!window) return window.error();
  place.window = window.value();
  return ok();
}

bool Room::close(Place& place) {
  if (place.window == WindowKey{}) return true;
  if (!parts_.wire.close(place.window)) return false;
  place.window = {};
  return true;
}

void Room::give_up(Place& place) {
  if (place.kv == kNoKv) return;
  const bool somebody_inside = place.window != WindowKey{} || place.reading != kNoTransfer;
  if (place.reading != kNoTransfer) parts_.wire.cancel(place.reading);
  if (!somebody_inside && place.lease != kNoLease) parts_.memory.unpin(place.lease);
  parts_.memory.free(place.kv);
  place.kv = kNoKv;
  if (somebody_inside) quarantine_.push_back(place);
}

bool Room::sweep() {
  return std::erase_if(quarantine_, [this](Place& place) {
           if (place.reading != kNoTransfer && parts_.wire.poll(place.reading) == TransferState::in_flight)
             return false;
           place.reading = kNoTransfer;
           if (!close(place)) return false;
           parts_.memory.unpin(place.lease);
           return true;
         }) > 0;
}

}  // namespace xpyd::disagg::handover
