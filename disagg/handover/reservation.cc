#include "disagg/handover/reservation.h"

#include <algorithm>
#include <utility>

namespace xpyd::disagg::handover {

void Reservations::start(SequencePtr sequence, DisaggOrder order, InstanceId decode) {
  const int priority = sequence->request->priority;
  const auto place = std::ranges::find_if(
      waiting_, [priority](const Waiting& w) { return w.sequence->request->priority > priority; });
  waiting_.insert(place, {std::move(sequence), order, decode});
}

bool Reservations::tick() {
  if (waiting_.empty()) return false;
  const int64_t computing = engine_.pending_tokens();
  to_come_.clear();
  bool room = true;  // nobody before this one waits for memory
  bool alone = computing == 0 && sender_.sending() == 0;
  Waiting* last = nullptr;  // of those that hold some KV, and not all that they need
  for (Waiting& w : waiting_) {
    if (is_over(w)) continue;
    // KV that comes while this call looks at it does not count: its prompt has not asked for the rest yet.
    const bool had_come = w.sequence->kv != kNoKv && parts_.memory.ready(w.sequence->kv);
    const AttemptId attempt = w.sequence->attempt;
    const bool asks = w.order == DisaggOrder::push && !parts_.wire.zero_copy();
    int64_t& to_come = to_come_.try_emplace(w.decode, computing).first->second;
    if (!w.held && room && to_come <= headroom_) {
      room = hold(w, alone);
      if (w.held && asks) sender_.ask(*w.sequence);
    }
    alone &= !w.held;
    if (!w.held) {
      if (had_come && w.sequence->kv != kNoKv) last = &w;
      continue;
    }
    to_come += w.sequence->pending();
    if (!asks || sender_.granted(attempt)) engine_.submit(std::move(w.sequence));
  }
  // No prompt holds all that it needs, and nothing is on its way to an end: the last one gives up what was read for it.
  if (alone && last) let_go(*last->sequence);
  return std::erase_if(waiting_, [](const Waiting& w) { return !w.sequence; }) > 0;
}

// Of an attempt that has failed, too, which the conductor calls off.
bool Reservations::is_over(Waiting& w) {
  const Sequence& s = *w.sequence;
  const double until_s = s.request->deadline_s;
  const bool late = until_s > 0 && parts_.clock.now() > until_s, aborted = s.cancelled && s.cancelled->load();
  if (late || aborted) end(w, aborted ? FinishReason::abort : FinishReason::timeout, "");
  return late || aborted;
}

void Reservations::end(Waiting& w, FinishReason reason, const std::string& error) {
  let_go(*w.sequence);
  sender_.prefill_cancelled(*w.sequence);  // D is told, if it was asked
  emit_end(*w.sequence, reason, error, parts_.clock.now());
  w.sequence.reset();
}

// Lease and escrow, or neither.
bool Reservations::hold(Waiting& w, bool alone) {
  KvMemory& memory = parts_.memory;
  Sequence& s = *w.sequence;
  if (s.kv == kNoKv) {
    const KvStats kv = memory.stats();
    const int spare = alone ? 0 : kv.capacity / 100;
    const int before = engine_.blocks_wanted();  // who waits there for memory comes first
    const int need = (int(s.tokens.size()) + kv.block_tokens - 1) / kv.block_tokens -
                     memory.probe(s.tokens, s.salt()) / kv.block_tokens;
    if (need + before + spare > kv.available()) return false;
    const Result<KvReservation> reserved = memory.reserve(s.tokens, s.salt());
    if (!reserved) return false;
    s.kv = reserved.value().handle;
    s.early = s.probed = true;  // where nothing else can move, the engine may take it back
  }
  if (!memory.ready(s.kv)) return false;  // a tier loads some of it; those who came later wait, too
  if (!s.arrival) s.computed = memory.written_tokens(s.kv);
  w.held = memory.escrow(s.kv, int(s.tokens.size()) - memory.written_tokens(s.kv));
  if (!w.held && !s.arrival) let_go(s);
  return w.held;
}

void Reservations::let_go(Sequence& s) {
  s.arrival.reset();
  if (s.kv != kNoKv) parts_.memory.free(std::exchange(s.kv, kNoKv));  // the escrow, then the lease
  s.early = s.probed = false;
  s.computed = 0;
}

void Reservations::clear(FinishReason reason, const std::string& error) {
  for (Waiting& w : waiting_) end(w, reason, error);
  waiting_.clear();
}

}  // namespace xpyd::disagg::handover
