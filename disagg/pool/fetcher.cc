#include "disagg/pool/fetcher.h"

#include <algorithm>
#include <utility>

#include "disagg/messages.h"

namespace xpyd::disagg::pool {

void Fetcher::start(StartRequest message) {
  Fetch fetch{.message = std::move(message), .asked_s = parts_.clock.now()};
  const StartRequest& m = fetch.message;
  fetch.tokens = m.request->prompt;
  fetch.tokens.insert(fetch.tokens.end(), m.state.output.begin(), m.state.output.end());
  fetch.until_s = fetch.asked_s + m.fetch.limit_s;
  if (const double until = m.request->deadline_s; until > 0) fetch.until_s = std::min(fetch.until_s, until);
  if (!take_room(fetch)) {
    if (fetch.kv != kNoKv) parts_.memory.free(fetch.kv);
    return begin_(std::move(fetch.message), kNoKv, 0);
  }
  ask(fetches_.emplace(m.attempt, std::move(fetch)).first->second);
}

// For all that holders are said to have; a tenth of the memory stays with those who run.
bool Fetcher::take_room(Fetch& fetch) {
  KvMemory& memory = parts_.memory;
  const KvStats kv = memory.stats();
  const int wanted = std::min(fetch.message.fetch.tokens, int(fetch.tokens.size()) - 1);
  const int missing = wanted - memory.probe(fetch.tokens, salt(fetch));
  if (missing <= 0 || missing / kv.block_tokens + 1 + kv.capacity / 10 > kv.available()) return false;
  const Result<KvReservation> reserved = memory.reserve(fetch.tokens, salt(fetch));
  if (!reserved) return false;
  fetch.kv = reserved.value().handle;
  if (reserved.value().loading) return false;  // a tier here has more of it
  fetch.here = reserved.value().cached_tokens;
  return fetch.here < wanted && memory.append(fetch.kv, wanted - fetch.here);
}

// Each holder for a part of whole blocks.
void Fetcher::ask(Fetch& fetch) {
  const FetchOrder& order = fetch.message.fetch;
  const int block = parts_.memory.stats().block_tokens, n = int(order.holders.size());
  const int wanted = std::min(order.tokens, int(fetch.tokens.size()) - 1) - fetch.here;
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
    // One token more than is asked for: a memory never finds the last one of what it is asked for.
    parts_.tell(part.holder, FetchKv{fetch.message.attempt,
                                     salt(fetch),
                                     part.begin,
                                     {fetch.tokens.begin(), fetch.tokens.begin() + part.end + 1}});
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
  parts_.peers.plan_read(part.holder, part.source, fetch.kv, {part.begin, part.end, 0, parts_.n_layers}, plan_);
  part.read_s = parts_.clock.now();
  part.bytes = plan_.bytes;
  part.read = parts_.wire.post({part.holder, KvOp::read, part.source.window, fetch.until_s}, plan_);
  part.state = Part::reading;
  ++parts_.posted.transfers;
  parts_.posted.bytes += int64_t(plan_.bytes);
  parts_.posted.descriptors += int64_t(plan_.copies.size());
  look(fetch, part);
}

void Fetcher::look(Fetch& fetch, Part& part) {
  if (part.state != Part::reading) return;
  const TransferState state = parts_.wire.poll(part.read);
  if (state == TransferState::in_flight) return;
  part.read = -1;
  if (state == TransferState::failed) return lose(fetch, part);
  const double now = parts_.clock.now();
  parts_.rate.done(part.read_s, now, part.bytes);
  const std::vector<uint64_t>& sums = part.source.checksums;
  if (!sums.empty() && !checksums_are(parts_.memory, fetch.kv, part.begin, part.end, sums)) return lose(fetch, part);
  part.state = Part::here;
  fetch.bytes += int64_t(part.bytes);
  parts_.tell(part.holder, FetchOver{fetch.message.attempt});
  if (parts_.moved)
    parts_.moved({part.holder, parts_.self, fetch.message.request->id, part.read_s, now, part.end - part.begin,
                  int64_t(part.bytes)});
}

void Fetcher::lose(Fetch& fetch, Part& part) {
  part.state = Part::lost;
  ++parts_.fetch.failed;
  parts_.tell(part.holder, FetchOver{fetch.message.attempt});
}

void Fetcher::peer_gone(InstanceId peer) {
  for (auto& [attempt, fetch] : fetches_)
    for (Part& part : fetch.parts)
      if (part.holder == peer && part.state == Part::asked) part.state = Part::lost, ++parts_.fetch.failed;
}

bool Fetcher::tick() {
  const size_t late = quarantine_.size();
  std::erase_if(quarantine_, [this](Late& l) {
    std::erase_if(l.reads, [this](TransferId id) { return parts_.wire.poll(id) != TransferState::in_flight; });
    if (l.reads.empty()) parts_.memory.free(l.kv);
    return l.reads.empty();
  });
  bool moved = quarantine_.size() < late;
  reading_ = !quarantine_.empty();
  for (auto at = fetches_.begin(); at != fetches_.end();) {
    Fetch& fetch = at->second;
    for (Part& part : fetch.parts) look(fetch, part);
    const auto open = std::ranges::count_if(fetch.parts, [](const Part& p) { return p.state < Part::here; });
    const bool given_up = parts_.clock.now() > fetch.until_s || attempts_.aborted(at->first);
    if (open > 0 && !given_up) {
      reading_ |= std::ranges::any_of(fetch.parts, [](const Part& p) { return p.state == Part::reading; });
      ++at;
      continue;
    }
    finish(fetch);
    at = fetches_.erase(at);
    moved = true;
  }
  return moved;
}

// With what has come, up to the first gap.
void Fetcher::finish(Fetch& fetch) {
  KvMemory& memory = parts_.memory;
  Late late{fetch.kv, {}};
  int has = fetch.here;
  for (Part& part : fetch.parts) {
    if (part.state == Part::here && part.begin == has) has = part.end;
    if (part.state == Part::reading) {
      parts_.wire.cancel(part.read);
      late.reads.push_back(part.read);
    }
    if (part.state < Part::here) lose(fetch, part);
  }
  const auto come = std::span<const int32_t>(fetch.tokens).subspan(size_t(fetch.here), size_t(has - fetch.here));
  if (!come.empty()) memory.written(fetch.kv, come);
  const double now = parts_.clock.now(), took_s = now - fetch.asked_s, worth_s = fetch.message.fetch.worth_s;
  FetchStats& stats = parts_.fetch;
  stats.fetches += !come.empty();
  stats.tokens += int64_t(come.size());
  stats.seconds += took_s;
  // What did not come is computed after all.
  const double wanted = std::max(1, fetch.parts.empty() ? 1 : fetch.parts.back().end - fetch.here);
  stats.regret_s += std::max(0.0, took_s - worth_s * std::min(1.0, double(come.size()) / wanted));
  if (ended)
    ended({fetch.message.request->id, fetch.message.fetch.holders[0], fetch.asked_s, now, int(come.size()), fetch.bytes,
           worth_s});
  if (late.reads.empty()) {
    memory.trim(fetch.kv);
    return begin_(std::move(fetch.message), fetch.kv, has);
  }
  quarantine_.push_back(std::move(late));
  begin_(std::move(fetch.message), kNoKv, 0);  // its full blocks are in the prefix cache
}

void Fetcher::clear(FinishReason reason, const std::string& error, Attempts& attempts) {
  for (auto& [attempt, fetch] : fetches_) {
    Late late{fetch.kv, {}};
    for (Part& part : fetch.parts)
      if (part.state == Part::reading) parts_.wire.cancel(part.read), late.reads.push_back(part.read);
    quarantine_.push_back(std::move(late));
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
