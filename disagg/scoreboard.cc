#include "disagg/scoreboard.h"

#include <algorithm>
#include <numeric>

namespace xpyd::disagg {

void PlacedLoad::place(const PlacedPrompt& prompt, double now_s) {
  if (prompting.steps == 0) moved_s = now_s;
  ++queued_requests;
  queued_tokens += prompt.tokens;
  queued.add(prompt.work);
  prompting.add(prompt.work);
}

void PlacedLoad::begin(const PlacedPrompt& prompt, double now_s) {
  --queued_requests;
  queued.add(prompt.work, -1);
  moved_s = now_s;
}

void PlacedLoad::done(const PlacedPrompt& prompt, double now_s) {
  queued_tokens -= prompt.tokens;
  prompting.add(prompt.work, -1);
  moved_s = now_s;
}

void DecodeTimes::ended(double seconds) {
  if (last_.size() < kMost) last_.push_back(0);
  last_[next_++ % kMost] = float(seconds);
}

double DecodeTimes::mean() const {
  return last_.empty() ? 0 : std::accumulate(last_.begin(), last_.end(), 0.0) / double(last_.size());
}

double DecodeTimes::quantile(double q) const {
  if (last_.empty()) return 0;
  std::vector<float> sorted = last_;
  const auto at = sorted.begin() + long(std::min(double(sorted.size() - 1), q * double(sorted.size())));
  std::nth_element(sorted.begin(), at, sorted.end());
  return *at;
}

// An instance of another process that has not reported yet has no terms.
StepCost Scoreboard::cost(const InstanceStats& stats) const {
  return stats.cost == StepCost::Terms{} ? prior_ : StepCost(stats.cost);
}

int Scoreboard::promised(const Member& member, PromptHashes& prompt) {
  const std::optional<int> known = member.probe->promise(prompt.tokens(), prompt.salt());
  if (known) return *known;
  const int block_tokens = member.info.block_tokens;
  return directory_.find(prompt.of(block_tokens))[size_t(member.in_directory)] * block_tokens;
}

void Scoreboard::placed(Member& member, const PlacedPrompt& prompt, double now_s) {
  member.load.place(prompt, now_s);
  member.recent.emplace_back(now_s, prompt.tokens);
  member.recent_tokens += prompt.tokens;
}

void Scoreboard::refresh(Member& member) const {
  const uint64_t version = member.probe->version();
  if (version != 0 && version == member.version) return;
  member.version = version;
  member.cost = cost(member.probe->stats());
  const KvStats kv = member.probe->kv();
  member.available_blocks = kv.available();
  member.cached_blocks = kv.cached;
}

ClusterView Scoreboard::look(std::map<InstanceId, Member>& members, PromptHashes& prompt, double now_s) {
  views_.clear();
  ids_.clear();
  int in_blocks_of = 0, prompt_tokens = int(prompt.tokens().size()), block_tokens = 0;
  std::span<const int> found;
  for (auto& [id, member] : members) {
    if (member.draining) continue;
    for (; !member.recent.empty() && member.recent.front().first < now_s - kRecentSeconds; member.recent.pop_front())
      member.recent_tokens -= member.recent.front().second;
    const PlacedLoad& load = member.load;
    refresh(member);
    const int block = block_tokens = member.info.block_tokens;
    const Unsaid unsaid = member.probe->unsaid();
    InstanceView view{.role = member.info.role,
                      .queued = load.queued_requests,
                      .queued_tokens = load.queued_tokens,
                      .sequences = load.sequences,
                      .context_tokens = load.context_tokens + unsaid.tokens,
                      .available_tokens = int64_t(member.available_blocks - unsaid.blocks) * block,
                      .capacity_tokens = int64_t(member.info.capacity_blocks) * block,
                      .indexed_tokens = int64_t(member.cached_blocks) * block,
                      .recent_tokens = member.recent_tokens};
    if (view.role != Role::decode) {
      if (const std::optional<int> known = member.probe->promise(prompt.tokens(), prompt.salt())) {
        view.cached_tokens = *known;
      } else {
        if (in_blocks_of != block) found = directory_.find(prompt.of(in_blocks_of = block));
        view.cached_tokens = found[size_t(member.in_directory)] * block;
      }
    }
    predict(view, member, prompt_tokens, now_s);
    views_.push_back(view);
    ids_.push_back(id);
  }
  return {.instances = views_, .prompt_tokens = prompt_tokens, .block_tokens = block_tokens};
}

// Steps of an instance that decodes have those sequences in them, too.
void Scoreboard::predict(InstanceView& view, const Member& member, int prompt_tokens, double now_s) const {
  const auto seconds = [&](StepShape work) {
    if (view.role == Role::colocated)
      work.add_decodes(work.steps * view.sequences, work.steps * double(view.context_tokens));
    return member.cost.seconds(work);
  };
  if (view.role != Role::decode) {
    const PlacedLoad& load = member.load;
    view.queue_s = std::max(seconds(load.queued), seconds(load.prompting) - (now_s - load.moved_s));
    view.prefill_s = seconds(prompt(prompt_tokens, view.cached_tokens).work);
    view.fetch_s = view.fetched_prefill_s = kNever;  // nobody fetches from others
  }
  if (view.role != Role::prefill) {
    StepShape step;
    if (view.queued_tokens > 0) step.add_prompt(double(std::min<int64_t>(chunk_tokens_, view.queued_tokens)), 0);
    step.add_decodes(view.sequences, double(view.context_tokens));
    view.step_s = view.sequences > 0 ? member.cost.seconds(step) : 0;
    step.add_decodes(1, prompt_tokens);
    view.step_with_s = member.cost.seconds(step);
  }
}

}  // namespace xpyd::disagg
