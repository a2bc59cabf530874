#include "disagg/kv_receiver.h"

#include <algorithm>
#include <limits>

#include "disagg/envelope.h"
#include "disagg/place.h"

namespace xpyd {

// ---- What comes in.

void KvReceiver::start(StartRequest message) {
  Incoming in{.order = DisaggOrder::decode_first, .request = message.request};
  in.choices.push_back(message.state);
  in.sequence = attempts_.begin(message.attempt, std::move(message.request), message.state);
  in.sequence->queue_ticket = attempts_.ticket(message.attempt, AttemptProgress::started);
  in.tokens = in.sequence->tokens;
  in.deadline_s = std::numeric_limits<double>::infinity();  // until somebody has taken it
  incoming_.emplace(message.attempt, std::move(in));
  remote_prefilling_.push_back(message.attempt);
}

void KvReceiver::handle(InstanceId from, ReserveKv message) {
  auto found = incoming_.find(message.attempt);
  if (found != incoming_.end()) {  // decode_first: the room is there, or nobody was told of it
    Incoming& in = found->second;
    if (in.order != DisaggOrder::decode_first || in.from >= 0 || !in.granted || in.delivered) return;
    in.from = from;
    promise(message.attempt, in);
    return;
  }
  if (!parts_.peers.contains(from) || attempts_.aborted(message.attempt)) {
    parts_.tell(from, ReservationCancelled{message.attempt});
    return;
  }
  Incoming in{.order = DisaggOrder::push, .from = from, .request = std::move(message.request)};
  in.tokens = in.request->prompt;
  in.tokens.insert(in.tokens.end(), message.state.output.begin(), message.state.output.end());
  in.deadline_s = parts_.new_deadline();
  incoming_.emplace(message.attempt, std::move(in));
  remote_prefilling_.push_back(message.attempt);
}

void KvReceiver::handle(InstanceId from, KvOffered message) {
  if (has(message.attempt)) return;
  if (!parts_.peers.contains(from) || attempts_.aborted(message.attempt)) {
    parts_.tell(from, ReservationCancelled{message.attempt});
    return;
  }
  Incoming in{.order = DisaggOrder::pull, .from = from, .request = std::move(message.request)};
  in.tokens = in.request->prompt;  // each choice's last token was sampled there, and has no KV yet
  const std::vector<int32_t>& output = message.choices[0].output;
  in.tokens.insert(in.tokens.end(), output.begin(), output.end() - 1);
  if (Status fits = parts_.check_place(from, message.source, int(in.tokens.size())); !fits) {
    parts_.tell(kConductor, AttemptFailed{message.attempt, AttemptFailure::refused, fits.error().message});
    parts_.tell(from, ReservationCancelled{message.attempt});
    return;
  }
  in.choices = std::move(message.choices);
  in.source = std::move(message.source);
  in.deadline_s = parts_.new_deadline();
  incoming_.emplace(message.attempt, std::move(in));
  remote_prefilling_.push_back(message.attempt);
}

void KvReceiver::handle(InstanceId from, KvDelivered message) {
  if (!parts_.wire.zero_copy()) message.handover.reset();  // it comes from another process
  auto found = incoming_.find(message.attempt);
  if (found == incoming_.end() || found->second.from != from || !found->second.granted ||
      found->second.delivered) {  // given up meanwhile
    give_back(from, message.attempt, message.handover);
    return;
  }
  Incoming& in = found->second;
  if (in.order == DisaggOrder::push) {
    // It comes from another process: each choice is one token further than the prompt's KV.
    const size_t next = in.tokens.size() + 1 - in.request->prompt.size();
    const bool sound = std::ranges::all_of(message.choices, [&](const ChoiceState& state) {
      return state.output.size() == next && next < size_t(in.request->max_tokens) &&
             state.choice + state.stands_for <= in.n_choices();
    });
    if (message.choices.empty() || !sound) {
      give_back(from, message.attempt, message.handover);
      parts_.tell(kConductor,
                  AttemptFailed{message.attempt, AttemptFailure::refused, "its delivery does not fit the request"});
      return drop(message.attempt);
    }
    in.choices = std::move(message.choices);
  }
  in.delivered = true;
  in.deadline_s = parts_.new_deadline();
  in.arrived = message.kv_arrived;
  in.posts = message.posts;
  in.checksums = std::move(message.checksums);
  in.handover = std::move(message.handover);
  finished_prefills_.push_back(message.attempt);
}

void KvReceiver::handle(InstanceId from, const ReservationCancelled& message) {
  auto found = incoming_.find(message.attempt);
  if (found == incoming_.end() || found->second.from != from) return;
  Incoming& in = found->second;
  if (in.delivered) {  // a post has failed after the delivery
    in.arrived = in.arrived && in.posts == 0;
    return;
  }
  if (in.order == DisaggOrder::decode_first) {
    // The prefill instance could not: the conductor knows, unless it was this instance's abort.
    if (!drop_ended(message.attempt, in))
      parts_.tell(kConductor, AttemptFailed{message.attempt, AttemptFailure::given_up, "its prefill was given up"});
  }
  drop(message.attempt);
}

void KvReceiver::renewed(InstanceId from, AttemptId attempt) {
  auto found = incoming_.find(attempt);
  if (found != incoming_.end() && found->second.from == from) found->second.deadline_s = parts_.new_deadline();
}

// What was delivered goes on: with the KV, where all of it has arrived, or without.
void KvReceiver::peer_gone(InstanceId peer, const std::string& why) {
  std::vector<AttemptId> gone;
  for (auto& [attempt, in] : incoming_) {
    if (in.from != peer) continue;
    if (!in.delivered || in.order == DisaggOrder::pull)
      gone.push_back(attempt);
    else if (in.window && parts_.wire.arrived(*in.window) < in.posts)
      in.arrived = false;
  }
  for (AttemptId attempt : gone) {
    if (!why.empty()) parts_.tell(kConductor, AttemptFailed{attempt, AttemptFailure::connection_lost, why});
    drop(attempt);
  }
}

// ---- Room.

bool KvReceiver::grant_waiting() {
  bool moved = false;
  while (!remote_prefilling_.empty()) {
    const AttemptId attempt = remote_prefilling_.front();
    if (!grant(attempt, incoming_.at(attempt))) break;
    remote_prefilling_.pop_front();
    moved = true;
  }
  return moved;
}

// Promises only what fits now: a place in the batch for every choice and, where bytes are to be
// copied, the blocks of the whole prompt. Preempted sequences take no place: they wait for memory,
// and with a shared pool that memory may be what the prompts to be handed over hold.
bool KvReceiver::grant(AttemptId attempt, Incoming& in) {
  const int sequences = engine_.running() + engine_.waiting_with_kv() + granted_choices_;
  if (sequences > 0 && sequences + in.n_choices() > parts_.max_batch) return false;
  if (!parts_.wire.zero_copy()) {
    const KvStats kv = parts_.memory.stats();
    const int n_tokens = int(in.tokens.size());
    const int spare = sequences == 0 ? 0 : kv.capacity / 100;
    const int need = (n_tokens + kv.block_tokens - 1) / kv.block_tokens -
                     parts_.memory.probe(in.tokens, kv_salt(*in.request, attempt)) / kv.block_tokens;
    if ((in.kv == kNoKv && need + spare > kv.available()) || !reserve(attempt, in)) return false;
  }
  in.granted = true;
  granted_choices_ += in.n_choices();
  switch (in.order) {
    case DisaggOrder::push: promise(attempt, in); break;
    case DisaggOrder::pull:
      read(in);
      finished_prefills_.push_back(attempt);
      break;
    default:
      if (int(in.tokens.size()) - in.cached_tokens <= 1) {  // nothing to compute elsewhere
        in.delivered = true;
        finished_prefills_.push_back(attempt);
      } else {
        parts_.tell(kConductor, PrefillJob{attempt, in.request, in.choices[0], parts_.self});
      }
  }
  return true;
}

// What a tier of this instance has need not cross: it is loaded while the other one computes. Until
// it is there those who came later wait, too, and nothing but it is held.
bool KvReceiver::reserve(AttemptId attempt, Incoming& in) {
  KvMemory& memory = parts_.memory;
  if (in.kv == kNoKv) {
    const Result<KvReservation> reserved = memory.reserve(in.tokens, kv_salt(*in.request, attempt));
    if (!reserved) return false;
    in.kv = reserved.value().handle;
    in.loading = reserved.value().loading;
  }
  if (!memory.ready(in.kv)) return false;
  in.cached_tokens = memory.written_tokens(in.kv);
  if (!memory.append(in.kv, int(in.tokens.size()) - in.cached_tokens)) {
    if (!in.loading) memory.free(std::exchange(in.kv, kNoKv));
    return false;
  }
  in.lease = memory.pin(in.kv);
  return true;
}

// Tells the prefill instance where to write.
void KvReceiver::promise(AttemptId attempt, Incoming& in) {
  KvReserved answer{.attempt = attempt};
  if (!parts_.wire.zero_copy()) {
    Result<WindowKey> window = parts_.wire.open(in.from, KvOp::write,
                                                parts_.ranges(in.kv, in.cached_tokens, int(in.tokens.size())));
    if (!window) {  // given up at the next poll
      in.refusal = window.error().message;
      in.deadline_s = parts_.clock.now();
      return;
    }
    in.window = window.value();
    answer.destination = place_of(parts_.memory, in.kv, window.value(), in.cached_tokens);
  }
  in.deadline_s = parts_.new_deadline();
  parts_.tell(in.from, std::move(answer));
}

void KvReceiver::read(Incoming& in) {
  in.delivered = true;
  const int n_tokens = int(in.tokens.size());
  if (in.cached_tokens >= n_tokens) return;
  const double start = parts_.clock.now();
  parts_.plan_read(in.from, in.source, in.kv, {in.cached_tokens, n_tokens, 0, parts_.n_layers}, plan_);
  in.checksums = in.source.checksums;
  in.read_s = parts_.clock.now();
  in.read_bytes = plan_.bytes;
  in.reading = parts_.wire.post(
      {in.from, KvOp::read, in.source.window, parts_.post_deadline(in.request->deadline_s, plan_.bytes)}, plan_);
  ++stats_.transfers;
  stats_.bytes += int64_t(plan_.bytes);
  stats_.descriptors += int64_t(plan_.copies.size());
  stats_.seconds += parts_.clock.now() - start;
}

// ---- What has come.

bool KvReceiver::poll() {
  bool moved = free_quarantined();
  const double now = parts_.clock.now();
  std::vector<AttemptId> over;
  for (auto& [attempt, in] : incoming_) {
    if (drop_ended(attempt, in)) {
      over.push_back(attempt);
    } else if (now > in.deadline_s && !(in.delivered && in.order != DisaggOrder::pull)) {
      ++stats_.expired;
      parts_.tell(kConductor,
                  in.refusal.empty()
                      ? AttemptFailed{attempt, AttemptFailure::peer_silent, "its prefill instance is silent"}
                      : AttemptFailed{attempt, AttemptFailure::refused, "no window for it: " + in.refusal});
      over.push_back(attempt);
    }
  }
  for (AttemptId attempt : over) drop(attempt);
  moved |= !over.empty();
  moved |= grant_waiting();
  moved |= std::erase_if(finished_prefills_, [this](AttemptId attempt) {
             auto found = incoming_.find(attempt);
             if (found == incoming_.end()) return true;
             if (!finish(attempt, found->second)) return false;
             incoming_.erase(found);
             return true;
           }) > 0;
  return moved;
}

// Who waits here for a prefill instance, or to read from one, can end here.
bool KvReceiver::drop_ended(AttemptId attempt, Incoming& in) {
  const double now = parts_.clock.now();
  const bool gone = attempts_.aborted(attempt);
  if (in.order == DisaggOrder::pull) {
    if (gone && in.from >= 0 && !in.granted) {
      parts_.tell(in.from, ReservationCancelled{attempt});
      return true;
    }
    return false;
  }
  if (in.order != DisaggOrder::decode_first || in.delivered) return false;
  const bool late = in.request->deadline_s > 0 && now > in.request->deadline_s;
  if (!gone && !late) return false;
  emit_end(*in.sequence, gone ? FinishReason::abort : FinishReason::timeout, "", now);
  if (in.from >= 0) parts_.tell(in.from, ReservationCancelled{attempt});
  return true;
}

// True: the attempt's sequences are in the engine.
bool KvReceiver::finish(AttemptId attempt, Incoming& in) {
  if (in.reading) {
    const TransferState state = parts_.wire.poll(*in.reading);
    if (state == TransferState::in_flight) return false;
    in.reading.reset();
    in.arrived = state == TransferState::done;
    if (in.arrived) parts_.rate.done(in.read_s, parts_.clock.now(), in.read_bytes);
  }
  if (in.window) {
    if (in.arrived) {
      const bool whole = parts_.wire.arrived(*in.window) >= in.posts;
      if (whole) in.posts = 0;  // a window that is being closed need not count any more
      if (!whole || !parts_.wire.close(*in.window)) {
        if (is_coming(attempt, in)) return false;
        in.arrived = false;
      }
    }
    if (!in.arrived) {  // computed here, in other blocks: these wait for whoever still writes there
      parts_.memory.free(std::exchange(in.kv, kNoKv));
      quarantine_.push_back({in.window, {}, in.lease});
    }
    in.window.reset();
  }
  const bool whole = in.arrived && (parts_.wire.zero_copy() || is_whole(in));
  if (in.order == DisaggOrder::pull) parts_.tell(in.from, KvTaken{attempt});
  if (!whole) ++stats_.refused_kv;
  adopt(attempt, in, whole);
  granted_choices_ -= in.n_choices();
  return true;
}

// Whether posts that were delivered, and have not arrived, are worth the wait.
bool KvReceiver::is_coming(AttemptId attempt, const Incoming& in) const {
  const double now = parts_.clock.now();
  const bool late = in.request->deadline_s > 0 && now > in.request->deadline_s;
  return now <= in.deadline_s && !late && !attempts_.aborted(attempt);
}

bool KvReceiver::is_whole(const Incoming& in) const {
  if (in.checksums.empty()) return true;
  // What was read was computed from token 0 on: so is this, with what was here before.
  const int from = in.order == DisaggOrder::pull ? 0 : in.cached_tokens;
  const int to = int(in.tokens.size()) - (in.order == DisaggOrder::decode_first ? 1 : 0);
  return parts_.checksums_are(in.kv, from, to, in.checksums);
}

void KvReceiver::adopt(AttemptId attempt, Incoming& in, bool whole) {
  KvMemory& memory = parts_.memory;
  const uint64_t salt = kv_salt(*in.request, attempt);
  // decode_first: the last token is computed here, and the first one sampled.
  const int n_tokens = int(in.tokens.size()) - (in.order == DisaggOrder::decode_first ? 1 : 0);
  const auto tokens = std::span<const int32_t>(in.tokens).first(size_t(n_tokens));
  KvHandle kv = std::exchange(in.kv, kNoKv);
  if (in.handover) {
    const bool elsewhere = in.handover->between_processes();
    // What another process says is no more than a claim.
    if (!elsewhere || in.handover->tokens == n_tokens)
      kv = memory.handoff().adopt(std::move(*in.handover), tokens, salt);
    if (elsewhere) {
      if (kv == kNoKv) ++stats_.refused_kv;
      parts_.tell(in.from, KvTaken{attempt});
    }
  } else if (kv != kNoKv) {
    memory.unpin(in.lease);
    if (whole) {
      memory.written(kv, tokens.subspan(size_t(std::min(in.cached_tokens, n_tokens))));
    } else {
      memory.free(std::exchange(kv, kNoKv));
    }
  }
  std::vector<SequencePtr> sequences;
  if (in.sequence) {
    sequences.push_back(std::move(in.sequence));
  } else {
    for (const ChoiceState& state : in.choices) sequences.push_back(attempts_.begin(attempt, in.request, state));
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& s = *sequences[i];
    if (in.order == DisaggOrder::decode_first) {
      s.cached_tokens = in.cached_tokens;
      s.scheduled_s = parts_.clock.now();
    }
    const Result<KvHandle> own = i == 0 || kv == kNoKv ? Result<KvHandle>(kv) : memory.fork(kv);
    if (own) s.kv = own.value();
    if (s.kv == kNoKv) {
      s.probed = s.scheduled = true;  // begun elsewhere
      engine_.submit(std::move(sequences[i]));
    } else {
      s.computed = n_tokens;
      engine_.adopt(std::move(sequences[i]));
    }
  }
}

// The reservation is broken: its blocks come back once nobody can touch them any more.
void KvReceiver::drop(AttemptId attempt) {
  auto found = incoming_.find(attempt);
  Incoming& in = found->second;
  if (in.granted) {
    granted_choices_ -= in.n_choices();
  } else {
    std::erase(remote_prefilling_, attempt);
  }
  std::erase(finished_prefills_, attempt);
  give_back(in.from, attempt, in.handover);
  if (in.kv != kNoKv) {
    if (in.reading) parts_.wire.cancel(*in.reading);
    parts_.memory.free(in.kv);
    if (in.granted) quarantine_.push_back({in.window, in.reading, in.lease});
  }
  incoming_.erase(found);
  free_quarantined();
}

// Nobody here adopts it. Another process's is that one's to discard.
void KvReceiver::give_back(InstanceId from, AttemptId attempt, std::optional<KvHandover>& handover) {
  if (!handover) return;
  if (handover->between_processes())
    parts_.tell(from, KvTaken{attempt});
  else
    parts_.memory.handoff().discard(std::move(*handover));
  handover.reset();
}

bool KvReceiver::free_quarantined() {
  return std::erase_if(quarantine_, [this](Quarantine& q) {
           if (q.reading && parts_.wire.poll(*q.reading) == TransferState::in_flight) return false;
           q.reading.reset();
           if (q.window && !parts_.wire.close(*q.window)) return false;
           parts_.memory.unpin(q.lease);
           return true;
         }) > 0;
}

void KvReceiver::renewals(std::unordered_map<InstanceId, std::vector<AttemptId>>& of_peer) const {
  for (const auto& [attempt, in] : incoming_)
    if (in.from >= 0) of_peer[in.from].push_back(attempt);
}

void KvReceiver::clear(FinishReason reason, const std::string& error) {
  while (!incoming_.empty()) {
    Incoming& in = incoming_.begin()->second;
    const double now = parts_.clock.now();
    if (in.sequence) {
      emit_end(*in.sequence, reason, error, now);
    } else if (in.delivered && in.order == DisaggOrder::push) {
      for (const ChoiceState& state : in.choices)
        emit_end(*attempts_.begin(incoming_.begin()->first, in.request, state), reason, error, now);
    }
    drop(incoming_.begin()->first);
  }
}

}  // namespace xpyd
