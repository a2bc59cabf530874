// Prefixes that stay where they are: who pinned what, for how long, and how much in all. The instances keep them
// (pool/pins.h).
#include <algorithm>

#include "disagg/conductor.h"

namespace xpyd::disagg {

namespace {

constexpr size_t kMostPins = 64;

}  // namespace

// Blocks that may be pinned hard in a memory of so many: beside them there is room for half of it, and for the longest
// request.
long Conductor::most_pinned(long capacity, int block_tokens) const {
  // Processes on one pool each hold their own.
  const long mine = capacity / (options_.zero_copy ? std::max<long>(1, long(members_.size())) : 1);
  const long longest = (options_.max_model_len + block_tokens - 1) / block_tokens;
  return std::max(0l, std::min(mine / 2, capacity - longest));
}

// Beside hard pins there is room for half of the pool, and for the longest request: nobody is taken in who then waits
// for ever. Pins that have a beginning in common count it twice.
Status Conductor::pin_prefix(PinPrefix pin) {
  std::lock_guard lock(mutex_);
  end_pins();
  if (members_.empty()) return Error{ErrorCode::not_found, "no instance is there"};
  const auto& [max_batch, block_tokens, capacity] = board_.smallest();
  const auto blocks_of = [bt = block_tokens](const PinPrefix& p) { return long(p.tokens.size()) / bt; };
  if (blocks_of(pin) < 1)
    return invalid("the prefix has " + std::to_string(pin.tokens.size()) + " tokens: expected a block of " +
                   std::to_string(block_tokens) + " at least, since whole blocks are kept");
  if (long(pin.tokens.size()) >= options_.max_model_len)
    return invalid("the prefix has " + std::to_string(pin.tokens.size()) + " tokens, the context " +
                   std::to_string(options_.max_model_len));
  if (pinned_.size() >= kMostPins)
    return Error{ErrorCode::unavailable, std::to_string(kMostPins) + " prefixes are pinned, as many as can be"};
  if (!pin.soft) {
    const long most = most_pinned(capacity, block_tokens);
    long held = blocks_of(pin);
    for (const Pinned& other : pinned_) held += other.pin.soft ? 0 : blocks_of(other.pin);
    if (held > most)
      return Error{ErrorCode::unavailable,
                   "with this prefix " + std::to_string(held) + " KV blocks would be pinned, " + std::to_string(most) +
                       " of " + std::to_string(capacity) +
                       " can be: half of an instance's, and the longest request must fit beside them"};
  }
  for (const auto& [id, member] : members_) post_.send(kConductor, id, pin);
  const double until_s = pin.ttl_s > 0 ? clock_.now() + pin.ttl_s : 0;
  pinned_.push_back({std::move(pin), until_s});
  return ok();
}

Status Conductor::unpin_prefix(uint64_t id) {
  std::lock_guard lock(mutex_);
  end_pins();
  if (std::erase_if(pinned_, [&](const Pinned& p) { return p.pin.id == id; }) == 0)
    return Error{ErrorCode::not_found, "no prefix is pinned under this id"};
  for (const auto& [to, member] : members_) post_.send(kConductor, to, UnpinPrefix{id});
  return ok();
}

void Conductor::hint(const KvHint& hint) {
  std::lock_guard lock(mutex_);
  for (const auto& [id, member] : members_) post_.send(kConductor, id, hint);
}

// An instance that is new. What a smaller one than those before has no room for is soft there.
void Conductor::tell_pins(InstanceId id) {
  end_pins();
  const InstanceInfo& info = members_.at(id).info;
  long left = most_pinned(info.capacity_blocks, info.block_tokens);
  for (const Pinned& pinned : pinned_) {
    PinPrefix pin = pinned.pin;
    if (!pin.soft) pin.soft = (left -= long(pin.tokens.size()) / info.block_tokens) < 0;
    if (pinned.until_s > 0) pin.ttl_s = std::max(1e-3, pinned.until_s - clock_.now());
    post_.send(kConductor, id, std::move(pin));
  }
}

// The instances see by themselves that they are over.
void Conductor::end_pins() {
  std::erase_if(pinned_, [now = clock_.now()](const Pinned& p) { return p.until_s > 0 && now >= p.until_s; });
}

}  // namespace xpyd::disagg
