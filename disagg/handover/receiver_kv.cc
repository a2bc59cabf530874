// Receiver: what becomes of KV that has come, or has not.
#include <algorithm>

#include "disagg/handover/receiver.h"
#include "disagg/messages.h"

namespace xpyd::disagg::handover {

// How far what was delivered, or is read, has come.
void Receiver::look(Incoming& in) {
  if (in.state == State::reading) {
    const TransferState read = parts_.wire.poll(in.place.reading);
    if (read == TransferState::in_flight) return;
    in.place.reading = kNoTransfer;
    if (read == TransferState::done) parts_.rate.done(in.read_s, parts_.clock.now(), in.read_bytes);
    on(in, read == TransferState::done ? Event::read_done : Event::read_failed);
  }
  if (in.state == State::finished_prefills && all_arrived(in)) on(in, Event::counted);
  // (A window that is being closed need not count any more.)
  if (in.state == State::closing && room_.close(in.place)) on(in, Event::closed);
  const bool worth_the_wait = parts_.clock.now() <= in.deadline_s && !is_late(in) && !attempts_.aborted(in.attempt);
  if (kCounting.has(in.state) && !worth_the_wait) on(in, Event::late);
  if (kHere.has(in.state)) on(in, Event::adopted);
}

bool Receiver::is_whole(const Incoming& in) const {
  if (in.checksums.empty()) return true;
  // What was read was computed from token 0 on: so is this, with what was here before.
  const int from = in.order == DisaggOrder::pull ? 0 : in.place.cached_tokens;
  return parts_.checksums_are(in.place.kv, from, in.n_computed(), in.checksums);
}

// `whole`: with the KV that came; else it is computed here, in other blocks.
void Receiver::adopt(Incoming& in, bool whole) {
  KvMemory& memory = parts_.memory;
  const uint64_t salt = kv_salt(*in.request, in.attempt);
  const int n_tokens = in.n_computed();
  const auto tokens = std::span<const int32_t>(in.tokens).first(size_t(n_tokens));
  if (in.order == DisaggOrder::pull) parts_.tell(in.from, KvTaken{in.attempt});
  if (!whole) {
    ++stats_.refused_kv;
    room_.give_up(in.place);
  }
  KvHandle kv = std::exchange(in.place.kv, kNoKv);
  if (in.handover) {
    const bool elsewhere = in.handover->between_processes();
    // What another process says is no more than a claim.
    if (!elsewhere || in.handover->tokens == n_tokens)
      kv = memory.handoff().adopt(std::move(*in.handover), tokens, salt);
    if (elsewhere) {
      if (kv == kNoKv) ++stats_.refused_kv;
      parts_.tell(in.from, KvTaken{in.attempt});
    }
  } else if (kv != kNoKv) {
    memory.unpin(in.place.lease);
    memory.written(kv, tokens.subspan(size_t(std::min(in.place.cached_tokens, n_tokens))));
  }
  std::vector<SequencePtr> sequences;
  if (in.sequence) {
    sequences.push_back(std::move(in.sequence));
  } else {
    for (const ChoiceState& state : in.choices) sequences.push_back(attempts_.begin(in.attempt, in.request, state));
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& s = *sequences[i];
    if (in.order == DisaggOrder::decode_first) {
      s.cached_tokens = in.place.cached_tokens;
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

// Nobody here adopts it. Another process's is that one's to discard.
void Receiver::give_back(InstanceId from, AttemptId attempt, std::optional<KvHandover>& handover) {
  if (!handover) return;
  if (handover->between_processes())
    parts_.tell(from, KvTaken{attempt});
  else
    parts_.memory.handoff().discard(std::move(*handover));
  handover.reset();
}

}  // namespace xpyd::disagg::handover
