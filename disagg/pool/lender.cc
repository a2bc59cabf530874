#include "disagg/pool/lender.h"

#include <algorithm>

#include "disagg/messages.h"

namespace xpyd::disagg::pool {

Lender::Lent* Lender::find(InstanceId to, AttemptId attempt) {
  const auto at = std::ranges::find_if(lent_, [&](const Lent& l) { return l.to == to && l.attempt == attempt; });
  return at == lent_.end() ? nullptr : &*at;
}

void Lender::handle(InstanceId from, FetchKv message) {
  constexpr size_t kMost = 64;              // prefixes lent at once
  if (find(from, message.attempt)) return;  // a duplicate from another process
  Lent lent{.to = from,
            .attempt = message.attempt,
            .begin = message.begin,
            .end = int(message.tokens.size()) - 1,
            .deadline_s = parts_.new_deadline()};
  if (lent_.size() < kMost && parts_.peers.contains(from) && message.begin < lent.end &&
      parts_.memory.matched_tokens(message.tokens, message.salt) > message.begin) {
    const Result<KvReservation> reserved = parts_.memory.reserve(message.tokens, message.salt);
    if (reserved) lent.kv = reserved.value().handle;
  }
  if (lent.kv == kNoKv) return parts_.tell(from, KvLent{message.attempt, 0, {}});
  lent_.push_back(std::move(lent));
  if (parts_.memory.ready(lent_.back().kv)) answer(lent_.back());
}

void Lender::handle(InstanceId from, const FetchOver& message) {
  if (Lent* lent = find(from, message.attempt)) lent->over = true;
}

void Lender::renewed(InstanceId from, AttemptId attempt) {
  if (Lent* lent = find(from, attempt)) lent->deadline_s = parts_.new_deadline();
}

void Lender::peer_gone(InstanceId peer) {
  for (Lent& lent : lent_) lent.over |= lent.to == peer;
}

// Lends what has been loaded. It stays until it has been read.
void Lender::answer(Lent& lent) {
  KvMemory& memory = parts_.memory;
  lent.answered = true;
  KvLent said{.attempt = lent.attempt, .tokens = std::min(memory.written_tokens(lent.kv), lent.end), .source = {}};
  Result<RemoteKey> registration = said.tokens > lent.begin
                                       ? parts_.transport.open(lent.to, KvOp::read,
                                                               rows_of(memory, lent.kv, lent.begin, said.tokens))
                                       : Result<RemoteKey>(Error{ErrorCode::unavailable, ""});
  if (registration) {
    lent.registration = registration.value();
    said.source = place_of(memory, lent.kv, lent.registration, lent.begin);
    ++parts_.fetch.lent;
    parts_.fetch.lent_tokens += said.tokens - lent.begin;
  } else {
    said.tokens = 0;
    lent.over = true;
  }
  lent.deadline_s = parts_.new_deadline();
  parts_.tell(lent.to, std::move(said));
}

// Returns false if the reader may still use the registration.
bool Lender::give_back(Lent& lent) {
  if (lent.registration != RemoteKey{} && !parts_.transport.close(lent.registration)) return false;
  parts_.memory.free(lent.kv);
  return true;
}

bool Lender::tick() {
  if (lent_.empty()) return false;
  const double now = parts_.clock.now();
  for (Lent& lent : lent_) {
    if (!lent.over && now > lent.deadline_s) {
      ++parts_.fetch.expired;
      lent.over = true;
    }
    if (!lent.answered && !lent.over && parts_.memory.ready(lent.kv)) answer(lent);
  }
  const bool moved = std::erase_if(lent_, [this](Lent& lent) { return lent.over && give_back(lent); }) > 0;
  waits_ = int(std::ranges::count_if(lent_, &Lent::over));
  return moved;
}

void Lender::clear() {
  for (Lent& lent : lent_) lent.over = true;
  tick();
}

}  // namespace xpyd::disagg::pool
