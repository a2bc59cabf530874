// Receiver: room for KV that arrives, and what happens when it has arrived or has failed.
#include <algorithm>

#include "disagg/handover/receiver.h"
#include "disagg/messages.h"

namespace xpyd::disagg::handover {

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

}  // namespace xpyd::disagg::handover
