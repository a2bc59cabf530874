#include "disagg/pool/fetcher.h"

#include <algorithm>
#include <climits>
#include <utility>

#include "disagg/messages.h"

namespace xpyd::disagg::pool {

// A sequence that has started waits for this. Either its fetch or the sequence may end first.
class Fetcher::Arrival final : public KvArrival {
 public:
  Arrival(Fetcher& fetcher, AttemptId attempt) : fetcher_(&fetcher), attempt_(attempt) {}
  bool wait(int layer) override { return fetcher_ ? fetcher_->wait(fetcher_->fetches_.at(attempt_), layer) : whole_; }
  bool is_whole() override { return wait(INT_MAX); }
  void over(bool whole) { fetcher_ = nullptr, whole_ = whole; }

 private:
  Fetcher* fetcher_;  // null: the fetch is over
  const AttemptId attempt_;
  bool whole_ = false;
};

void Fetcher::start(StartRequest message) {
  const double now = parts_.clock.now();
  const Request& request = *message.request;
  Fetch fetch{.message = {},
              .attempt = message.attempt,
              .request = request.id,
              .salt = kv_salt(request, message.attempt),
              .worth_s = message.fetch.worth_s,
              .tokens = request.prompt,
              .asked_s = now,
              .until_s = now + message.fetch.limit_s};
  fetch.tokens.insert(fetch.tokens.end(), message.state.output.begin(), message.state.output.end());
  if (request.deadline_s > 0) fetch.until_s = std::min(fetch.until_s, request.deadline_s);
  fetch.wanted = std::min(message.fetch.tokens, int(fetch.tokens.size()) - 1);
  const auto room = room_.fetch(fetch.tokens, fetch.salt, fetch.wanted, message.fetch.keep);
  if (!room) return begin_(std::move(message), kNoKv, 0, nullptr);
  fetch.message = std::move(message);
  fetch.kv = room->handle;
  fetch.here = room->cached_tokens;
  ask(fetches_.emplace(fetch.attempt, std::move(fetch)).first->second);
}

// Asks each holder for a part of whole blocks.
void Fetcher::ask(Fetch& fetch) {
  const FetchOrder& order = fetch.message.fetch;
  const int block = parts_.memory.stats().block_tokens, n = int(order.holders.size());
  const int wanted = fetch.wanted - fetch.here;
  for (int i = 0; i < n; ++i) {
    const auto edge = [&](int64_t part) {
      return part == n ? wanted : std::min(wanted, int(wanted * part / n + block - 1) / block * block);
    };
    if (edge(i) == edge(i + 1)) continue;
    fetch.parts.push_back(
        {.holder = order.holders[size_t(i)], .begin = fetch.here + edge(i), .end = fetch.here + edge(i + 1)});
    Part& part = fetch.parts.back();
    if (!parts_.peers.contains(part.holder)) {
      part.state = Part::lost;
      continue;
    }
    // The message has one token more, because a memory never finds the last token of a prompt.
    parts_.tell(
        part.holder,
        FetchKv{fetch.attempt, fetch.salt, part.begin, {fetch.tokens.begin(), fetch.tokens.begin() + part.end + 1}});
  }
}

void Fetcher::handle(InstanceId from, KvLent message) {
  const auto found = fetches_.find(message.attempt);
  if (found == fetches_.end()) return parts_.tell(from, FetchOver{message.attempt});
  Fetch& fetch = found->second;
  const auto part = std::ranges::find_if(fetch.parts,
                                         [from](const Part& p) { return p.holder == from && p.state == Part::asked; });
  if (part == fetch.parts.end()) return;
  constexpr double kNew = 0.2;  // of the moving mean
  const double took_s = parts_.clock.now() - fetch.asked_s;
  double& ask_s = parts_.fetch.ask_s;
  ask_s = ask_s == 0 ? took_s : (1 - kNew) * ask_s + kNew * took_s;
  read(fetch, *part, message);
}

void Fetcher::read(Fetch& fetch, Part& part, KvLent& lent) {
  part.end = std::min(part.end, lent.tokens);
  if (part.end <= part.begin) return lose(fetch, part);
  if (!parts_.peers.check_place(part.holder, lent.source, part.end)) return lose(fetch, part);
  part.source = std::move(lent.source);
  part.state = Part::reading;
  part.read_s = parts_.clock.now();
  const int layers = by_layer_ && part.source.checksums.empty() ? 1 : parts_.n_layers;
  for (int layer = 0; layer < parts_.n_layers; layer += layers) {
    parts_.peers.plan_read(part.holder, part.source, fetch.kv, {part.begin, part.end, layer, layer + layers}, plan_);
    part.bytes += plan_.bytes;
    part.reads.push_back(
        parts_.transport.post({part.holder, KvOp::read, part.source.registration, fetch.until_s}, plan_));
    parts_.posted.descriptors += int64_t(plan_.copies.size());
  }
  ++parts_.posted.transfers;
  parts_.posted.bytes += int64_t(part.bytes);
  look(fetch, part);
}

void Fetcher::look(Fetch& fetch, Part& part) {
  if (part.state != Part::reading) return;
  for (TransferId& id : part.reads) {
    if (id < 0) continue;
    const TransferState state = parts_.transport.poll(id);
    if (state == TransferState::in_flight) continue;
    id = -1;
    if (state == TransferState::failed) return lose(fetch, part);
  }
  while (part.done < part.reads.size() && part.reads[part.done] < 0) ++part.done;
  if (part.done < part.reads.size()) return;
  const double now = parts_.clock.now();
  parts_.rate.done(part.read_s, now, part.bytes);
  const std::vector<uint64_t>& sums = part.source.checksums;
  if (!sums.empty() && !checksums_are(parts_.memory, fetch.kv, part.begin, part.end, sums)) return lose(fetch, part);
  part.state = Part::here;
  fetch.bytes += int64_t(part.bytes);
  parts_.tell(part.holder, FetchOver{fetch.attempt});
  if (parts_.moved)
    parts_.moved(
        {part.holder, parts_.self, fetch.request, part.read_s, now, part.end - part.begin, int64_t(part.bytes)});
}

// A part that missed its deadline also updates the measured rate: it counts the reads that are done, or one. Otherwise
// the next prompt would be fetched at the old rate, and be late, too.
void Fetcher::lose(Fetch& fetch, Part& part) {
  const double now = parts_.clock.now();
  if (part.state == Part::reading && fetch.until_s > 0 && now >= fetch.until_s)
    parts_.rate.done(part.read_s, now, part.bytes * std::max<size_t>(1, part.done) / part.reads.size());
  part.state = Part::lost;
  ++parts_.fetch.failed;
  parts_.tell(part.holder, FetchOver{fetch.attempt});
}

void Fetcher::peer_gone(InstanceId peer) {
  for (auto& [attempt, fetch] : fetches_)
    for (Part& part : fetch.parts)
      if (part.holder == peer && part.state == Part::asked) part.state = Part::lost, ++parts_.fetch.failed;
}

bool Fetcher::tick() {
  const size_t late = quarantine_.size();
  std::erase_if(quarantine_, [this](Late& l) {
    std::erase_if(l.reads, [this](TransferId id) { return parts_.transport.poll(id) != TransferState::in_flight; });
    if (!l.reads.empty()) return false;
    if (l.kv != kNoKv) parts_.memory.free(l.kv);
    if (l.lease >= 0) parts_.memory.unpin(l.lease);
    return true;
  });
  bool moved = quarantine_.size() < late;
  reading_ = !quarantine_.empty();
  for (auto at = fetches_.begin(); at != fetches_.end();) {
    Fetch& fetch = at->second;
    for (Part& part : fetch.parts) look(fetch, part);
    const auto any = [&](Part::State state) {
      return std::ranges::any_of(fetch.parts, [state](const Part& p) { return p.state == state; });
    };
    const bool unwanted = fetch.arrival && (fetch.arrival.use_count() == 1 || any(Part::lost));
    const bool given_up = parts_.clock.now() > fetch.until_s || attempts_.aborted(at->first) || unwanted;
    if (!given_up && (any(Part::asked) || any(Part::reading))) {
      reading_ |= any(Part::reading);
      if (!fetch.arrival && begins(fetch)) begin(fetch), moved = true;
      ++at;
      continue;
    }
    finish(fetch);
    at = fetches_.erase(at);
    moved = true;
  }
  return moved;
}

// True if the first layer of all parts is there, without a gap.
bool Fetcher::begins(const Fetch& fetch) const {
  int has = fetch.here;
  for (const Part& part : fetch.parts) {
    const bool first = part.state == Part::here || (part.state == Part::reading && part.done > 0);
    if (!first || part.begin != has) return false;
    has = part.end;
  }
  return by_layer_;
}

void Fetcher::begin(Fetch& fetch) {
  fetch.arrival = std::make_shared<Arrival>(*this, fetch.attempt);
  fetch.lease = parts_.memory.pin(fetch.kv);
  begin_(std::move(fetch.message), std::exchange(fetch.kv, kNoKv), fetch.parts.back().end, fetch.arrival);
}

// The engine's step waits meanwhile.
bool Fetcher::wait(Fetch& fetch, int layer) {
  constexpr double kPatience = 1;  // seconds for a layer, because the step has other sequences
  const double began_s = parts_.clock.now(), until_s = std::min(fetch.until_s, began_s + kPatience);
  bool whole = true;
  for (Part& part : fetch.parts) {
    const size_t wanted = std::min(part.reads.size(), size_t(layer) + 1);
    for (look(fetch, part); part.state == Part::reading && part.done < wanted; look(fetch, part)) {
      if (parts_.clock.now() > until_s) lose(fetch, part);
      parts_.clock.sleep(std::clamp((parts_.clock.now() - began_s) / 16, 5e-6, 2e-4));
    }
    whole &= part.state != Part::lost;
  }
  return whole;
}

// Starts the prompt with the tokens that arrived, up to the first gap.
void Fetcher::finish(Fetch& fetch) {
  KvMemory& memory = parts_.memory;
  int has = fetch.here;
  for (const Part& part : fetch.parts)
    if (part.state == Part::here && part.begin == has) has = part.end;
  Late late{fetch.kv, fetch.lease, cancel(fetch)};
  count(fetch, has - fetch.here);
  if (fetch.arrival) {
    fetch.arrival->over(std::ranges::all_of(fetch.parts, [](const Part& p) { return p.state == Part::here; }));
    return quarantine_.push_back(std::move(late));
  }
  if (has > fetch.here)
    memory.commit(fetch.kv, std::span(fetch.tokens).subspan(size_t(fetch.here), size_t(has - fetch.here)));
  if (late.reads.empty()) {
    memory.rollback(fetch.kv);
    return begin_(std::move(fetch.message), fetch.kv, has, nullptr);
  }
  quarantine_.push_back(std::move(late));
  begin_(std::move(fetch.message), kNoKv, 0, nullptr);  // its full blocks are in the prefix cache
}

// Cancels the reads in flight and returns them.
std::vector<TransferId> Fetcher::cancel(Fetch& fetch) {
  std::vector<TransferId> reads;
  for (Part& part : fetch.parts) {
    for (TransferId id : part.reads)
      if (id >= 0) parts_.transport.cancel(id), reads.push_back(id);
    if (part.state < Part::here) lose(fetch, part);
  }
  return reads;
}

void Fetcher::count(const Fetch& fetch, int tokens) {
  parts_.fetch.fetches += tokens > 0;
  parts_.fetch.tokens += tokens;
  if (ended && !fetch.parts.empty())
    ended(
        {fetch.request, fetch.parts[0].holder, fetch.asked_s, parts_.clock.now(), tokens, fetch.bytes, fetch.worth_s});
}

void Fetcher::clear(FinishReason reason, const std::string& error, Attempts& attempts) {
  for (auto& [attempt, fetch] : fetches_) {
    quarantine_.push_back({fetch.kv, fetch.lease, cancel(fetch)});
    if (fetch.arrival) {
      fetch.arrival->over(false);
      continue;
    }
    const StartRequest& m = fetch.message;
    emit_end(*attempts.begin(attempt, m.request, m.state), reason, error, parts_.clock.now());
  }
  fetches_.clear();
  tick();
}

void Fetcher::add_shared(handover::SharedAttempts& of_peer) const {
  for (const auto& [attempt, fetch] : fetches_)
    for (const Part& part : fetch.parts)
      if (part.state < Part::here) of_peer[part.holder].push_back(attempt);
}

}  // namespace xpyd::disagg::pool
