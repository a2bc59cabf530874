#include "batch/engine/scheduler.h"

#include <algorithm>
#include <limits>

#include "base/status.h"
#include "batch/policies/admission.h"
#include "model/sampler.h"

namespace xpyd::batch {

Scheduler::Scheduler(const EngineOptions& options, KvMemory& memory, EngineHooks* hooks, int n_layers,
                     EngineStats& stats)
    : options_(options),
      admission_(options.admission ? options.admission : find_admission_rule(options.policy->admission)),
      memory_(memory),
      hooks_(hooks),
      n_layers_(n_layers),
      stats_(stats),
      chunks_(options.chunks) {}

// ---- The queues.

void Scheduler::submit(SequencePtr sequence) {
  if (Sequence& s = *sequence; s.wants_prompt_logprobs()) {
    s.prompt_logprobs.assign(s.tokens.size(), Sampled{});
    s.prompt_logprobs[0].chosen = {s.tokens[0], std::numeric_limits<float>::quiet_NaN()};
  }
  auto place = waiting_.end();
  while (place != waiting_.begin()) {
    const Sequence& before = **std::prev(place);
    if (before.scheduled || before.request->priority <= sequence->request->priority) break;
    --place;
  }
  waiting_.insert(place, std::move(sequence));
}

void Scheduler::adopt(SequencePtr sequence) {
  sequence->probed = sequence->scheduled = true;  // it was probed and scheduled where its KV was computed
  waiting_.insert(first_without_kv(), std::move(sequence));
}

// Every sequence from here on keeps no KV.
std::deque<SequencePtr>::iterator Scheduler::first_without_kv() {
  return std::find_if(waiting_.begin(), waiting_.end(), [](const SequencePtr& s) { return !s->keeps_kv(); });
}

void Scheduler::check_invariants() const {
  bool without = false;
  for (const SequencePtr& s : waiting_) {
    XPYD_CHECK(!(without && s->keeps_kv()), "a waiting sequence without KV stands before one that holds KV");
    without |= !s->keeps_kv();
  }
}

int Scheduler::waiting_with_kv() const {
  return int(std::count_if(waiting_.begin(), waiting_.end(), [](const SequencePtr& s) { return s->kv != kNoKv; }));
}

int64_t Scheduler::pending_tokens() const {
  int64_t tokens = 0;
  for (const SequencePtr& s : waiting_) tokens += s->pending();
  for (const SequencePtr& s : running_) tokens += s->pending();
  return tokens;
}

int Scheduler::blocks_wanted() const {
  const int block_tokens = memory_.stats().block_tokens;
  int blocks = 0;
  for (const SequencePtr& s : waiting_)
    if (s->kv == kNoKv) blocks += blocks_for(int(s->tokens.size()), block_tokens);
  return blocks;
}

SequencePtr Scheduler::remove(const Sequence& s) {
  return std::move(
      *std::find_if(running_.begin(), running_.end(), [&s](const SequencePtr& other) { return other.get() == &s; }));
}

void Scheduler::tidy() {
  std::erase(running_, nullptr);
  for (SequencePtr& s : arrived_) running_.push_back(std::move(s));
  arrived_.clear();
}

// ---- The plan.

SequenceView Scheduler::view_of(const Sequence& s) const {
  SequenceView view;
  view.n_tokens = int(s.tokens.size());
  view.n_computed = s.kv == kNoKv && !s.scheduled ? s.cached_tokens : s.computed;
  view.n_limit = s.leaves ? s.given + 1 : s.n_prompt() + s.request->max_tokens;
  view.n_output = s.n_output();
  view.choices = s.stands_for;
  if (s.kv != kNoKv) {
    const KvHeld held = memory_.held(s.kv);
    view.n_blocks = int(held.blocks.size()) + held.reserved;
    view.tail_shared = held.tail_shared;
  }
  return view;
}

void Scheduler::look_at_running(const UnderWay& under_way) {
  views_.running.clear();
  views_.runnable.clear();
  for (size_t i = 0; i < running_.size(); ++i) {
    const Sequence& s = *running_[i];
    // Its last token on this instance is being chosen, so it takes part in no further step.
    if (s.tokens.back() < 0 && (s.leaves || s.n_output() >= s.request->max_tokens)) continue;
    views_.runnable.push_back(int(i));
    views_.running.push_back(view_of(s));
  }
  if (under_way.waves) share_decodes(under_way);
}

// Shares decoding sequences among as many waves as there are stages. In one wave they would leave all stages but one
// idle. A sequence under way has nothing pending.
void Scheduler::share_decodes(const UnderWay& under_way) {
  const auto decodes = [](const SequenceView& view) { return view.n_output > 0; };
  const auto waves = std::min(under_way.window, under_way.stages);
  auto left = (std::ranges::count_if(views_.running, decodes) + waves - 1) / waves;
  for (SequenceView& view : views_.running)
    if (decodes(view) && view.pending() == 1 && --left < 0) view.n_held = 1;
}

void Scheduler::look_at_waiting(double now) {
  views_.waiting.clear();
  views_.admissible.clear();
  // No policy can admit more sequences than there are free places, so only the head of the queue is examined.
  const auto places = size_t(std::max(0, options_.max_batch - int(running_.size())));
  for (size_t i = 0; i < std::min(places, waiting_.size()); ++i) {
    Sequence& s = *waiting_[i];
    if (!s.probed) {
      const int cached = memory_.probe(s.tokens, s.salt());
      if (!s.scheduled) s.cached_tokens = cached;
      s.probed = true;
      load_early(s, cached, now);
    }
    if (s.loading) continue;  // others run meanwhile
    views_.admissible.push_back(int(i));
    views_.waiting.push_back(view_of(s));
  }
}

int Scheduler::choose_chunks(int block_tokens, const UnderWay& under_way) {
  if (!chunks_.decides()) return options_.step_tokens;
  candidates_.clear();
  for (size_t i = 0; i < views_.running.size(); ++i)
    candidates_.push_back({run_of(int(i)).request->id, &views_.running[i]});
  for (size_t i = 0; i < views_.waiting.size(); ++i)
    candidates_.push_back({admit_of(int(i)).request->id, &views_.waiting[i]});
  return chunks_.decide(candidates_, options_.step_tokens, block_tokens, under_way.stages);
}

void Scheduler::make_plan(double now, const UnderWay& under_way) {
  look_at_running(under_way);
  look_at_waiting(now);
  if (refused_) views_.waiting.clear();
  const KvStats kv = memory_.stats();
  const int step_tokens = choose_chunks(kv.block_tokens, under_way);
  const BatchView view = {.running = views_.running,
                          .waiting = views_.waiting,
                          .available_blocks = kv.available(),
                          .capacity_blocks = kv.capacity,
                          .block_tokens = kv.block_tokens,
                          .max_batch = options_.max_batch,
                          .step_tokens = step_tokens,
                          .admission = admission_};
  plan_.clear();
  options_.policy->plan(view, plan_);
  if (watchers_.plans && !plan_.empty()) watchers_.plans(view, plan_);
}

bool Scheduler::plan(double now, const UnderWay& under_way) {
  make_plan(now, under_way);
  if (needs_settling(under_way)) return false;
  while (!plan_.preempts.empty() && give_up_early()) make_plan(now, under_way);
  return !needs_settling(under_way);
}

std::vector<uint64_t> Scheduler::planned_requests() const {
  std::vector<uint64_t> requests;
  for (const ScheduledRun& run : plan_.runs) requests.push_back(run_of(run.index).request->id);
  for (const ScheduledRun& run : plan_.admits) requests.push_back(admit_of(run.index).request->id);
  for (int index : plan_.preempts) requests.push_back(run_of(index).request->id);
  return requests;
}

// True: the plan does something to sequences under way that is not allowed. It preempts them or, where the model
// samples, it needs logits on the CPU.
bool Scheduler::needs_settling(const UnderWay& under_way) const {
  if (!under_way.any) return false;
  if (under_way.waves)
    return std::any_of(plan_.preempts.begin(), plan_.preempts.end(), [&](int index) {
      const Sequence& s = run_of(index);
      return memory_.written_tokens(s.kv) < s.computed;
    });
  auto by_cpu = [](const Sequence& s) {
    return s.stands_for > 1 || more_than_a_draw(s.request->sampling) || s.wants_prompt_logprobs();
  };
  return !plan_.preempts.empty() || std::any_of(plan_.runs.begin(), plan_.runs.end(), [&](const ScheduledRun& run) {
    const Sequence& s = run_of(run.index);
    return by_cpu(s) && (run.n_tokens == s.pending() || s.wants_prompt_logprobs());
  }) || std::any_of(plan_.admits.begin(), plan_.admits.end(), [&](const ScheduledRun& run) {
    return by_cpu(admit_of(run.index));
  });
}

bool Scheduler::apply(double now, const UnderWay& under_way, std::vector<StepEntry>& entries) {
  entries.clear();
  std::ranges::sort(plan_.preempts, std::greater());  // youngest first, so that the oldest waits in front
  for (int i : plan_.preempts) preempt(std::move(running_[size_t(views_.runnable[size_t(i)])]));
  // A step has max_batch rows of logits: one for each sequence. Prompts whose logprobs are wanted share the rest, so
  // they take more steps.
  int spare_rows = options_.max_batch - int(plan_.runs.size() + plan_.admits.size());
  auto tokens_of = [&spare_rows](const Sequence& s, const ScheduledRun& run) {
    if (!s.wants_prompt_logprobs()) return run.n_tokens;
    const int n = std::min(run.n_tokens, 1 + spare_rows);
    spare_rows -= n - 1;
    return n;
  };
  for (const ScheduledRun& run : plan_.runs) {
    Sequence& s = run_of(run.index);
    const int n_tokens = tokens_of(s, run);
    if (!append_room(memory_, s, n_tokens)) continue;  // the plan underestimated; it runs in the next step
    entries.push_back(entry_of(s, n_tokens));
  }
  std::erase(running_, nullptr);
  // A refusal stops admission: later sequences wait too.
  for (const ScheduledRun& run : plan_.admits) {
    SequencePtr& s = waiting_[size_t(views_.admissible[size_t(run.index)])];
    if (!plan_.preempts.empty() || !place(*s, tokens_of(*s, run), now, entries)) break;
    running_.push_back(std::move(s));
  }
  std::erase(waiting_, nullptr);
  const bool nothing = entries.empty() && plan_.preempts.empty();
  refused_ = nothing && !plan_.admits.empty() && !running_.empty() && !under_way.any;
  return !nothing || refused_ || (!under_way.any && loading_ == 0 && make_room());
}

// ---- Memory.

// Takes memory for a waiting sequence. Its KV may still be loading. False: there is no memory.
bool Scheduler::reserve(Sequence& s, double now) {
  const Result<KvReservation> reserved = memory_.reserve(s.tokens, s.salt());
  if (!reserved) return false;
  s.kv = reserved.value().handle;
  s.computed = reserved.value().cached_tokens;
  s.early = s.loading = reserved.value().loading;
  loading_ += int(s.loading);
  if (s.loading) s.load_s = now;
  return true;
}

// True: all of a prompt that leaves has room, beside the blocks that other such prompts still need. The plan counts a
// cached prefix that no sequence holds as a hit and as available, so it may promise these blocks twice.
bool Scheduler::fits_whole(const Sequence& s) const {
  const KvStats kv = memory_.stats();
  int need = 0;
  const auto add = [&](const Sequence& one) {
    if (one.tokens.back() < 0) return;  // it has all that it computes here
    const SequenceView view = view_of(one);
    need += new_blocks(view, view.pending(), kv.block_tokens);
  };
  add(s);
  for (const SequencePtr& other : running_)
    if (other && other->leaves) add(*other);
  for (const SequencePtr& other : waiting_) {
    if (other && !other->scheduled) break;
    if (other && other->leaves && other.get() != &s) add(*other);
  }
  return need <= kv.available();
}

// Gets memory for the next n_tokens of a waiting sequence. False: it does not run now.
bool Scheduler::place(Sequence& s, int n_tokens, double now, std::vector<StepEntry>& entries) {
  const bool held = s.kv != kNoKv;
  if (!held) {
    if (!reserve(s, now) || s.loading) return false;
    n_tokens = std::min(n_tokens, s.pending());
  }
  const bool fits = !s.leaves || fits_whole(s);
  if (!fits || !append_room(memory_, s, n_tokens)) {
    if (held) return false;
    release(s);
    s.computed = 0;
    if (!fits && !s.scheduled) s.cached_tokens = 0;  // not before the plan has room without its prefix
    return false;
  }
  s.early = false;
  if (!s.scheduled) {
    s.cached_tokens = s.computed;
    if (s.leaves) hooks_->prefill_started(s);
  }
  if (s.leaves && s.computed > 0) hooks_->kv_written(s, 0, n_layers_, 0, s.computed);
  if (!s.scheduled) s.scheduled_s = now;
  s.scheduled = true;
  s.queue_ticket.reset();
  entries.push_back(entry_of(s, n_tokens));
  return true;
}

// Called when nothing fits. The youngest sequence that holds memory gives it up, provided another one needs it. A
// sequence alone fits, because requests whose longest output exceeds the pool are refused; in a shared pool it fits
// once prompts held by others have arrived here. False: no sequence can give up memory.
bool Scheduler::make_room() {
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

void Scheduler::preempt(SequencePtr s) {
  if (s->kv != kNoKv) memory_.free(std::exchange(s->kv, kNoKv));
  s->drafts.reset();
  s->computed = 0;
  s->early = s->probed = false;
  ++stats_.preemptions;
  waiting_.insert(first_without_kv(), std::move(s));
}

void Scheduler::release(Sequence& s) {
  if (s.kv != kNoKv) memory_.free(std::exchange(s.kv, kNoKv));
}

// ---- KV that an offload tier loads.

// Gives a waiting sequence its memory before its turn, if offload has its KV and nobody else needs the blocks now. The
// KV is then there when its turn comes. `cached_tokens`: already in this memory.
void Scheduler::load_early(Sequence& s, int cached_tokens, double now) {
  if (s.kv != kNoKv || memory_.matched_tokens(s.tokens, s.salt()) <= cached_tokens) return;
  const KvStats kv = memory_.stats();
  auto blocks = [&kv](int tokens) { return blocks_for(tokens, kv.block_tokens); };
  int need = blocks(int(s.tokens.size())) - cached_tokens / kv.block_tokens + kv.capacity / 100;
  for (const SequenceView& view : views_.running) need += std::max(0, blocks(view.n_tokens + 1) - view.n_blocks);
  for (const SequenceView& ahead : views_.waiting)
    need += std::max(0, blocks(ahead.n_tokens) - std::max(ahead.n_blocks, ahead.n_computed / kv.block_tokens));
  if (need <= kv.available() && reserve(s, now)) s.early = true;
}

void Scheduler::poll_loads() {
  if (loading_ == 0) return;
  loading_ = 0;
  for (const SequencePtr& s : waiting_) {
    if (!s->loading) continue;
    if (!memory_.ready(s->kv)) {
      ++loading_;
      continue;
    }
    s->computed = memory_.written_tokens(s->kv);
    s->loading = false;
    if (watchers_.loads) watchers_.loads(*s);
  }
}

// Takes memory back from the last sequence that got it early. False: none can give it back now (a block that is still
// being loaded stays held).
bool Scheduler::give_up_early() {
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

}  // namespace xpyd::batch
