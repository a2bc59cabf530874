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
