#include "batch/engine.h"

#include <algorithm>

#include "base/hash.h"

namespace xpyd {

Engine::Engine(Model& model, KvMemory& memory, EngineOptions options, Clock& clock, EngineHooks* hooks)
    : model_(model), memory_(memory), options_(std::move(options)), clock_(clock), hooks_(hooks) {
  logits_.resize(size_t(options_.max_batch) * size_t(model.config().vocab));
}

void Engine::submit(SequencePtr sequence) {
  auto place = waiting_.end();
  while (place != waiting_.begin()) {
    const Sequence& before = **std::prev(place);
    if (before.scheduled || before.request->priority <= sequence->request->priority) break;
    --place;
  }
  waiting_.insert(place, std::move(sequence));
}

void Engine::adopt(SequencePtr sequence) {
  auto place = std::find_if(waiting_.begin(), waiting_.end(),
                            [](const SequencePtr& s) { return s->kv == kNoKv; });
  waiting_.insert(place, std::move(sequence));
}

int Engine::waiting_with_kv() const {
  return int(std::count_if(waiting_.begin(), waiting_.end(),
                           [](const SequencePtr& s) { return s->kv != kNoKv; }));
}

bool Engine::step() {
  double start = clock_.now();
  drop_ended(start);
  make_plan();
  bool moved = apply_plan(start);
  if (entries_.empty()) return moved;
  double planned = clock_.now();
  forward();
  emit_tokens();
  double done = clock_.now();
  ++stats_.steps;
  stats_.schedule_seconds += planned - start;
  stats_.step_seconds += done - planned;
  return true;
}

SequenceView Engine::view_of(const Sequence& s) const {
  SequenceView view;
  view.n_tokens = int(s.tokens.size());
  view.n_computed = s.kv == kNoKv && !s.scheduled ? s.cached_tokens : s.computed;
  view.n_limit = s.n_prompt() + s.stands_for * s.request->max_tokens;
  view.choices = s.stands_for;
  if (s.kv != kNoKv) {
    view.n_blocks = int(memory_.blocks(s.kv).size());
    view.tail_shared = memory_.tail_shared(s.kv);
  }
  return view;
}

void Engine::make_plan() {
  running_views_.clear();
  waiting_views_.clear();
  for (const SequencePtr& s : running_) running_views_.push_back(view_of(*s));
  // No policy can start more than the free places; the rest of the queue need not be looked at.
  size_t startable = size_t(std::max(0, options_.max_batch - int(running_.size())));
  for (size_t i = 0; i < waiting_.size() && i < startable; ++i) {
    Sequence& s = *waiting_[i];
    if (!s.probed) {
      s.cached_tokens = memory_.probe(s.tokens, s.request->cache_salt);
      s.probed = true;
    }
    waiting_views_.push_back(view_of(s));
  }
  KvStats kv = memory_.stats();
  BatchView view{.running = running_views_,
                 .waiting = waiting_views_,
                 .available_blocks = kv.available(),
                 .capacity_blocks = kv.capacity,
                 .block_tokens = kv.block_tokens,
                 .max_batch = options_.max_batch,
                 .step_tokens = options_.step_tokens};
  plan_.clear();
  options_.policy->plan(view, plan_);
}

// Gets memory for the next n_tokens of a waiting sequence. False: nothing has changed.
bool Engine::place(SequencePtr& s, int n_tokens, double now) {
  if (s->kv == kNoKv) {
    Result<KvReservation> reserved = memory_.reserve(s->tokens, s->request->cache_salt);
    if (!reserved) return false;
    int cached = reserved.value().cached_tokens;
    n_tokens = std::min(n_tokens, int(s->tokens.size()) - cached);
    if (!memory_.append(reserved.value().handle, n_tokens)) {
      memory_.free(reserved.value().handle);
      return false;
    }
    s->kv = reserved.value().handle;
    s->computed = cached;
    if (!s->scheduled) {
      s->cached_tokens = cached;
      stats_.prompt_tokens += s->n_prompt();
    }
    if (s->leaves && !s->scheduled) hooks_->prefill_started(*s);
    if (s->leaves && cached > 0) hooks_->kv_written(*s, 0, model_.config().n_layers, 0, cached);
  } else if (!memory_.append(s->kv, n_tokens)) {
    return false;
  }
  if (!s->scheduled) s->scheduled_s = now;
  s->scheduled = true;
  s->queue_ticket.reset();
  entries_.push_back({s.get(), n_tokens, s->computed + n_tokens == int(s->tokens.size())});
  return true;
}

// False: nothing runs, and nothing was changed either.
bool Engine::apply_plan(double now) {
  entries_.clear();
  std::sort(plan_.preempts.begin(), plan_.preempts.end());
  for (auto i = plan_.preempts.rbegin(); i != plan_.preempts.rend(); ++i) {
    preempt(std::move(running_[size_t(*i)]));  // youngest first, so that the oldest waits in front
  }
  for (const ScheduledRun& run : plan_.runs) {
    Sequence& s = *running_[size_t(run.index)];
    if (!memory_.append(s.kv, run.n_tokens)) continue;  // the plan's arithmetic was too hopeful: next step
    entries_.push_back({&s, run.n_tokens, s.computed + run.n_tokens == int(s.tokens.size())});
  }
  std::erase(running_, nullptr);
  // A refusal stops admission: whoever comes later waits too.
  size_t admitted = 0;
  for (const ScheduledRun& run : plan_.admits) {
    SequencePtr& s = waiting_[admitted];
    if (!plan_.preempts.empty() || !place(s, run.n_tokens, now)) break;
    running_.push_back(std::move(s));
    ++admitted;
  }
  waiting_.erase(waiting_.begin(), waiting_.begin() + long(admitted));

  if (entries_.empty() && plan_.preempts.empty()) return make_room();
  return true;
}

// Nothing fits: the youngest of those who hold memory gives it up. One alone fits, because no request is taken
// whose longest output exceeds the pool (of a shared pool: once the prompts that others hold have arrived
// here, too). False: there is nobody to ask.
bool Engine::make_room() {
  if (running_.size() > 1) {
    SequencePtr victim = std::move(running_.back());
    running_.pop_back();
    preempt(std::move(victim));
    return true;
  }
  if (!running_.empty() || waiting_with_kv() < 2) return false;
  auto last = std::find_if(waiting_.rbegin(), waiting_.rend(),
                           [](const SequencePtr& s) { return s->kv != kNoKv; });
  SequencePtr victim = std::move(*last);
  waiting_.erase(std::next(last).base());
  preempt(std::move(victim));
  return true;
}

void Engine::preempt(SequencePtr s) {
  release(*s);
  s->computed = 0;
  ++stats_.preemptions;
  auto place = std::find_if(waiting_.begin(), waiting_.end(),
                            [](const SequencePtr& other) { return other->kv == kNoKv; });
  waiting_.insert(place, std::move(s));
}

void Engine::forward() {
  token_ids_.clear();
  q_offsets_.assign(1, 0);
  kv_lengths_.clear();
  logit_rows_.clear();
  views_.clear();
  for (const Entry& entry : entries_) {
    const Sequence& s = *entry.sequence;
    auto first = s.tokens.begin() + s.computed;
    token_ids_.insert(token_ids_.end(), first, first + entry.n_tokens);
    q_offsets_.push_back(int32_t(token_ids_.size()));
    kv_lengths_.push_back(s.computed + entry.n_tokens);
    views_.push_back(memory_.view(s.kv));
    if (entry.wants_logits) logit_rows_.push_back(int32_t(token_ids_.size()) - 1);
  }
  bool layerwise = hooks_ && hooks_->layerwise();
  StepInput input{.token_ids = token_ids_,
                  .q_offsets = q_offsets_,
                  .kv_lengths = kv_lengths_,
                  .views = views_,
                  .logit_rows = logit_rows_,
                  .observer = layerwise ? this : nullptr};
  model_.forward(input, logits_.data());
  for (const Entry& entry : entries_) {
    Sequence& s = *entry.sequence;
    memory_.written(s.kv, std::span(s.tokens).subspan(size_t(s.computed), size_t(entry.n_tokens)));
    s.computed += entry.n_tokens;
    if (s.leaves && !layerwise)
      hooks_->kv_written(s, 0, model_.config().n_layers, s.computed - entry.n_tokens, s.computed);
  }
}

void Engine::layer_done(int layer) {
  for (const Entry& entry : entries_) {
    Sequence& s = *entry.sequence;
    if (s.leaves) hooks_->kv_written(s, layer, layer + 1, s.computed, s.computed + entry.n_tokens);
  }
}

void Engine::emit_tokens() {
  double now = clock_.now();
  const float* logits = logits_.data();
  for (const Entry& entry : entries_) {
    if (!entry.wants_logits) continue;
    Sequence& s = *entry.sequence;
    if (s.n_output() == 0) {
      first_tokens(s, logits, now);
    } else if (accept_token(s, logits, now)) {
      release(s);
      s.stands_for = 0;  // ended
    }
    logits += model_.config().vocab;
  }
  std::erase_if(running_, [](const SequencePtr& s) { return s->stands_for == 0; });
  for (SequencePtr& s : arrived_) running_.push_back(std::move(s));
  arrived_.clear();
}

// The prompt is done: the sequence becomes its n choices, each with a first token of its own. `s` itself is
// spent (stands_for = 0); those who go on stay here or leave.
void Engine::first_tokens(Sequence& s, const float* logits, double now) {
  std::vector<SequencePtr> alive;
  for (int choice = 0; choice < s.stands_for; ++choice) {
    SequencePtr child = make_sequence(s.request, s.sink, s.cancelled);
    child->choice = choice;
    child->stands_for = 1;
    child->leaves = s.leaves;
    child->decode_instance = s.decode_instance;
    child->computed = s.computed;
    child->cached_tokens = s.cached_tokens;
    child->probed = child->scheduled = true;
    child->queued_s = s.queued_s;
    child->scheduled_s = s.scheduled_s;
    child->sampler = SamplerState(s.request->sampling, choice, s.request->prompt);
    child->text = OutputText(options_.tokenizer, *s.request);
    if (!accept_token(*child, logits, now)) alive.push_back(std::move(child));
  }
  s.stands_for = 0;
  if (alive.empty()) {
    release(s);
    if (s.leaves) hooks_->prefill_cancelled(s);
    return;
  }
  alive[0]->kv = std::exchange(s.kv, kNoKv);
  if (s.leaves) {
    hooks_->prefill_done(std::move(alive));
    return;
  }
  share_kv(std::move(alive));
}

bool Engine::accept_token(Sequence& s, const float* logits, double now) {
  const Request& request = *s.request;
  size_t vocab = size_t(model_.config().vocab);
  s.logits_hash = hash_bytes(logits, vocab * sizeof(float), s.logits_hash);
  TokenEvent event;
  event.sampled = sample({logits, vocab}, request.sampling, s.sampler, sampler_scratch_);
  int32_t token = event.sampled.chosen.token;
  s.tokens.push_back(token);
  ++stats_.generated_tokens;

  bool may_stop = s.n_output() >= request.min_tokens;
  auto among = [token](const auto& list) {
    return std::find(list.begin(), list.end(), token) != list.end();
  };
  bool eos = may_stop && !request.ignore_eos && among(options_.eos_tokens);
  bool stop_token = may_stop && !eos && among(request.stop_token_ids);
  if (eos || stop_token) {
    event.finish = FinishReason::stop;
    if (stop_token) event.stop_token = token;
    if (request.include_stop_text) event.text = s.text.feed(token, request, false).text;
    event.text += s.text.flush();
  } else {
    OutputText::Piece piece = s.text.feed(token, request, may_stop);
    event.text = std::move(piece.text);
    if (piece.stop) {
      event.finish = FinishReason::stop;
      event.stop_text = *piece.stop;
    } else if (s.n_output() >= request.max_tokens) {
      event.finish = FinishReason::length;
      event.text += s.text.flush();
    }
  }
  event.request_id = request.id;
  event.choice = s.choice;
  event.token = token;
  event.has_logprobs = request.sampling.top_logprobs >= 0;
  event.cached_tokens = s.cached_tokens;
  event.logits_hash = s.logits_hash;
  event.queued_s = s.queued_s;
  event.scheduled_s = s.scheduled_s;
  event.time_s = now;
  bool ended = event.finish != FinishReason::none;
  s.sink->on_event(std::move(event));
  return ended;
}

// choices[0] holds the KV of all: the others fork it, or wait and compute it again when there is no room.
void Engine::share_kv(std::vector<SequencePtr> choices) {
  for (size_t i = 1; i < choices.size(); ++i) {
    Result<KvHandle> forked = memory_.fork(choices[0]->kv);
    if (forked) {
      choices[i]->kv = forked.value();
      arrived_.push_back(std::move(choices[i]));
    } else {
      preempt(std::move(choices[i]));
    }
  }
  arrived_.insert(arrived_.begin(), std::move(choices[0]));
}

void Engine::release(Sequence& s) {
  if (s.kv != kNoKv) memory_.free(std::exchange(s.kv, kNoKv));
}

void Engine::end(Sequence& s, FinishReason reason, const std::string& error, double now) {
  release(s);
  if (s.leaves) hooks_->prefill_cancelled(s);
  emit_end(s, reason, error, now);
}

void Engine::drop_ended(double now) {
  auto ended = [&](const SequencePtr& s) {
    bool cancelled = s->cancelled && s->cancelled->load(std::memory_order_relaxed);
    bool late = s->request->deadline_s > 0 && now > s->request->deadline_s;
    if (!cancelled && !late) return false;
    end(*s, cancelled ? FinishReason::abort : FinishReason::timeout, "", now);
    return true;
  };
  std::erase_if(running_, ended);
  std::erase_if(waiting_, ended);
}

void Engine::end_all(FinishReason reason, const std::string& error) {
  double now = clock_.now();
  for (SequencePtr& s : running_) end(*s, reason, error, now);
  for (SequencePtr& s : waiting_) end(*s, reason, error, now);
  running_.clear();
  waiting_.clear();
}

}  // namespace xpyd
