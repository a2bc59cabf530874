#include "disagg/handover/kv_room.h"

#include <algorithm>
#include <climits>
#include <utility>

#include "base/status.h"
#include "batch/policies/admission.h"

namespace xpyd::disagg::handover {

// Succeeds only if there are blocks for the first `wanted` tokens, and `spare` blocks beyond them.
std::optional<KvReservation> KvRoom::reserve(std::span<const int32_t> tokens, uint64_t salt, int wanted,
                                             int spare) const {
  const KvStats kv = memory_.stats();
  const int need = blocks_for(wanted, kv.block_tokens) - memory_.probe(tokens, salt) / kv.block_tokens;
  if (need <= 0 || need + spare > kv.available()) return std::nullopt;
  const Result<KvReservation> reserved = memory_.reserve(tokens, salt);
  return reserved ? std::optional(reserved.value()) : std::nullopt;
}

bool KvRoom::leave(Sequence& s, bool alone) const {
  if (s.kv == kNoKv) {
    const int before = engine_.blocks_wanted();  // prompts that wait in the engine come first
    const auto reserved = reserve(s.tokens, s.salt(), int(s.tokens.size()), before + (alone ? 0 : share(100)));
    if (!reserved) return false;
    s.kv = reserved->handle;
    s.early = s.probed = true;  // the engine may take it back if nothing else can move
  }
  if (!memory_.ready(s.kv)) return false;  // later prompts wait, too
  const int written = memory_.written_tokens(s.kv);
  s.computed = written;
  const bool all = memory_.reserve_blocks(s.kv, int(s.tokens.size()) - written);
  if (!all) give_back(s);
  return all;
}

void KvRoom::give_back(Sequence& s) const {
  if (s.kv != kNoKv) memory_.free(std::exchange(s.kv, kNoKv));
  s.early = s.probed = false;
  s.computed = 0;
}

void KvRoom::check_asks(const KvMemory& memory, const Sequence& s) {
  const KvStats kv = memory.stats();
  const KvHeld own = s.kv == kNoKv ? KvHeld{} : memory.held(s.kv);
  const int held = s.kv == kNoKv ? INT_MIN : int(own.blocks.size()) + own.reserved;
  XPYD_CHECK(held + kv.available() >= blocks_for(s.given, kv.block_tokens),
             "P asks D for room before P itself has reserved blocks");
}

KvRoom::Got KvRoom::arrive(Place& place, std::span<const int32_t> tokens, uint64_t salt, int granted) const {
  if (place.kv == kNoKv) {
    // Every other sequence soon needs one more block.
    const int others = engine_.running() + engine_.waiting_with_kv() + granted;
    const auto reserved = reserve(tokens, salt, int(tokens.size()), others == 0 ? 0 : std::max(share(100), others));
    if (!reserved) return Got::none;
    place.kv = reserved->handle;
  }
  // A part that an offload tier of this instance holds need not cross. While it is loaded, later attempts wait.
  if (!memory_.ready(place.kv)) return Got::loading;
  place.cached_tokens = memory_.written_tokens(place.kv);
  if (!memory_.append(place.kv, int(tokens.size()) - place.cached_tokens)) {
    memory_.free(std::exchange(place.kv, kNoKv));
    return Got::none;
  }
  place.lease = memory_.pin(place.kv);
  return Got::all;
}

// A tenth of the memory stays free for running sequences.
std::optional<KvReservation> KvRoom::fetch(std::span<const int32_t> tokens, uint64_t salt, int wanted) const {
  const auto reserved = reserve(tokens, salt, wanted, share(10));
  if (!reserved) return std::nullopt;
  const int missing = wanted - reserved->cached_tokens;
  if (!reserved->loading && missing > 0 && memory_.append(reserved->handle, missing)) return reserved;
  memory_.free(reserved->handle);
  return std::nullopt;
}

}  // namespace xpyd::disagg::handover
