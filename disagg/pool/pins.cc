#include "disagg/pool/pins.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace xpyd::disagg::pool {
namespace {

constexpr double kLookEvery = 0.01;  // seconds: for what has been computed since
constexpr size_t kMostAwaited = 256;

size_t common_prefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return size_t(std::ranges::mismatch(a, b).in1 - a.begin());
}

}  // namespace

void PrefixPins::handle(PinPrefix message) {
  handle(UnpinPrefix{message.id});  // it comes from another process, maybe twice
  const double ttl_s = message.ttl_s;
  message.tokens.push_back(0);
  pins_.push_back({.of = std::move(message), .until_s = ttl_s > 0 ? clock_.now() + ttl_s : 0});
  keep(pins_.back());
}

void PrefixPins::handle(const UnpinPrefix& message) {
  const auto at = std::ranges::find_if(
      pins_, [&](const Pin& pin) { return pin.mark == KvMark::pinned && pin.of.id == message.id; });
  if (at == pins_.end()) return;
  Pin pin = std::move(*at);
  pins_.erase(at);
  let_go(pin);
}

void PrefixPins::handle(KvHint message, const Pause& pause) {
  const int n = std::clamp(message.kept, 0, int(message.tokens.size()));
  if (n < int(message.tokens.size())) memory_.mark(message.tokens, message.salt, n, KvMark::thought, true);
  const auto awaited = [](const Pin& pin) { return pin.mark == KvMark::awaited; };
  if (message.ttl_s <= 0 || !pays(pause) || size_t(std::ranges::count_if(pins_, awaited)) >= kMostAwaited) return;
  message.tokens.resize(size_t(n));
  pins_.push_back({.of = {.salt = message.salt, .tokens = std::move(message.tokens), .soft = true},
                   .mark = KvMark::awaited,
                   .until_s = clock_.now() + message.ttl_s});
  keep(pins_.back());
}

void PrefixPins::tick() {
  if (pins_.empty()) return;
  const double now = clock_.now();
  if (now < looked_s_ + kLookEvery) return;
  looked_s_ = now;
  const auto over = std::stable_partition(pins_.begin(), pins_.end(),
                                          [&](const Pin& pin) { return pin.until_s == 0 || now < pin.until_s; });
  std::vector<Pin> ended(std::make_move_iterator(over), std::make_move_iterator(pins_.end()));
  pins_.erase(over, pins_.end());
  for (Pin& pin : ended) let_go(pin);
  // One at a time, in turn: each is a walk over its prefix. Who only waits has computed all that there is to keep.
  if (pins_.empty()) return;
  if (Pin& pin = pins_[++turn_ % pins_.size()]; pin.mark == KvMark::pinned) keep(pin);
}

// What there is of it now.
void PrefixPins::keep(Pin& pin) {
  memory_.mark(pin.of.tokens, pin.of.salt, 0, pin.mark, true);
  if (pin.of.soft || (pin.kv != kNoKv && !memory_.ready(pin.kv))) return;
  const int there = pin.kv == kNoKv ? 0 : memory_.written_tokens(pin.kv);
  if (clock_.now() < pin.again_s || memory_.promise(pin.of.tokens, pin.of.salt) <= there) return;
  const Result<KvReservation> reserved = memory_.reserve(pin.of.tokens, pin.of.salt);
  if (!reserved) return;
  const KvHandle kv = reserved.value().handle;
  const int n = int(memory_.blocks(kv).size());
  if (reserved.value().cached_tokens <= there) {  // no room to load it
    pin.again_s = clock_.now() + 1;
    return memory_.free(kv);
  }
  if (pin.kv != kNoKv) memory_.free(pin.kv);
  pin.kv = kv;
  hard_blocks_ += n - std::exchange(pin.n, n);
}

void PrefixPins::let_go(Pin& pin) {
  if (pin.kv != kNoKv) memory_.free(pin.kv);
  hard_blocks_ -= pin.n;
  // Others may have pinned its beginning, too.
  size_t begin = 0;
  for (const Pin& other : pins_)
    if (other.mark == pin.mark && other.of.salt == pin.of.salt)
      begin = std::max(begin, common_prefix(pin.of.tokens, other.of.tokens));
  memory_.mark(pin.of.tokens, pin.of.salt, int(begin), pin.mark, false);  // from the first block that is not shared
}

void PrefixPins::clear() {
  while (!pins_.empty()) {
    Pin pin = std::move(pins_.back());
    pins_.pop_back();
    let_go(pin);
  }
}

}  // namespace xpyd::disagg::pool
