#include "disagg/pool/fetcher.h"

#include <algorithm>
#include <utility>

#include "disagg/messages.h"

namespace xpyd::disagg::pool {

void Fetcher::start(StartRequest message) {
  if (!ask(message, false)) begin_(std::move(message), kNoKv, 0);
}

void Fetcher::handle(InstanceId, CopyKv message) {
  const Request& request = *message.request;
  const int here = parts_.memory.matched_tokens(request.prompt, kv_salt(request, message.attempt));
  if (here >= message.tokens) return;
  const size_t bytes = size_t(message.tokens) * parts_.memory.layout().shape.token_bytes();
  const double limit_s = parts_.post_deadline(0, bytes) - parts_.clock.now();  // as that of a transfer from P
  StartRequest start{.attempt = message.attempt,
                     .request = std::move(message.request),
                     .fetch = {.holder = message.holder, .tokens = message.tokens, .limit_s = limit_s}};
  parts_.fetch.copies_dropped += !ask(start, true);
}

// Reserves room and asks the holder. False: there is no room, and the message is as before.
bool Fetcher::ask(StartRequest& message, bool copy) {
  const double now = parts_.clock.now();
  const Request& request = *message.request;
  const uint64_t salt = kv_salt(request, message.attempt);
  Fetch fetch{.message = {},
              .holder = message.fetch.holder,
              .tokens = request.prompt,
              .copy = copy,
              .asked_s = now,
              .until_s = now + message.fetch.limit_s};
  fetch.tokens.insert(fetch.tokens.end(), message.state.output.begin(), message.state.output.end());
  if (request.deadline_s > 0) fetch.until_s = std::min(fetch.until_s, request.deadline_s);
  fetch.end = std::min(message.fetch.tokens, int(fetch.tokens.size()) - 1);
  const auto room = room_.fetch(fetch.tokens, salt, fetch.end);
  if (!room) return false;
  fetch.message = std::move(message);
  fetch.kv = room->handle;
  fetch.begin = room->cached_tokens;
  const AttemptId attempt = fetch.message.attempt;
  if (!parts_.peers.contains(fetch.holder)) {
    fetch.state = Fetch::lost;
  } else {
    // The message has one token more, because a memory never finds the last token of a prompt.
    parts_.tell(fetch.holder,
                FetchKv{attempt, salt, fetch.begin, {fetch.tokens.begin(), fetch.tokens.begin() + fetch.end + 1}});
  }
  fetches_.emplace(attempt, std::move(fetch));
  return true;
}

void Fetcher::handle(InstanceId from, KvLent message) {
  const auto found = fetches_.find(message.attempt);
  if (found == fetches_.end()) return parts_.tell(from, FetchOver{message.attempt});
  Fetch& fetch = found->second;
  if (fetch.holder != from || fetch.state != Fetch::asked) return;
  constexpr double kNew = 0.2;  // of the moving mean
  const double took_s = parts_.clock.now() - fetch.asked_s;
  double& ask_s = parts_.fetch.ask_s;
  ask_s = ask_s == 0 ? took_s : (1 - kNew) * ask_s + kNew * took_s;
  fetch.end = std::min(fetch.end, message.tokens);
  if (fetch.end <= fetch.begin) return lose(fetch);
  fetch.source = std::move(message.source);
  fetch.state = Fetch::reading;
  fetch.read_s = parts_.clock.now();
  parts_.peers.plan_read(from, fetch.source, fetch.kv, {fetch.begin, fetch.end, 0, parts_.n_layers}, plan_);
  fetch.bytes = plan_.bytes;
  fetch.read = parts_.transport.post({from, KvOp::read, fetch.source.registration, fetch.until_s}, plan_);
  parts_.posted.descriptors += int64_t(plan_.copies.size());
  ++parts_.posted.transfers;
  parts_.posted.bytes += int64_t(fetch.bytes);
  look(fetch);
}

void Fetcher::look(Fetch& fetch) {
  if (fetch.state != Fetch::reading) return;
  const TransferState state = parts_.transport.poll(fetch.read);
  if (state == TransferState::in_flight) return;
  fetch.read = handover::kNoTransfer;
  if (state == TransferState::failed) return lose(fetch);
  const double now = parts_.clock.now();
  parts_.rate.done(fetch.read_s, now, fetch.bytes);
  fetch.state = Fetch::here;
  parts_.tell(fetch.holder, FetchOver{fetch.message.attempt});
  if (parts_.moved)
    parts_.moved({fetch.holder, parts_.self, fetch.message.request->id, fetch.read_s, now, fetch.end - fetch.begin,
                  int64_t(fetch.bytes), fetch.copy ? "copy" : "fetch"});
}

// A read that missed its deadline also updates the measured rate, as if it had just ended. Otherwise the next prompt
// would be fetched at the old rate, and be late, too.
void Fetcher::lose(Fetch& fetch) {
  const double now = parts_.clock.now();
  if (fetch.state == Fetch::reading && fetch.until_s > 0 && now >= fetch.until_s)
    parts_.rate.done(fetch.read_s, now, fetch.bytes);
  fetch.state = Fetch::lost;
  ++parts_.fetch.failed;
  parts_.tell(fetch.holder, FetchOver{fetch.message.attempt});
}

void Fetcher::peer_gone(InstanceId peer) {
  for (auto& [attempt, fetch] : fetches_)
    if (fetch.holder == peer && fetch.state == Fetch::asked) fetch.state = Fetch::lost, ++parts_.fetch.failed;
}

bool Fetcher::tick() {
  bool moved = std::erase_if(quarantine_, [this](const Late& late) {
                 if (parts_.transport.poll(late.read) == TransferState::in_flight) return false;
                 parts_.memory.free(late.kv);
                 return true;
               }) > 0;
  reading_ = !quarantine_.empty();
  for (auto at = fetches_.begin(); at != fetches_.end();) {
    Fetch& fetch = at->second;
    look(fetch);
    const bool given_up = parts_.clock.now() > fetch.until_s || attempts_.aborted(at->first);
    if (!given_up && fetch.state < Fetch::here) {
      reading_ |= fetch.state == Fetch::reading;
      ++at;
      continue;
    }
    finish(fetch);
    at = fetches_.erase(at);
    moved = true;
  }
  return moved;
}

// Starts the prompt with the tokens that are here. Those of a copy stay cached.
void Fetcher::finish(Fetch& fetch) {
  KvMemory& memory = parts_.memory;
  const int has = fetch.state == Fetch::here ? fetch.end : fetch.begin;
  const bool free = give_up(fetch);
  count(fetch, has - fetch.begin);
  if (free && has > fetch.begin)
    memory.commit(fetch.kv, std::span(fetch.tokens).subspan(size_t(fetch.begin), size_t(has - fetch.begin)));
  if (free) memory.rollback(fetch.kv);
  if (!fetch.copy) return begin_(std::move(fetch.message), free ? fetch.kv : kNoKv, free ? has : 0);
  if (free) memory.free(fetch.kv);
}

// Ends what is not here yet. False: the read may still write, and its blocks are in quarantine.
bool Fetcher::give_up(Fetch& fetch) {
  const bool reads = fetch.read != handover::kNoTransfer;
  if (reads) parts_.transport.cancel(fetch.read);
  if (fetch.state < Fetch::here) lose(fetch);
  if (reads) quarantine_.push_back({fetch.kv, fetch.read});
  return !reads;
}

void Fetcher::count(const Fetch& fetch, int tokens) {
  if (fetch.copy) {
    parts_.fetch.copies += tokens > 0;
    parts_.fetch.copy_bytes += tokens > 0 ? int64_t(fetch.bytes) : 0;
    parts_.fetch.copies_dropped += tokens == 0;
    return;
  }
  parts_.fetch.fetches += tokens > 0;
  parts_.fetch.tokens += tokens;
  if (ended)
    ended({fetch.message.request->id, fetch.holder, fetch.asked_s, parts_.clock.now(), tokens,
           fetch.state == Fetch::here ? int64_t(fetch.bytes) : 0, fetch.message.fetch.worth_s});
}

void Fetcher::clear(FinishReason reason, const std::string& error, Attempts& attempts) {
  for (auto& [attempt, fetch] : fetches_) {
    if (give_up(fetch)) parts_.memory.free(fetch.kv);
    const StartRequest& m = fetch.message;
    if (!fetch.copy) emit_end(*attempts.begin(attempt, m.request, m.state), reason, error, parts_.clock.now());
  }
  fetches_.clear();
  tick();
}

void Fetcher::add_shared(handover::SharedAttempts& of_peer) const {
  for (const auto& [attempt, fetch] : fetches_)
    if (fetch.state < Fetch::here) of_peer[fetch.holder].push_back(attempt);
}

}  // namespace xpyd::disagg::pool
