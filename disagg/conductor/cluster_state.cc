#include "disagg/conductor/cluster_state.h"

#include <algorithm>
#include <utility>

namespace xpyd::disagg {

ClusterState::ClusterState(ConductorContext& context)
    : context_(context),
      board_(context.options.step_tokens, first_cost(context.options.prior), context.options.fetch_s_per_token) {}

void ClusterState::join(InstanceInfo info, std::shared_ptr<InstanceProbe> probe) {
  const InstanceId id = info.id;
  for (auto& [other, member] : members_) {
    context_.bus.send(kConductor, other, PeerJoined{info});
    context_.bus.send(kConductor, id, PeerJoined{member.info});
  }
  Member& member = members_[id];
  member.info = std::move(info);
  member.probe = std::move(probe);
  member.heard_s = context_.clock.now();
  board_.joined(member);
}

bool ClusterState::leave(InstanceId id) {
  const auto gone = members_.find(id);
  if (gone == members_.end()) return false;
  board_.left(gone->second);
  members_.erase(gone);
  ++context_.totals.left;
  for (auto& [other, member] : members_) context_.bus.send(kConductor, other, PeerGone{id});
  return true;
}

bool ClusterState::heard(InstanceId from) {
  Member* member = find(from);
  if (member) member->heard_s = context_.clock.now();
  return member;
}

std::vector<InstanceId> ClusterState::silent() {
  const double now = context_.clock.now(), lease_s = context_.options.lease_s;
  const double slept = now - std::exchange(ticked_s_, now) - lease_s / 4;
  if (slept > 0)
    for (auto& [id, member] : members_) member.heard_s = std::min(now, member.heard_s + slept);
  std::vector<InstanceId> silent;
  if (lease_s > 0)
    for (const auto& [id, member] : members_)
      if (now > member.heard_s + lease_s) silent.push_back(id);
  return silent;
}

const Member* ClusterState::find(InstanceId id) const {
  const auto found = members_.find(id);
  return found == members_.end() ? nullptr : &found->second;
}

std::string ClusterState::trouble() const {
  const double now = context_.clock.now();
  bool prefill = false, decode = false;
  for (const auto& [id, member] : members_) {
    if (now - member.probe->stats().heartbeat_s >= kLongestTurnSeconds)
      return member.info.name + " has not completed a loop for " + std::to_string(int(kLongestTurnSeconds)) + " s";
    prefill |= !member.draining && member.info.role != Role::decode;
    decode |= !member.draining && member.info.role != Role::prefill;
  }
  if (prefill && decode) return "";
  const char* missing = prefill ? "decode" : decode ? "prefill" : "prefill and decode";
  return std::string("there is no instance for ") + missing;
}

// ---- The scoreboard.

void Scoreboard::joined(Member& member) {
  member.in_directory = directory_.joined(member.info.capacity_blocks, member.info.tier_blocks);
  member.row = rows_.size();
  rows_.push_back({.member = &member,
                   .version = member.probe->version(),
                   .in_directory = member.in_directory,
                   .block_tokens = member.info.block_tokens});
  views_.emplace_back();
  ids_.push_back(member.info.id);
}

void Scoreboard::left(Member& member) {
  drain(member, false);
  directory_.left(member.in_directory);
  const auto at = long(member.row);
  rows_.erase(rows_.begin() + at), views_.erase(views_.begin() + at), ids_.erase(ids_.begin() + at);
  for (size_t i = member.row; i < rows_.size(); ++i) rows_[i].member->row = i;
}

void Scoreboard::drain(Member& member, bool on) { draining_ += int(on) - int(std::exchange(member.draining, on)); }

void Scoreboard::placed(Member& member, const PlacedPrompt& prompt, double now_s) {
  PlacedLoad& load = member.load;
  if (load.prompting.steps == 0) load.moved_s = now_s;
  ++load.queued_requests;
  load.queued_tokens += prompt.tokens;
  load.queued.add(prompt.work);
  load.prompting.add(prompt.work);
  rows_[member.row].stale = true;
}

void Scoreboard::begun(Member& member, const PlacedPrompt& prompt, double now_s) {
  --member.load.queued_requests;
  member.load.queued.add(prompt.work, -1);
  member.load.moved_s = now_s;
  rows_[member.row].stale = true;
}

void Scoreboard::done(Member& member, const PlacedPrompt& prompt, double now_s) {
  member.load.queued_tokens -= prompt.tokens;
  member.load.prompting.add(prompt.work, -1);
  member.load.moved_s = now_s;
  rows_[member.row].stale = true;
}

void Scoreboard::decodes(Member& member, int sequences, int64_t tokens) {
  member.load.sequences += sequences;
  member.load.context_tokens += tokens;
  rows_[member.row].stale = true;
}

ClusterView Scoreboard::look(PromptHashes& prompt, double now_s) {
  const auto prompt_tokens = int(prompt.tokens().size());
  int found_of = 0, block_tokens = 0;
  std::span<const CacheDirectory::Hit> found;
  for (size_t i = 0; i < rows_.size(); ++i) {
    Row& row = rows_[i];
    InstanceView& view = views_[i];
    const uint64_t version = row.version ? row.version->load(std::memory_order_acquire) : row.seen + 1;
    if (row.stale || version != row.seen) {
      row.seen = version;
      refresh(row, view);
    }
    block_tokens = row.block_tokens;
    if (const std::optional<int> known = row.member->probe->matched_tokens(prompt.tokens(), prompt.salt())) {
      view.cached_tokens = *known;
    } else {
      if (found_of != block_tokens) found = directory_.find(prompt.of(found_of = block_tokens));
      const CacheDirectory::Hit& hit = found[size_t(row.in_directory)];
      view.cached_tokens = hit.device * block_tokens;
      view.host_tokens = (hit.host - hit.device) * block_tokens;
      view.disk_tokens = (hit.all - hit.host) * block_tokens;
    }
    predict(row, view, prompt_tokens, now_s);
  }
  if (fetch_s_per_token_ > 0) predict_fetches(prompt_tokens);
  ClusterView seen{.instances = views_, .prompt_tokens = prompt_tokens, .block_tokens = block_tokens};
  if (draining_ == 0) return seen;
  staying_.clear(), staying_ids_.clear();
  for (size_t i = 0; i < rows_.size(); ++i)
    if (!rows_[i].member->draining) staying_.push_back(views_[i]), staying_ids_.push_back(ids_[i]);
  seen.instances = staying_;
  return seen;
}

// On a colocated instance every prompt step also has the sequences that decode there.
StepShape among_decodes(StepShape work, const InstanceView& view) {
  if (view.role == Role::colocated)
    work.add_decodes(work.steps * view.sequences, work.steps * double(view.context_tokens));
  return work;
}

// An instance with few steps is assumed to be as fast as others of its role. If its prior were too slow, it would get
// no work and could never be measured.
const StepCost::Terms& Scoreboard::like_others(Role role, const InstanceStats& stats) {
  StepCost::Terms& others = measured_[size_t(role)];
  if (stats.steps >= kKnown) return others = terms(stats);
  return others == StepCost::Terms{} ? terms(stats) : others;
}

void Scoreboard::refresh(Row& row, InstanceView& view) {
  Member& member = *row.member;
  const PlacedLoad& load = member.load;
  const InstanceStats stats = member.probe->stats();
  row.stale = false;
  row.terms = like_others(view.role = member.info.role, stats);
  view = {.role = member.info.role,
          .queued = load.queued_requests,
          .queued_tokens = load.queued_tokens,
          .sequences = load.sequences,
          .context_tokens = load.context_tokens,
          .available_tokens = int64_t(stats.kv.available()) * row.block_tokens,
          .capacity_tokens = int64_t(member.info.capacity_blocks) * row.block_tokens,
          .indexed_tokens = int64_t(stats.kv.cached) * row.block_tokens,
          .fetch_s = kNever,
          .fetched_prefill_s = kNever};
  row.queued_s = seconds(row.terms, among_decodes(load.queued, view));
  row.prompting_s = seconds(row.terms, among_decodes(load.prompting, view));
  row.moved_s = load.moved_s;
  row.fetch_s_per_token = stats.wire_s_per_byte > 0
                              ? stats.wire_s_per_byte * double(member.info.layout.shape.token_bytes())
                              : fetch_s_per_token_;
  StepShape step;
  if (load.queued_tokens > 0) step.add_prompt(double(std::min<int64_t>(chunk_tokens_, load.queued_tokens)), 0);
  step.add_decodes(view.sequences, double(view.context_tokens));
  row.step_s = seconds(row.terms, step);
}

void Scoreboard::predict(const Row& row, InstanceView& view, int prompt_tokens, double now_s) const {
  if (view.role != Role::decode) {
    view.queue_s = std::max(row.queued_s, row.prompting_s - (now_s - row.moved_s));
    view.prefill_s = seconds(row.terms, among_decodes(prompt(prompt_tokens, view.held_tokens()).work, view));
    if (const int stages = row.member->info.stages; stages > 1) {  // sum t + (P - 1) t of the last chunk, for P stages
      const int x = std::min(chunk_tokens_, prompt_tokens - view.held_tokens());
      StepShape last;
      last.add_prompt(x, prompt_tokens - x);
      view.prefill_s += (stages - 1) * seconds(row.terms, last);
    }
  }
  if (view.role != Role::prefill) {
    view.step_s = view.sequences > 0 ? row.step_s : 0;
    view.step_with_s = row.step_s +
                       seconds(row.terms, {.steps = 0, .decodes = 1, .decode_context = double(prompt_tokens)});
  }
}

Scoreboard::Fetch Scoreboard::fetch(const Member& here, PromptHashes& prompt) {
  const Row& row = rows_[here.row];
  const InstanceView& view = views_[here.row];
  Fetch fetch{.view = {.prompt_tokens = int(prompt.tokens().size()), .cached_tokens = view.held_tokens()}};
  FetchView& f = fetch.view;
  int best = f.cached_tokens;
  const Row* source = nullptr;
  for (size_t i = 0; i < rows_.size(); ++i)
    if (const int has = views_[i].held_tokens(); i != here.row && has > best) best = has, source = &rows_[i];
  if (!source) return fetch;
  fetch.holder = source->member->info.id;
  const InstanceStats stats = here.probe->stats();
  f.holder_tokens = std::min(best, f.prompt_tokens - 1);
  f.bytes_s = (f.holder_tokens - f.cached_tokens) *
              here.probe->fetch_s_per_token(fetch.holder).value_or(row.fetch_s_per_token);
  // Before the first question: a holder answers between two of its steps.
  f.handshake_s = stats.fetch.ask_s > 0 ? stats.fetch.ask_s : source->step_s;
  const auto prompt_s = [&](int cached) {
    return seconds(row.terms, among_decodes(this->prompt(f.prompt_tokens, cached).work, view));
  };
  // Not below 0: one token that attends to a long prefix may cost more than a token in a chunk.
  f.saved_s = std::max(0.0, prompt_s(f.cached_tokens) - prompt_s(f.holder_tokens));
  return fetch;
}

double Scoreboard::joined_step_s(const Member& member, int tokens) const {
  const Row& row = rows_[member.row];
  const InstanceView& view = views_[member.row];
  StepShape joins{.steps = 0};
  joins.add_prompt(tokens - view.held_tokens(), view.held_tokens());
  const bool fits = joins.tokens + double(view.queued_tokens + view.sequences) <= chunk_tokens_;
  return fits ? row.step_s + seconds(row.terms, joins) : kNever;
}

// Predicts for each instance the fetch of what the best holder has beyond it.
void Scoreboard::predict_fetches(int prompt_tokens) {
  int best = 0;
  size_t holder = 0;  // the first of equals, as in mooncake()
  for (size_t i = 0; i < views_.size(); ++i)
    if (views_[i].role != Role::decode && views_[i].held_tokens() > best) best = views_[holder = i].held_tokens();
  for (size_t i = 0; i < views_.size(); ++i) {
    InstanceView& view = views_[i];
    if (view.role == Role::decode) continue;
    view.fetch_s = view.fetched_prefill_s = kNever;
    if (best <= view.held_tokens()) continue;
    view.fetch_s = (best - view.held_tokens()) *
                   rows_[i].member->probe->fetch_s_per_token(ids_[holder]).value_or(rows_[i].fetch_s_per_token);
    view.fetched_prefill_s = seconds(rows_[i].terms, among_decodes(prompt(prompt_tokens, best).work, view));
  }
}

}  // namespace xpyd::disagg
