#include "disagg/kv_sender.h"

#include <algorithm>

#include "disagg/envelope.h"
#include "disagg/place.h"

namespace xpyd {

void KvSender::expect(AttemptId attempt, DisaggOrder order, InstanceId decode) {
  Outgoing& out = outgoing_[attempt];
  out.order = order;
  out.peer = decode;
  out.sent.assign(size_t(parts_.n_layers), 0);
  out.deadline_s = parts_.new_deadline();
  if (!parts_.peers.contains(decode))
    give_up(attempt, out, AttemptFailure::peer_unknown, "its decode instance is gone");
}

// P itself asks for room, so that both directions are in order: D hears of a request before it
// hears of its end, and P knows it before D answers. It asks when the prompt starts, so that D
// grants room in the order in which P can use it. (decode_first: D has the room, and learns who
// will write.)
void KvSender::started(const Sequence& sequence) {
  Outgoing& out = outgoing_.at(sequence.attempt);
  if (out.over || out.order == DisaggOrder::pull) return;
  out.told = true;
  out.n_tokens = sequence.given;
  out.until_s = sequence.request->deadline_s;
  out.deadline_s = parts_.new_deadline();
  parts_.tell(out.peer, ReserveKv{sequence.attempt, sequence.request, state_of(sequence)});
}

void KvSender::handle(InstanceId from, KvReserved message) {
  auto found = outgoing_.find(message.attempt);
  if (found == outgoing_.end()) return;  // over, and the other side has been told
  Outgoing& out = found->second;
  if (out.over || out.destination || !parts_.peers.contains(out.peer)) return;
  if (from != out.peer || !out.told || out.order == DisaggOrder::pull) return;  // not asked for
  if (Status fits = parts_.check_place(out.peer, message.destination, out.n_tokens); !fits)
    return give_up(message.attempt, out, AttemptFailure::refused, fits.error().message);
  out.destination = std::move(message.destination);
  out.deadline_s = parts_.new_deadline();
  std::fill(out.sent.begin(), out.sent.end(), out.destination->cached_tokens);
  if (out.choices.empty()) return;
  send_kv(out, out.kv, 0, parts_.n_layers, out.choices[0]->given);
  deliver(message.attempt, out);
}

// What was computed before the destination was known goes with the first call after it is.
void KvSender::kv_written(Sequence& sequence, int layer_begin, int layer_end, int token_end) {
  if (stream_ == StreamKv::request) return;
  Outgoing& out = outgoing_.at(sequence.attempt);
  if (out.over || out.order == DisaggOrder::pull) return;
  if (out.destination && !out.over) send_kv(out, sequence.kv, layer_begin, layer_end, token_end);
}

void KvSender::send_kv(Outgoing& out, KvHandle kv, int layer_begin, int layer_end, int token_end) {
  if (parts_.wire.zero_copy()) return;
  if (!parts_.peers.contains(out.peer)) {
    out.failed = true;
    return;
  }
  const double start = parts_.clock.now();
  for (int layer = layer_begin; layer < layer_end;) {
    const int token_begin = out.sent[size_t(layer)];
    int end = layer + 1;
    while (end < layer_end && out.sent[size_t(end)] == token_begin) ++end;
    if (token_begin < token_end) {
      parts_.plan_write(kv, out.peer, *out.destination, {token_begin, token_end, layer, end}, plan_);
      stats_.bytes += int64_t(plan_.bytes);
      stats_.descriptors += int64_t(plan_.copies.size());
      const double post_s = parts_.clock.now();
      const uint32_t number = uint32_t(++out.posts);
      const TransferId id = parts_.wire.post(
          {out.peer, KvOp::write, out.destination->window, parts_.post_deadline(out.until_s, plan_.bytes), number},
          plan_);
      const TransferState state = parts_.wire.poll(id);
      if (state == TransferState::in_flight) out.in_flight.push_back({id, parts_.memory.pin(kv), post_s, plan_.bytes});
      if (state == TransferState::done) parts_.rate.done(post_s, parts_.clock.now(), plan_.bytes);
      if (state == TransferState::failed) out.failed = true;
      std::fill(out.sent.begin() + layer, out.sent.begin() + end, token_end);
    }
    layer = end;
  }
  stats_.seconds += parts_.clock.now() - start;
}

void KvSender::done(std::vector<SequencePtr> choices) {
  const AttemptId attempt = choices[0]->attempt;
  Outgoing& out = outgoing_.at(attempt);
  out.kv = std::exchange(choices[0]->kv, kNoKv);
  out.choices = std::move(choices);
  out.computing = false;
  if (out.over) return;
  if (out.order == DisaggOrder::pull) {
    offer(attempt, out);
  } else if (out.destination) {
    send_kv(out, out.kv, 0, parts_.n_layers, out.choices[0]->given);
    deliver(attempt, out);
  }
}

void KvSender::offer(AttemptId attempt, Outgoing& out) {
  const Sequence& first = *out.choices[0];
  Result<WindowKey> window = parts_.wire.open(out.peer, KvOp::read, parts_.ranges(out.kv, 0, first.given));
  if (!window) return give_up(attempt, out, AttemptFailure::refused, window.error().message);
  out.offered = window.value();
  KvPlace source = place_of(parts_.memory, out.kv, window.value(), 0);
  if (parts_.checksum) source.checksums = parts_.checksums(out.kv, 0, first.given);
  KvOffered offered{attempt, first.request, {}, std::move(source)};
  for (const SequencePtr& choice : out.choices) offered.choices.push_back(state_of(*choice));
  out.told = true;
  out.deadline_s = parts_.new_deadline();
  parts_.tell(out.peer, std::move(offered));
}

// A sequence that leaves has ended in the engine.
void KvSender::cancelled(const Sequence& sequence) {
  Outgoing& out = outgoing_.at(sequence.attempt);
  out.computing = false;
  out.over = true;
}

void KvSender::handle(InstanceId from, const KvTaken& message) {
  auto found = outgoing_.find(message.attempt);
  if (found == outgoing_.end() || found->second.peer != from || !(found->second.offered || found->second.given)) return;
  found->second.told = false;  // nothing more to say
  found->second.over = true;
}

void KvSender::handle(InstanceId from, const ReservationCancelled& message) {
  auto found = outgoing_.find(message.attempt);
  if (found == outgoing_.end() || found->second.peer != from) return;
  found->second.told = false;
  give_up(message.attempt, found->second, AttemptFailure::given_up, "its decode instance has given it up");
}

void KvSender::renewed(InstanceId from, AttemptId attempt) {
  auto found = outgoing_.find(attempt);
  if (found != outgoing_.end() && found->second.peer == from) found->second.deadline_s = parts_.new_deadline();
}

void KvSender::peer_gone(InstanceId peer, const std::string& why) {
  for (auto& [attempt, out] : outgoing_) {
    if (out.peer != peer) continue;
    out.told = false;
    if (!why.empty()) give_up(attempt, out, AttemptFailure::connection_lost, why);
    out.over = true;
  }
}

// Who is still being computed goes on in the engine until the conductor's abort comes.
void KvSender::give_up(AttemptId attempt, Outgoing& out, AttemptFailure reason, const std::string& why) {
  if (out.over) return;
  if (!out.choices.empty()) end_waiting(out);
  if (out.over) return;
  // What was delivered is the peer's to finish, or to fail.
  if (!out.delivered) parts_.tell(kConductor, AttemptFailed{attempt, reason, why});
  out.over = true;
}

// Who has gone away, or is late, need not wait for room on the other side.
void KvSender::end_waiting(Outgoing& out) {
  const Sequence& first = *out.choices[0];
  const double now = parts_.clock.now();
  const bool gone = first.cancelled && first.cancelled->load();
  const bool late = first.request->deadline_s > 0 && now > first.request->deadline_s;
  if (!gone && !late) return;
  for (const SequencePtr& choice : out.choices)
    emit_end(*choice, gone ? FinishReason::abort : FinishReason::timeout, "", now);
  out.over = true;
}

bool KvSender::poll() {
  bool moved = false;
  const double now = parts_.clock.now();
  for (auto i = outgoing_.begin(); i != outgoing_.end();) {
    Outgoing& out = i->second;
    if (!out.over && out.told && now > out.deadline_s)
      give_up(i->first, out, AttemptFailure::peer_silent, "its decode instance is silent");
    if (out.over)
      for (const Outgoing::Flight& flight : out.in_flight) parts_.wire.cancel(flight.id);
    moved |= std::erase_if(out.in_flight, [&](const Outgoing::Flight& flight) {
               const TransferState state = parts_.wire.poll(flight.id);
               if (state == TransferState::in_flight) return false;
               if (state == TransferState::failed) out.failed = true;
               if (state == TransferState::done) parts_.rate.done(flight.post_s, now, flight.bytes);
               parts_.memory.unpin(flight.lease);
               return true;
             }) > 0;
    const bool finished = finish(i->first, out);
    moved |= finished;
    i = finished ? outgoing_.erase(i) : std::next(i);
  }
  return moved;
}

// True: nothing of the attempt is left here.
bool KvSender::finish(AttemptId attempt, Outgoing& out) {
  if (!out.over && !out.choices.empty()) end_waiting(out);
  if (out.given) {  // the attempt is the peer's; one that is silent adopts what it finds, or
                    // computes
    if (!out.over && parts_.clock.now() <= out.deadline_s) return false;
    parts_.memory.handoff().discard(*std::exchange(out.given, std::nullopt));
    return true;
  }
  // The peer counts what arrives: of posts that are done it need not be told.
  if (out.delivered && out.in_flight.empty() && !out.failed) out.told = false, out.over = true;
  if (out.delivered && out.failed) {
    if (std::exchange(out.told, false)) parts_.tell(out.peer, ReservationCancelled{attempt});
    out.over = true;
  }
  if (!out.over || !out.in_flight.empty()) return false;
  if (out.offered && !parts_.wire.close(*out.offered)) return false;  // it is reading
  out.offered.reset();
  if (out.kv != kNoKv) parts_.memory.free(std::exchange(out.kv, kNoKv));
  if (out.told) parts_.tell(out.peer, ReservationCancelled{attempt});
  out.told = false;
  // The engine may still be at it, and will say so.
  return !out.computing;
}

// As soon as the last post is posted, not when it is done: between the layers of the next prompt
// this instance looks late, while the peer can count at once. The source rows are pinned until
// then.
void KvSender::deliver(AttemptId attempt, Outgoing& out) {
  KvDelivered delivered{.attempt = attempt, .kv_arrived = !out.failed, .posts = out.posts};
  if (out.order != DisaggOrder::decode_first)
    for (const SequencePtr& choice : out.choices) delivered.choices.push_back(state_of(*choice));
  if (parts_.checksum && !parts_.wire.zero_copy())
    delivered.checksums = parts_.checksums(out.kv, out.destination->cached_tokens, out.choices[0]->given);
  if (parts_.wire.zero_copy()) delivered.handover = parts_.memory.handoff().hand_over(std::exchange(out.kv, kNoKv));
  if (delivered.handover && delivered.handover->between_processes()) {
    out.given = delivered.handover;
    out.deadline_s = parts_.new_deadline();
  }
  ++stats_.transfers;
  parts_.tell(out.peer, std::move(delivered));
  out.choices.clear();
  out.delivered = true;
  if (out.failed) out.told = false;  // said
}

void KvSender::clear(FinishReason reason, const std::string& error) {
  for (auto& [attempt, out] : outgoing_) {
    if (!out.over)
      for (const SequencePtr& choice : out.choices) emit_end(*choice, reason, error, parts_.clock.now());
    out.told = false;
    out.over = true;
  }
}

void KvSender::renewals(std::unordered_map<InstanceId, std::vector<AttemptId>>& of_peer) const {
  for (const auto& [attempt, out] : outgoing_)
    if (out.told && !out.over) of_peer[out.peer].push_back(attempt);
}

int KvSender::sending() const {
  return int(std::count_if(outgoing_.begin(), outgoing_.end(),
                           [](const auto& entry) { return !entry.second.over && entry.second.kv != kNoKv; }));
}

}  // namespace xpyd
