#include "disagg/handover/reservation.h"

#include <algorithm>
#include <utility>

namespace xpyd::disagg::handover {

void Reservations::start(SequencePtr sequence, InstanceId decode) {
  const int priority = sequence->request->priority;
  const auto place = std::ranges::find_if(
      waiting_, [priority](const Waiting& w) { return w.sequence->request->priority > priority; });
  waiting_.insert(place, {std::move(sequence), decode});
}

bool Reservations::tick() {
  if (waiting_.empty()) return false;
  const int64_t computing = engine_.pending_tokens();
  const bool asks = parts_.order == DisaggOrder::push && !parts_.transport.zero_copy();
  to_come_.clear();
  bool room = true;  // no earlier prompt waits for memory
  bool alone = computing == 0 && sender_.sending() == 0;
  Waiting* last = nullptr;  // the last that holds only some of its KV
  for (Waiting& w : waiting_) {
    if (is_over(w)) continue;
    // A prefix that arrives during this call does not count, because its prompt has not asked for the rest yet.
    const bool had_come = w.sequence->kv != kNoKv && parts_.memory.ready(w.sequence->kv);
    const AttemptId attempt = w.sequence->attempt;
    int64_t& to_come = to_come_.try_emplace(w.decode, computing).first->second;
    if (!w.held && room && to_come <= headroom_) {
      w.held = room = room_.leave(*w.sequence, alone);
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
  // No prompt holds all that it needs, and nothing in progress will free memory. The last prompt gives up what it has
  // loaded.
  if (alone && last) room_.give_back(*last->sequence);
  return std::erase_if(waiting_, [](const Waiting& w) { return !w.sequence; }) > 0;
}

// Ends the prompt if its request is over. An attempt that has failed also ends here, because the conductor aborts it.
bool Reservations::is_over(Waiting& w) {
  const FinishReason why = w.sequence->over(parts_.clock.now());
  if (why != FinishReason::none) end(w, why, "");
  return why != FinishReason::none;
}

void Reservations::end(Waiting& w, FinishReason reason, const std::string& error) {
  room_.give_back(*w.sequence);
  sender_.prefill_cancelled(*w.sequence);  // tells D, if D was asked
  emit_end(*w.sequence, reason, error, parts_.clock.now());
  w.sequence.reset();
}

void Reservations::clear(FinishReason reason, const std::string& error) {
  for (Waiting& w : waiting_) end(w, reason, error);
  waiting_.clear();
}

}  // namespace xpyd::disagg::handover
