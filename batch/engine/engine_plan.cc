// The engine's plan: what a policy sees of its sequences, and what becomes of what the policy wants: who runs, who
// starts, who gives its memory up.
#include <algorithm>
#include <numeric>

#include "batch/engine/engine.h"

namespace xpyd::batch {

SequenceView Engine::view_of(const Sequence& s) const {
  SequenceView view;
  view.n_tokens = int(s.tokens.size());
  view.n_computed = s.kv == kNoKv && !s.scheduled ? s.cached_tokens : s.computed;
  view.n_limit = s.leaves ? s.given + 1 : s.n_prompt() + s.request->max_tokens;
  view.n_output = s.n_output();
  view.choices = s.stands_for;
  if (s.kv != kNoKv) {
    view.n_blocks = int(memory_.blocks(s.kv).size()) + memory_.escrowed(s.kv);
    view.tail_shared = memory_.tail_shared(s.kv);
  }
  return view;
}

BatchView Engine::view_of(std::span<const SequenceView> running, int available_blocks, const KvStats& kv,
                          int step_tokens) const {
  return {.running = running,
          .waiting = waiting_views_,
          .available_blocks = available_blocks,
          .capacity_blocks = kv.capacity,
          .block_tokens = kv.block_tokens,
          .max_batch = options_.max_batch,
          .step_tokens = step_tokens,
          .admission = admission_};
}

void Engine::make_plan() {
  running_views_.clear();
  waiting_views_.clear();
  runnable_.clear();
  admissible_.clear();
  for (size_t i = 0; i < running_.size(); ++i) {
    const Sequence& s = *running_[i];
    // Its last token here is being chosen: it takes part in no further step.
    if (s.tokens.back() < 0 && (s.leaves || s.n_output() >= s.request->max_tokens)) continue;
    runnable_.push_back(int(i));
    running_views_.push_back(view_of(s));
  }
  if (in_waves()) share_decodes();
  // No policy can start more than the free places; the rest of the queue need not be looked at.
  const auto places = size_t(std::max(0, options_.max_batch - int(running_.size())));
  for (size_t i = 0; i < std::min(places, waiting_.size()); ++i) {
    Sequence& s = *waiting_[i];
    if (!s.probed) {
      const int cached = memory_.probe(s.tokens, s.salt());
      if (!s.scheduled) s.cached_tokens = cached;
      s.probed = true;
      load_early(s, cached);
    }
    if (s.loading) continue;  // others run meanwhile
    admissible_.push_back(int(i));
    waiting_views_.push_back(view_of(s));
  }
  if (admission_->looks_ahead && !waiting_views_.empty()) charge_shared_blocks();
  KvStats kv = memory_.stats();
  const int step_tokens = choose_chunks(kv);
  const BatchView view = view_of(running_views_, kv.available(), kv, step_tokens);
  plan_.clear();
  options_.policy->plan(view, plan_);
  if (watcher_ && !plan_.empty()) watcher_(view, plan_);
}

// Sequences that decode are shared by as many waves as there are stages: in one wave, they would leave all stages but
// one idle. Who is under way has nothing pending.
void Engine::share_decodes() {
  const auto decodes = [](const SequenceView& view) { return view.n_output > 0; };
  const auto waves = std::min(window_, model_.stages());
  auto left = (std::ranges::count_if(running_views_, decodes) + waves - 1) / waves;
  for (SequenceView& view : running_views_)
    if (decodes(view) && view.pending() == 1 && --left < 0) view.n_held = 1;
}

std::vector<uint64_t> Engine::planned_requests() const {
  std::vector<uint64_t> requests;
  for (const ScheduledRun& run : plan_.runs)
    requests.push_back(running_[size_t(runnable_[size_t(run.index)])]->request->id);
  for (const ScheduledRun& run : plan_.admits)
    requests.push_back(waiting_[size_t(admissible_[size_t(run.index)])]->request->id);
  for (int index : plan_.preempts) requests.push_back(running_[size_t(runnable_[size_t(index)])]->request->id);
  return requests;
}

// A block that several sequences hold is charged to the one of them that will hold it longest.
void Engine::charge_shared_blocks() {
  by_output_left_.resize(running_views_.size());
  std::iota(by_output_left_.begin(), by_output_left_.end(), 0);
  auto left = [&](int i) {
    const SequenceView& view = running_views_[size_t(i)];
    return view.n_limit - view.n_tokens;
  };
  std::stable_sort(by_output_left_.begin(), by_output_left_.end(), [&](int a, int b) { return left(a) > left(b); });
  ++charge_;
  for (int i : by_output_left_) {
    SequenceView& view = running_views_[size_t(i)];
    for (int32_t block : memory_.blocks(running_[size_t(runnable_[size_t(i)])]->kv)) {
      if (size_t(block) >= charged_.size()) charged_.resize(size_t(block) + 1);
      view.n_shared_blocks += std::exchange(charged_[size_t(block)], charge_) == charge_;
    }
  }
}

// Whether the plan does what may not be done to sequences that are under way: preempt, or, where the model chooses,
// choose from logits that the CPU sees.
bool Engine::needs_settling() const {
  if (in_waves())
    return std::any_of(plan_.preempts.begin(), plan_.preempts.end(), [&](int index) {
      const Sequence& s = *running_[size_t(runnable_[size_t(index)])];
      return memory_.written_tokens(s.kv) < s.computed;
    });
  auto by_cpu = [](const Sequence& s) {
    return s.stands_for > 1 || more_than_a_draw(s.request->sampling) || s.wants_prompt_logprobs();
  };
  return !plan_.preempts.empty() || std::any_of(plan_.runs.begin(), plan_.runs.end(), [&](const ScheduledRun& run) {
    const Sequence& s = *running_[size_t(runnable_[size_t(run.index)])];
    return by_cpu(s) && (run.n_tokens == s.pending() || s.wants_prompt_logprobs());
  }) || std::any_of(plan_.admits.begin(), plan_.admits.end(), [&](const ScheduledRun& run) {
    return by_cpu(*waiting_[size_t(admissible_[size_t(run.index)])]);
  });
}

// Room for n_tokens beyond those computed or under way.
bool Engine::append(const Sequence& s, int n_tokens) {
  return memory_.append(s.kv, s.computed - memory_.written_tokens(s.kv) + n_tokens);
}

// ---- KV that comes from a tier.

// A sequence that waits and whose KV a tier has gets its memory before its turn, where nobody
// misses it, so that the KV is there when its turn comes. `cached_tokens`: here already.
void Engine::load_early(Sequence& s, int cached_tokens) {
  if (s.kv != kNoKv || memory_.promise(s.tokens, s.salt()) <= cached_tokens) return;
  const KvStats kv = memory_.stats();
  auto blocks = [&kv](int tokens) { return (tokens + kv.block_tokens - 1) / kv.block_tokens; };
  int need = blocks(int(s.tokens.size())) - cached_tokens / kv.block_tokens + kv.capacity / 100;
  for (const SequenceView& view : running_views_) need += std::max(0, blocks(view.n_tokens + 1) - view.n_blocks);
  for (const SequenceView& ahead : waiting_views_)
    need += std::max(0, blocks(ahead.n_tokens) - std::max(ahead.n_blocks, ahead.n_computed / kv.block_tokens));
  if (need <= kv.available() && reserve(s)) s.early = true;
}

void Engine::poll_loads() {
  if (loading_ == 0) return;
  loading_ = 0;
  for (const SequencePtr& s : waiting_) {
    if (!s->loading) continue;
    if (memory_.ready(s->kv)) {
      s->computed = memory_.written_tokens(s->kv);
    } else if (s->arrival = memory_.arrival(s->kv); !s->arrival) {
      ++loading_;
      continue;
    }
    s->loading = false;
    if (load_watcher_) load_watcher_(*s);
  }
}

// The last of those who got memory before their turn gives it up. False: nobody has any that could be had now (what is
// still copied into keeps it until then).
bool Engine::give_up_early() {
  const auto last = std::find_if(waiting_.rbegin(), waiting_.rend(), [this](const SequencePtr& s) {
    return s->early && !s->loading && memory_.ready(s->kv);
  });
  if (last == waiting_.rend()) return false;
  Sequence& s = **last;
  release(s);
  s.early = false;
  s.computed = 0;
  return true;
}

// Takes memory for a waiting sequence. False: there is none. Its KV may be `loading`.
bool Engine::reserve(Sequence& s) {
  const Result<KvReservation> reserved = memory_.reserve(s.tokens, s.salt());
  if (!reserved) return false;
  s.kv = reserved.value().handle;
  s.computed = reserved.value().cached_tokens;
  s.early = s.loading = reserved.value().loading;
  loading_ += int(s.loading);
  if (s.loading) s.load_s = clock_.now();
  return true;
}

// The sequence's next n_tokens in a step.
StepEntry Engine::entry_of(Sequence& s, int n_tokens) {
  const int end = s.computed + n_tokens;
  Entry entry{.sequence = &s, .first = s.computed, .n_tokens = n_tokens};
  entry.wants_logits = end == int(s.tokens.size());
  if (s.wants_prompt_logprobs()) entry.n_prompt_rows = std::min(end, s.n_prompt() - 1) - s.computed;
  return entry;
}

// Gets memory for the next n_tokens of a waiting sequence. False: it does not run now.
bool Engine::place(SequencePtr& s, int n_tokens, double now) {
  if (s->kv == kNoKv) {
    if (!reserve(*s) || s->loading) return false;
    n_tokens = std::min(n_tokens, s->pending());
    if (!append(*s, n_tokens)) {
      release(*s);
      s->computed = 0;
      return false;
    }
  } else if (!append(*s, n_tokens)) {
    return false;
  }
  s->early = false;
  if (!s->scheduled) {
    s->cached_tokens = s->computed;
    if (s->leaves) hooks_->prefill_started(*s);
  }
  if (s->leaves && s->computed > 0 && !s->arrival) hooks_->kv_written(*s, 0, model_.config().n_layers, 0, s->computed);
  if (!s->scheduled) s->scheduled_s = now;
  s->scheduled = true;
  s->queue_ticket.reset();
  next_->entries.push_back(entry_of(*s, n_tokens));
  return true;
}

// Those who decode compute drafts beside their next token, as far as the step has tokens and rows of logits for them
// and free blocks: nobody is preempted for a draft, and no prefix is forgotten.
void Engine::add_drafts(int spare_rows) {
  const KvStats kv = memory_.stats();
  const int block_tokens = kv.block_tokens;
  int spare_tokens = options_.step_tokens, free_blocks = kv.free;
  for (const Entry& entry : next_->entries) spare_tokens -= entry.n_tokens;
  const StepCost::Terms& cost = chunks_.cost;
  StepShape shape;
  DraftRate rate = {.credit = draft_credit_.left()};
  for (const Entry& entry : next_->entries) {
    shape.add_tokens(entry.n_tokens, entry.first);
    rate.tokens += entry.wants_logits;
  }
  rate.seconds = seconds(cost, shape);
  std::vector<Entry*> entries;
  wishes_.clear();
  for (Entry& entry : next_->entries) {
    Sequence& s = *entry.sequence;
    // (Nothing is trimmed while KV comes: a draft that turns out wrong would be.)
    const bool decodes = entry.wants_logits && s.n_output() > 0 && !s.leaves && !s.arrival &&
                         s.request->most_drafts != 0;
    const int room = int(memory_.blocks(s.kv).size() + size_t(free_blocks)) * block_tokens - entry.end();
    const int wanted = s.request->most_drafts > 0 ? s.request->most_drafts : options_.speculation.tokens;
    int most = std::min(
        {wanted > 0 ? wanted : kMostDrafts, s.request->max_tokens - s.n_output() - 1, spare_tokens, spare_rows, room});
    if (!decodes || most <= 0) continue;
    rate.token_seconds = cost[1] + 2 * entry.end() * cost[3] +
                         drafter_->round_seconds() / double(next_->entries.size());
    if (wanted == 0 && (most = rate.take(s.draft_record, most)) == 0) {
      s.draft_record.saw(0, 0);
      continue;
    }
    const int blocks = int(memory_.blocks(s.kv).size());
    if (drafter_->in_place() && !append(s, entry.n_tokens + most)) continue;
    free_blocks -= int(memory_.blocks(s.kv).size()) - blocks;
    spare_tokens -= most, spare_rows -= most;
    entries.push_back(&entry);
    wishes_.push_back({.sequence = &s, .tokens = s.tokens, .memory = s.drafts, .most = most});
  }
  drafter_->draft(wishes_);
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    Sequence& s = *entry.sequence;
    const std::vector<int32_t>& drafts = wishes_[i].drafts;
    const int n = int(drafts.size());
    if (drafter_->in_place() && n < wishes_[i].most) {
      memory_.trim(s.kv);
      XPYD_CHECK(append(s, entry.n_tokens));
    }
    const int blocks = int(memory_.blocks(s.kv).size());
    if (n == 0 || (entry.end() + n - 1) / block_tokens >= blocks + free_blocks || !append(s, entry.n_tokens + n))
      continue;
    free_blocks -= int(memory_.blocks(s.kv).size()) - blocks;
    s.tokens.insert(s.tokens.end(), drafts.begin(), drafts.end());
    entry.n_tokens += n, entry.n_drafts = n, entry.draft_price = rate.price();
  }
}

// False: nothing runs, and nothing was changed either.
bool Engine::apply_plan(double now) {
  next_->entries.clear();
  std::ranges::sort(plan_.preempts, std::greater());  // youngest first: the oldest waits in front
  for (int i : plan_.preempts) preempt(std::move(running_[size_t(runnable_[size_t(i)])]));
  // A step has max_batch rows of logits: one for each sequence, and what is left is for prompts
  // whose logprobs are wanted, which take more steps therefore.
  int spare_rows = options_.max_batch - int(plan_.runs.size() + plan_.admits.size());
  auto tokens_of = [&spare_rows](const Sequence& s, const ScheduledRun& run) {
    if (!s.wants_prompt_logprobs()) return run.n_tokens;
    const int n = std::min(run.n_tokens, 1 + spare_rows);
    spare_rows -= n - 1;
    return n;
  };
  for (const ScheduledRun& run : plan_.runs) {
    Sequence& s = *running_[size_t(runnable_[size_t(run.index)])];
    const int n_tokens = tokens_of(s, run);
    if (!append(s, n_tokens)) continue;  // the plan's arithmetic was too hopeful: next step
    next_->entries.push_back(entry_of(s, n_tokens));
  }
  std::erase(running_, nullptr);
  // A refusal stops admission: whoever comes later waits too.
  for (const ScheduledRun& run : plan_.admits) {
    SequencePtr& s = waiting_[size_t(admissible_[size_t(run.index)])];
    if (!plan_.preempts.empty() || !place(s, tokens_of(*s, run), now)) break;
    running_.push_back(std::move(s));
  }
  std::erase(waiting_, nullptr);
  if (drafter_) add_drafts(spare_rows);
  if (options_.policy->keeps_rows) arrays_.arrange(next_->entries);

  if (next_->entries.empty() && plan_.preempts.empty()) return under_way_.empty() && loading_ == 0 && make_room();
  return true;
}

// Nothing fits: the youngest of those who hold memory gives it up, as long as somebody else wants it. One alone fits,
// because no request is taken whose longest output exceeds the pool (of a shared pool: once the prompts that others
// hold have arrived here, too). False: there is nobody to ask.
bool Engine::make_room() {
  const bool head_waits = !waiting_.empty() && waiting_.front()->kv == kNoKv;
  const int rivals = int(running_.size()) + waiting_with_kv() + head_waits;
  if (rivals < 2) return false;
  if (give_up_early()) return true;
  if (running_.size() > 1) {
    SequencePtr victim = std::move(running_.back());
    running_.pop_back();
    preempt(std::move(victim));
    return true;
  }
  const auto last = std::find_if(waiting_.rbegin(), waiting_.rend(),
                                 [](const SequencePtr& s) { return s->keeps_kv(); });
  if (last == waiting_.rend()) return false;
  SequencePtr victim = std::move(*last);
  waiting_.erase(std::next(last).base());
  preempt(std::move(victim));
  return true;
}

void Engine::preempt(SequencePtr s) {
  s->arrival.reset();
  if (s->kv != kNoKv) memory_.set_aside(std::exchange(s->kv, kNoKv));
  s->drafts.reset();
  s->computed = 0;
  s->early = s->probed = false;
  ++stats_.preemptions;
  ++s->preemptions;
  waiting_.insert(first_without_kv(), std::move(s));
}

}  // namespace xpyd::batch
