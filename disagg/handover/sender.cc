#include "disagg/handover/sender.h"

#include <algorithm>

#include "disagg/handover/kv_room.h"
#include "disagg/messages.h"

namespace xpyd::disagg::handover {

void Sender::on(Outgoing& out, Event event, With with) {
  const auto& step = kSenderTable.step(out.state, event, parts_.visits ? &parts_.visits->sender : nullptr);
  out.state = step.next;
  switch (step.action) {
    case Action::nothing: break;
    case Action::ask:
      out.deadline_s = parts_.new_deadline();
      parts_.tell(out.peer, ReserveKv{out.attempt, with.sequence->request, state_of(*with.sequence)});
      leases_.add(out.peer, out.attempt);
      break;
    case Action::take_place:
      out.destination = std::move(*with.place);
      out.deadline_s = parts_.new_deadline();
      std::fill(out.sent.begin(), out.sent.end(), out.destination.cached_tokens);
      if (out.choices.empty()) break;  // kv_written() or prefill_done() will send
      send_rest(out);
      on(out, Event::prompt_done);
      break;
    case Action::deliver: deliver(out); break;
    case Action::offer: offer(out); break;
    case Action::end_or_fail:
      if (over(out) != FinishReason::none) return end(out);
      [[fallthrough]];
    case Action::fail: parts_.tell(kConductor, AttemptFailed{out.attempt, std::move(with.why)}); break;
    case Action::end: end(out); break;
    case Action::cancel_posts:
      for (const Flight& flight : out.in_flight) parts_.transport.cancel(flight.id);
      break;
    case Action::free: free(out); break;
    case Action::free_and_tell: free(out); [[fallthrough]];
    case Action::tell: parts_.tell(out.peer, ReservationCancelled{out.attempt}); break;
  }
}

Sender::Outgoing* Sender::find(InstanceId peer, AttemptId attempt) {
  auto found = outgoing_.find(attempt);
  return found == outgoing_.end() || found->second.peer != peer ? nullptr : &found->second;
}

// ---- Messages.

void Sender::expect(AttemptId attempt, InstanceId decode) {
  Outgoing& out = outgoing_[attempt];
  out.attempt = attempt;
  out.peer = decode;
  out.sent.assign(size_t(parts_.n_layers), 0);
  if (!parts_.peers.contains(decode)) on(out, Event::cancelled, {"its decode instance is gone"});
}

// P itself asks D for room, so messages are in order in both directions: D learns of a request before its end, and P
// knows the attempt before D answers. P asks when the prompt starts, so D grants room in the order in which P can use
// it. With decode_first D has the room and learns which P will write. With reservations D was asked earlier.
void Sender::prefill_started(const Sequence& sequence) {
  Outgoing& out = outgoing_.at(sequence.attempt);
  out.request = sequence.request->id;
  if (parts_.order != DisaggOrder::pull && out.n_tokens == 0) ask(sequence);
}

void Sender::ask(const Sequence& sequence) {
  if (!parts_.transport.zero_copy()) KvRoom::check_asks(parts_.memory, sequence);
  Outgoing& out = outgoing_.at(sequence.attempt);
  out.n_tokens = sequence.given;
  out.until_s = sequence.request->deadline_s;
  on(out, Event::started, {.sequence = &sequence});
}

// D's answer arrives while the first step runs. The remaining layers then leave without waiting for the step's end, and
// finished transfers are noticed. If the grant were read only at the step's end, the KV of a one-step prompt would
// leave after that step: 4,096 tokens of Llama-3.1-8B at 100 Gb/s would delay D by 43 ms instead of 1.3 (make
// exp-transfer_exposed).
void Sender::layer_ended() {
  if (outgoing_.empty()) return;
  for (auto& [from, reserved] : leases_.take_reserved()) handle(from, std::move(reserved));
  tick();
}

// KV that was computed before the grant leaves with the first call after it.
void Sender::kv_written(Sequence& sequence, int layer_begin, int layer_end, int, int token_end) {
  Outgoing& out = outgoing_.at(sequence.attempt);
  if (stream_ != StreamKv::request && out.state == State::writing)
    send(out, sequence.kv, layer_begin, layer_end, token_end);
}

void Sender::prefill_done(std::vector<SequencePtr> choices) {
  Outgoing& out = outgoing_.at(choices[0]->attempt);
  out.kv = std::exchange(choices[0]->kv, kNoKv);
  out.choices = std::move(choices);
  if (out.state == State::writing) send_rest(out);
  on(out, Event::prompt_done);
}

void Sender::handle(InstanceId from, KvReserved message) {
  Outgoing* out = find(from, message.attempt);
  if (!out) return;  // over, and the other side has been told
  on(*out, Event::reserved, {.place = &message.destination});
}

void Sender::handle(InstanceId from, const KvTaken& message) {
  if (Outgoing* out = find(from, message.attempt)) on(*out, Event::taken);
}

void Sender::handle(InstanceId from, const ReservationCancelled& message) {
  if (Outgoing* out = find(from, message.attempt))
    on(*out, Event::cancelled, {"its decode instance gave the request up"});
}

void Sender::renewed(InstanceId from, AttemptId attempt) {
  if (Outgoing* out = find(from, attempt)) out->deadline_s = parts_.new_deadline();
}

void Sender::peer_gone(InstanceId peer) {
  for (auto& [attempt, out] : outgoing_)
    if (out.peer == peer) on(out, Event::peer_gone);
}

// ---- Actions.

void Sender::send(Outgoing& out, KvHandle kv, int layer_begin, int layer_end, int token_end) {
  if (parts_.transport.zero_copy()) return;
  const double start = parts_.clock.now();
  for (int layer = layer_begin; layer < layer_end;) {
    const int token_begin = out.sent[size_t(layer)];
    int end = layer + 1;
    const int post_end = std::min(layer_end, parts_.post_end(layer));
    while (end < post_end && out.sent[size_t(end)] == token_begin) ++end;
    if (token_begin < token_end) {
      parts_.peers.plan_write(kv, out.peer, out.destination, {token_begin, token_end, layer, end}, plan_);
      parts_.posted.bytes += int64_t(plan_.bytes);
      parts_.posted.descriptors += int64_t(plan_.copies.size());
      const double post_s = parts_.clock.now();
      if (out.bytes == 0) out.first_post_s = post_s;
      out.bytes += int64_t(plan_.bytes);
      ++out.posts;
      const TransferId id = parts_.transport.post(
          {out.peer, KvOp::write, out.destination.registration, parts_.post_deadline(out.until_s, plan_.bytes)}, plan_);
      const TransferState state = parts_.transport.poll(id);
      if (state == TransferState::in_flight) out.in_flight.push_back({id, parts_.memory.pin(kv), post_s, plan_.bytes});
      if (state == TransferState::done) ended(out, post_s, plan_.bytes);
      if (state == TransferState::failed) on(out, Event::post_failed);
      std::fill(out.sent.begin() + layer, out.sent.begin() + end, token_end);
    }
    layer = end;
  }
  parts_.posted.seconds += parts_.clock.now() - start;
}

void Sender::ended(Outgoing& out, double post_s, size_t bytes) {
  out.last_end_s = parts_.clock.now();
  parts_.rate.done(post_s, out.last_end_s, bytes);
}

void Sender::offer(Outgoing& out) {
  const Sequence& first = *out.choices[0];
  Result<RemoteKey> registration = parts_.transport.open(out.peer, KvOp::read,
                                                         rows_of(parts_.memory, out.kv, 0, first.given));
  if (!registration) return on(out, Event::no_registration, {registration.error().message});
  out.registration = registration.value();
  KvPlace source = place_of(parts_.memory, out.kv, out.registration, 0);
  KvOffered offered{out.attempt, first.request, {}, std::move(source)};
  for (const SequencePtr& choice : out.choices) offered.choices.push_back(state_of(*choice));
  out.deadline_s = parts_.new_deadline();
  parts_.tell(out.peer, std::move(offered));
}

// Called when the last transfer has started, not when it is done. While this instance computes the next prompt it
// notices the end late, but D can count arrivals at once. The source blocks stay pinned until then.
void Sender::deliver(Outgoing& out) {
  const bool whole = out.state == State::prefill_sending;
  KvDelivered delivered{.attempt = out.attempt, .kv_arrived = whole, .posts = out.posts};
  if (parts_.order != DisaggOrder::decode_first)
    for (const SequencePtr& choice : out.choices) delivered.choices.push_back(state_of(*choice));
  if (parts_.transport.zero_copy()) {
    delivered.handover = parts_.memory.handoff().hand_over(std::exchange(out.kv, kNoKv));
  }
  out.choices.clear();
  ++parts_.posted.transfers;
  parts_.tell(out.peer, std::move(delivered));
}

void Sender::end(Outgoing& out) {
  const FinishReason why = over(out);
  for (const SequencePtr& choice : out.choices) emit_end(*choice, why, "", parts_.clock.now());
}

void Sender::free(Outgoing& out) {
  if (out.kv != kNoKv) parts_.memory.free(std::exchange(out.kv, kNoKv));
}

// ---- Time.

bool Sender::tick() {
  bool moved = false;
  for (auto i = outgoing_.begin(); i != outgoing_.end();) {
    Outgoing& out = i->second;
    if (kShared.has(out.state) && parts_.clock.now() > out.deadline_s)
      on(out, Event::silent, {"its decode instance stopped responding"});
    moved |= poll(out);
    if (kHolding.has(out.state) && over(out) != FinishReason::none) on(out, Event::request_over);
    // A peer may be reading, so the registration must close first.
    if (kQuiet.has(out.state) && out.in_flight.empty() &&
        (out.registration == RemoteKey{} || parts_.transport.close(out.registration)))
      on(out, Event::quiet);
    const bool finished = out.state == State::gone;
    moved |= finished;
    if (finished && parts_.moved && out.last_end_s > 0)
      parts_.moved({parts_.self, out.peer, out.request, out.first_post_s, out.last_end_s,
                    out.n_tokens - out.destination.cached_tokens, out.bytes});
    i = finished ? outgoing_.erase(i) : std::next(i);
  }
  return moved;
}

bool Sender::poll(Outgoing& out) {
  if (kOver.has(out.state))
    for (const Flight& flight : out.in_flight) parts_.transport.cancel(flight.id);
  return std::erase_if(out.in_flight, [&](const Flight& flight) {
           const TransferState state = parts_.transport.poll(flight.id);
           if (state == TransferState::in_flight) return false;
           if (state == TransferState::failed) on(out, Event::post_failed);
           if (state == TransferState::done) ended(out, flight.post_s, flight.bytes);
           parts_.memory.unpin(flight.lease);
           return true;
         }) > 0;
}

void Sender::clear(FinishReason reason, const std::string& error) {
  for (auto& [attempt, out] : outgoing_) {
    if (kHolding.has(out.state))
      for (const SequencePtr& choice : out.choices) emit_end(*choice, reason, error, parts_.clock.now());
    on(out, Event::shut_down);
  }
}

void Sender::add_shared(SharedAttempts& of_peer) const {
  for (const auto& [attempt, out] : outgoing_)
    if (kShared.has(out.state)) of_peer[out.peer].push_back(attempt);
}

int Sender::sending() const {
  constexpr Any<State> kHeld = kHolding | State::prefill_sending;
  return int(std::ranges::count_if(
      outgoing_, [&](const auto& entry) { return kHeld.has(entry.second.state) && entry.second.kv != kNoKv; }));
}

}  // namespace xpyd::disagg::handover
