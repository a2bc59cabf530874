#include "disagg/handover/receiver.h"

#include <algorithm>
#include <limits>

#include "disagg/messages.h"

namespace xpyd::disagg::handover {

void Receiver::on(Incoming& in, Event event, With with) {
  const auto& step = kReceiverTable.step(in.state, event, parts_.visits ? &parts_.visits->receiver : nullptr);
  if (kFinished.has(step.next) && !kFinished.has(in.state)) finished_prefills_.push_back(in.attempt);
  in.state = step.next;
  gone_ += in.state == State::gone;
  switch (step.action) {
    case Action::nothing: return;
    case Action::announce:
      if (in.from < 0) in.from = with.from;
      return announce(in);
    case Action::read: return read(in);
    case Action::hand_out:
      return parts_.tell(kConductor, PrefillJob{in.attempt, in.request, in.choices[0], parts_.self});
    case Action::accept: return accept(in, *with.delivered);
    case Action::give_back: return give_back(with.delivered->handover);
    case Action::adopt: return adopt(in, true);
    case Action::recompute: return adopt(in, false);
    case Action::drop: break;
    case Action::end: end(in); break;
    case Action::give_up:
      // In decode_first the conductor learns of P's failure from D. With push P has told the conductor itself.
      if (!samples_first()) break;
      parts_.tell(kConductor, AttemptFailed{in.attempt, std::move(with.why)});
      break;
    case Action::fail: parts_.tell(kConductor, AttemptFailed{in.attempt, std::move(with.why)}); break;
  }
  // All remaining actions give up the room.
  give_back(in.handover);
  give_up(in.place);
  sweep();
}

Receiver::Incoming* Receiver::find(InstanceId from, AttemptId attempt) {
  auto found = incoming_.find(attempt);
  return found == incoming_.end() || found->second.from != from ? nullptr : &found->second;
}

// Forgets attempts in state gone. Returns whether there were any.
bool Receiver::tidy() {
  if (std::exchange(gone_, 0) == 0) return false;
  const auto gone = [this](AttemptId attempt) { return incoming_.at(attempt).state == State::gone; };
  std::erase_if(remote_prefilling_, gone);
  std::erase_if(finished_prefills_, gone);
  std::erase_if(incoming_, [](const auto& entry) { return entry.second.state == State::gone; });
  return true;
}

// ---- Messages.

void Receiver::expect(Incoming in) {
  remote_prefilling_.push_back(in.attempt);
  incoming_.emplace(in.attempt, std::move(in));
}

void Receiver::start(StartRequest message) {
  Incoming in{.attempt = message.attempt, .request = message.request};
  in.choices.push_back(message.state);
  in.sequence = attempts_.begin(message.attempt, std::move(message.request), message.state);
  in.sequence->queue_ticket = attempts_.ticket(message.attempt, AttemptProgress::started);
  in.tokens = in.sequence->tokens;
  in.deadline_s = std::numeric_limits<double>::infinity();  // until a prefill instance takes it
  expect(std::move(in));
}

// Returns whether a new attempt of the peer can be served. If it cannot, the peer is told.
bool Receiver::is_welcome(InstanceId from, AttemptId attempt, DisaggOrder order) {
  if (order == parts_.order && parts_.peers.contains(from) && !attempts_.aborted(attempt)) return true;
  parts_.tell(from, ReservationCancelled{attempt});
  return false;
}

void Receiver::handle(InstanceId from, ReserveKv message) {
  auto found = incoming_.find(message.attempt);
  if (found != incoming_.end()) {  // decode_first: D has the attempt already
    on(found->second, Event::claimed, {.from = from});
    tidy();
    return;
  }
  if (!is_welcome(from, message.attempt, DisaggOrder::push)) return;
  Incoming in{.attempt = message.attempt, .from = from, .request = std::move(message.request)};
  in.tokens = in.request->prompt;
  in.tokens.insert(in.tokens.end(), message.state.output.begin(), message.state.output.end());
  in.deadline_s = parts_.new_deadline();
  expect(std::move(in));
}

void Receiver::handle(InstanceId from, KvOffered message) {
  if (!is_welcome(from, message.attempt, DisaggOrder::pull)) return;
  Incoming in{.attempt = message.attempt, .from = from};
  in.request = std::move(message.request);
  in.tokens = in.request->prompt;  // P sampled each choice's last token, which has no KV yet
  const std::vector<int32_t>& output = message.choices[0].output;
  in.tokens.insert(in.tokens.end(), output.begin(), output.end() - 1);
  in.choices = std::move(message.choices);
  in.source = std::move(message.source);
  in.deadline_s = parts_.new_deadline();
  expect(std::move(in));
}

void Receiver::handle(InstanceId from, KvDelivered message) {
  if (!parts_.transport.zero_copy()) message.handover.reset();  // only handoff hands over blocks
  Incoming* in = find(from, message.attempt);
  if (!in) return give_back(message.handover);  // the attempt was given up
  const bool is_short = in->state == State::granted && !message.kv_arrived;
  on(*in, is_short ? Event::delivered_short : Event::delivered, {.delivered = &message});
  tidy();
}

void Receiver::accept(Incoming& in, KvDelivered& delivered) {
  if (parts_.order == DisaggOrder::push) in.choices = std::move(delivered.choices);
  in.deadline_s = parts_.new_deadline();
  in.posts = delivered.posts;
  in.handover = std::move(delivered.handover);
}

void Receiver::handle(InstanceId from, const ReservationCancelled& message) {
  Incoming* in = find(from, message.attempt);
  if (!in) return;
  if (samples_first() && request_over(*in))
    on(*in, Event::request_over);  // this instance aborted it
  else
    on(*in, Event::cancelled, {"its prefill instance gave the request up"});
  tidy();
}

void Receiver::renewed(InstanceId from, AttemptId attempt) {
  if (Incoming* in = find(from, attempt)) in->deadline_s = parts_.new_deadline();
}

void Receiver::peer_gone(InstanceId peer) {
  for (auto& [attempt, in] : incoming_) {
    if (in.from != peer) continue;
    if (in.state == State::finished_prefills && all_arrived(in)) on(in, Event::counted);
    on(in, Event::peer_gone);
  }
  tidy();
}

// ---- Room.

// Returns the number of sequences that hold room.
int Receiver::granted() const {
  int n = 0;
  for (const auto& [attempt, in] : incoming_)
    if (!kUngranted.has(in.state) && in.state != State::gone) n += in.request->n;
  return n;
}

bool Receiver::grant(Incoming& in) {
  const auto got = parts_.transport.zero_copy()
                       ? KvRoom::Got::all
                       : room_.arrive(in.place, in.tokens, kv_salt(*in.request, in.attempt), granted());
  if (got == KvRoom::Got::loading && in.state == State::remote_prefilling) on(in, Event::loads);
  if (got != KvRoom::Got::all) return false;
  parts_.tell(kConductor, AttemptProgress{in.attempt, AttemptProgress::granted});
  const bool elsewhere = in.place.cached_tokens < n_computed(in);  // false: all of its KV is here
  switch (parts_.order) {
    case DisaggOrder::push: on(in, Event::room_to_write); break;
    case DisaggOrder::pull: on(in, elsewhere ? Event::room_to_read : Event::room_for_all); break;
    default: on(in, elsewhere ? Event::room_to_claim : Event::room_for_all);
  }
  return true;
}

// Tells the prefill instance where to write.
void Receiver::announce(Incoming& in) {
  KvReserved answer{.attempt = in.attempt};
  if (!parts_.transport.zero_copy()) {
    Place& place = in.place;
    Result<RemoteKey> registration = parts_.transport.open(
        in.from, KvOp::write, rows_of(parts_.memory, place.kv, place.cached_tokens, int(in.tokens.size())));
    if (!registration)
      return on(in, Event::no_registration,
                {"no memory could be registered for its KV: " + registration.error().message});
    place.registration = registration.value();
    answer.destination = place_of(parts_.memory, place.kv, place.registration, place.cached_tokens);
  }
  in.deadline_s = parts_.new_deadline();
  parts_.tell(in.from, std::move(answer));
}

void Receiver::read(Incoming& in) {
  const double start = parts_.clock.now();
  const int n_tokens = int(in.tokens.size());
  parts_.peers.plan_read(in.from, in.source, in.place.kv, {in.place.cached_tokens, n_tokens, 0, parts_.n_layers},
                         plan_);
  in.read_s = parts_.clock.now();
  in.read_bytes = plan_.bytes;
  in.place.reading = parts_.transport.post(
      {in.from, KvOp::read, in.source.registration, parts_.post_deadline(in.request->deadline_s, plan_.bytes)}, plan_);
  ++parts_.posted.transfers;
  parts_.posted.bytes += int64_t(plan_.bytes);
  parts_.posted.descriptors += int64_t(plan_.copies.size());
  parts_.posted.seconds += parts_.clock.now() - start;
}

// ---- KV that arrives.

bool Receiver::all_arrived(const Incoming& in) const {
  return in.place.registration == RemoteKey{} || parts_.transport.arrived(in.place.registration) >= in.posts;
}

// Checks how far the transfers of a delivered attempt, or its read, have come.
void Receiver::look(Incoming& in) {
  if (in.state == State::reading) {
    const TransferState read = parts_.transport.poll(in.place.reading);
    if (read == TransferState::in_flight) return;
    in.place.reading = kNoTransfer;
    if (read == TransferState::done) {
      const double now = parts_.clock.now();
      parts_.rate.done(in.read_s, now, in.read_bytes);
      if (parts_.moved)
        parts_.moved({in.from, parts_.self, in.request->id, in.read_s, now,
                      int(in.tokens.size()) - in.place.cached_tokens, int64_t(in.read_bytes)});
    }
    on(in, read == TransferState::done ? Event::read_done : Event::read_failed);
  }
  if (in.state == State::finished_prefills && all_arrived(in)) on(in, Event::counted);
  // A registration that is being closed need not count any more.
  if (in.state == State::closing && close(in.place)) on(in, Event::closed);
  const bool worth_the_wait = parts_.clock.now() <= in.deadline_s && !is_late(in) && !attempts_.aborted(in.attempt);
  if (kCounting.has(in.state) && !worth_the_wait) on(in, Event::late);
  if (kHere.has(in.state)) on(in, Event::adopted);
}

// Gives the sequences to the engine. If not `whole`, it computes the prompt again, in other blocks.
void Receiver::adopt(Incoming& in, bool whole) {
  KvMemory& memory = parts_.memory;
  const uint64_t salt = kv_salt(*in.request, in.attempt);
  const int n_tokens = n_computed(in);
  const auto tokens = std::span<const int32_t>(in.tokens).first(size_t(n_tokens));
  if (parts_.order == DisaggOrder::pull) parts_.tell(in.from, KvTaken{in.attempt});
  parts_.tell(kConductor, AttemptProgress{in.attempt, AttemptProgress::joined});
  if (!whole) {
    ++stats_.refused_kv;
    give_up(in.place);
  }
  KvHandle kv = std::exchange(in.place.kv, kNoKv);
  if (in.handover) {
    kv = memory.handoff().adopt(std::move(*in.handover), tokens, salt);
  } else if (kv != kNoKv) {
    memory.unpin(in.place.lease);
    memory.commit(kv, tokens.subspan(size_t(std::min(in.place.cached_tokens, n_tokens))));
  }
  std::vector<SequencePtr> sequences;
  if (in.sequence) {
    sequences.push_back(std::move(in.sequence));
  } else {
    for (const ChoiceState& state : in.choices) sequences.push_back(attempts_.begin(in.attempt, in.request, state));
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& s = *sequences[i];
    if (samples_first()) {
      s.cached_tokens = in.place.cached_tokens;
      s.scheduled_s = parts_.clock.now();
    }
    const Result<KvHandle> own = i == 0 || kv == kNoKv ? Result<KvHandle>(kv) : memory.fork(kv);
    if (own) s.kv = own.value();
    if (s.kv == kNoKv) {
      s.probed = s.scheduled = true;  // it has begun at P
      engine_.submit(std::move(sequences[i]));
    } else {
      s.computed = n_tokens;
      engine_.adopt(std::move(sequences[i]));
    }
  }
}

// Gives back blocks that were handed over and are not adopted.
void Receiver::give_back(std::optional<KvHandover>& handover) {
  if (handover) parts_.memory.handoff().discard(std::move(*handover));
  handover.reset();
}

// ---- Room that is given back.

// Returns whether nobody can write there any more.
bool Receiver::close(Place& place) {
  if (place.registration == RemoteKey{}) return true;
  if (!parts_.transport.close(place.registration)) return false;
  place.registration = {};
  return true;
}

// Gives up the KV. Its blocks are freed when no transfer can touch them any more.
void Receiver::give_up(Place& place) {
  if (place.kv == kNoKv) return;
  const bool somebody_inside = place.registration != RemoteKey{} || place.reading != kNoTransfer;
  if (place.reading != kNoTransfer) parts_.transport.cancel(place.reading);
  if (!somebody_inside && place.lease != kNoLease) parts_.memory.unpin(place.lease);
  parts_.memory.free(place.kv);
  place.kv = kNoKv;
  if (somebody_inside) quarantine_.push_back(place);
}

bool Receiver::sweep() {
  return std::erase_if(quarantine_, [this](Place& place) {
           if (place.reading != kNoTransfer && parts_.transport.poll(place.reading) == TransferState::in_flight)
             return false;
           place.reading = kNoTransfer;
           if (!close(place)) return false;
           parts_.memory.unpin(place.lease);
           return true;
         }) > 0;
}

// ---- Time.

bool Receiver::tick() {
  bool moved = sweep();
  for (auto& [attempt, in] : incoming_) {
    if (request_over(in))
      on(in, Event::request_over);
    else if (kLeased.has(in.state) && parts_.clock.now() > in.deadline_s)
      on(in, Event::silent, {"its prefill instance stopped responding"});
  }
  moved |= tidy();
  // Room is granted in turn, so later attempts wait for the first one.
  for (; !remote_prefilling_.empty() && grant(incoming_.at(remote_prefilling_.front())); moved = true)
    remote_prefilling_.pop_front();
  for (AttemptId attempt : finished_prefills_) look(incoming_.at(attempt));
  moved |= tidy();
  return moved;
}

// An attempt that waits here for a P, or to read from one, can end here. With push P ends it.
bool Receiver::request_over(const Incoming& in) const {
  const bool gone = attempts_.aborted(in.attempt);
  if (parts_.order == DisaggOrder::pull) return gone && kUngranted.has(in.state);
  return samples_first() && kUndelivered.has(in.state) && (gone || is_late(in));
}

bool Receiver::is_late(const Incoming& in) const {
  return in.request->deadline_s > 0 && parts_.clock.now() > in.request->deadline_s;
}

void Receiver::end(Incoming& in) {
  if (in.sequence)
    emit_end(*in.sequence, attempts_.aborted(in.attempt) ? FinishReason::abort : FinishReason::timeout, "",
             parts_.clock.now());
  if (in.from >= 0) parts_.tell(in.from, ReservationCancelled{in.attempt});
}

void Receiver::add_shared(SharedAttempts& of_peer) const {
  for (const auto& [attempt, in] : incoming_)
    if (in.from >= 0) of_peer[in.from].push_back(attempt);
}

void Receiver::clear(FinishReason reason, const std::string& error) {
  const double now = parts_.clock.now();
  for (auto& [attempt, in] : incoming_) {
    if (in.sequence) {
      emit_end(*in.sequence, reason, error, now);
    } else if (kFinished.has(in.state) && parts_.order == DisaggOrder::push) {
      for (const ChoiceState& state : in.choices)
        emit_end(*attempts_.begin(attempt, in.request, state), reason, error, now);
    }
    on(in, Event::shut_down);
  }
  tidy();
}

}  // namespace xpyd::disagg::handover
