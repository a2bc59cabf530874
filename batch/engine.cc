#include "batch/engine.h"

#include <algorithm>
#include <limits>

#include "base/row_hash.h"
#include "base/status.h"

namespace xpyd::batch {

Engine::Engine(Model& model, KvMemory& memory, EngineOptions options, Clock& clock, EngineHooks* hooks)
    : model_(model),
      memory_(memory),
      options_(std::move(options)),
      admission_(options_.admission ? options_.admission : find_admission_rule(options_.policy->admission)),
      clock_(clock),
      hooks_(hooks) {
  chunks_.options = options_.chunks;
  if (!chunks_.options.policy) chunks_.options.policy = find_chunk_policy("fixed");
  logits_.resize(size_t(options_.max_batch) * size_t(model.config().vocab));
}

void Engine::submit(SequencePtr sequence) {
  if (Sequence& s = *sequence; s.wants_prompt_logprobs()) {
    s.prompt_logprobs.assign(s.tokens.size(), Sampled{});
    s.prompt_logprobs[0].chosen = {s.tokens[0], std::numeric_limits<float>::quiet_NaN()};
  }
  chunks_.arrived(sequence->n_prompt(), clock_.now());
  auto place = waiting_.end();
  while (place != waiting_.begin()) {
    const Sequence& before = **std::prev(place);
    if (before.scheduled || before.request->priority <= sequence->request->priority) break;
    --place;
  }
  waiting_.insert(place, std::move(sequence));
}

void Engine::adopt(SequencePtr sequence) {
  sequence->probed = sequence->scheduled = true;  // where its KV was computed
  auto place = std::find_if(waiting_.begin(), waiting_.end(), [](const SequencePtr& s) { return s->kv == kNoKv; });
  waiting_.insert(place, std::move(sequence));
}

int Engine::waiting_with_kv() const {
  return int(std::count_if(waiting_.begin(), waiting_.end(), [](const SequencePtr& s) { return s->kv != kNoKv; }));
}

bool Engine::step() {
  const double start = clock_.now(), stepped = stats_.step_seconds;
  const bool copying = memory_.poll();
  drop_ended(start);
  poll_loads();
  make_plan();
  if (under_way_.begun && needs_settling()) {
    settle();
    make_plan();
  }
  while (!plan_.preempts.empty() && give_up_early()) make_plan();
  const bool moved = apply_plan(start);
  if (!next_.entries.empty() || under_way_.begun) keep_chunks();
  const double planned = clock_.now();
  stats_.schedule_seconds += planned - start - (stats_.step_seconds - stepped);
  if (next_.entries.empty()) {
    if (under_way_.begun) {
      settle();
      return true;
    }
    if (moved || (!copying && loading_ == 0)) return moved;
    // Only copies to or from a tier go on.
    clock_.sleep(50e-6);
    return true;
  }
  stats_.work.steps += 1;
  for (const Entry& entry : next_.entries) {
    if (entry.n_tokens > 1 || entry.first == 0)
      stats_.work.add_prompt(entry.n_tokens, entry.first);
    else
      stats_.work.add_decodes(1, entry.end());
  }
  if (chosen_by_model()) {
    begin();
  } else {
    forward();
  }
  ++stats_.steps;
  stats_.step_seconds += clock_.now() - planned;
  return true;
}

// The next step as the model sees it: spans into this engine's arrays.
StepInput Engine::gather() {
  return arrays_.gather(next_.entries, memory_, hooks_ && hooks_->layerwise() ? this : nullptr);
}

void Engine::layer_done(int layer) {
  hooks_->layer_ended();
  for (const Entry& entry : next_.entries) {
    Sequence& s = *entry.sequence;
    if (s.leaves) hooks_->kv_written(s, layer, layer + 1, entry.first, entry.end());
  }
}

bool Engine::chosen_by_model() const {
  return options_.ahead && model_.chooses() &&
         std::none_of(next_.entries.begin(), next_.entries.end(), [](const Entry& entry) {
           const Sequence& s = *entry.sequence;
           return entry.n_prompt_rows > 0 ||
                  (entry.wants_logits && (s.stands_for > 1 || more_than_a_draw(s.request->sampling)));
         });
}

// ---- One step at a time: the CPU waits, then chooses from the logits.

void Engine::forward() {
  XPYD_CHECK(!under_way_.begun);
  const StepInput input = gather();
  const double start = clock_.now();
  model_.forward(input, logits_.data());
  const double now = clock_.now();
  stats_.wait_seconds += now - start;
  for (const Entry& entry : next_.entries) entry.sequence->computed = entry.end();
  kv_in_place(next_);
  const float* logits = logits_.data();
  const size_t vocab = size_t(model_.config().vocab);
  std::vector<std::pair<Sequence*, const float*>> splits;  // last: who ends makes room for choices
  for (Entry& entry : next_.entries) {
    Sequence& s = *entry.sequence;
    for (int at = entry.first; at < entry.first + entry.n_prompt_rows; ++at, logits += vocab)
      s.prompt_logprobs[size_t(at) + 1] = judge({logits, vocab}, s.tokens[size_t(at) + 1], s.request->prompt_logprobs,
                                                sampler_scratch_);
    if (!entry.wants_logits) continue;
    if (s.stands_for > 1) {
      splits.push_back({&s, logits});
    } else {
      open_choice(s, s.choice);
      Sampled sampled = sample({logits, vocab}, s.request->sampling, s.sampler, sampler_scratch_);
      take_token(entry, std::move(sampled), row_hash(logits, vocab), now);
    }
    logits += vocab;
  }
  for (auto [s, row] : splits) split(*s, row, now);
  tidy(next_);
}

// ---- Two steps at a time: the model chooses.

// A token that is not known yet is -1 - r in its sequence, r being the row that chooses it; the step after may compute
// it already. So a sequence's end is seen one step late, and that step's work on it is dropped.

void Engine::begin() {
  draws_.clear();
  const StepInput input = gather();
  for (const Entry& entry : next_.entries) {
    if (!entry.wants_logits) continue;
    Sequence& s = *entry.sequence;
    open_choice(s, s.choice);
    draws_.push_back(next_draw(s.request->sampling, s.sampler));
    s.tokens.push_back(-int32_t(draws_.size()));
  }
  model_.begin(input, draws_);
  for (const Entry& entry : next_.entries) entry.sequence->computed = entry.end();
  next_.begun = true;
  if (under_way_.begun) finish(under_way_);
  std::swap(next_, under_way_);
}

void Engine::finish(Step& step) {
  const double start = clock_.now();
  chosen_.resize(step.entries.size());
  model_.end(chosen_.data());
  const double now = clock_.now();
  stats_.wait_seconds += now - start;
  kv_in_place(step);
  auto chosen = chosen_.begin();
  for (Entry& entry : step.entries) {
    if (!entry.wants_logits) continue;
    const Chosen& c = *chosen++;
    if (entry.ended) continue;
    Sampled sampled;
    sampled.chosen.token = c.token;
    sampled.nan_logits = c.nan_logits;
    take_token(entry, std::move(sampled), c.row_hash, now);
  }
  tidy(step);
}

void Engine::settle() {
  if (!under_way_.begun) return;
  const double start = clock_.now();
  finish(under_way_);
  stats_.step_seconds += clock_.now() - start;
}

// ---- What a step gave.

void Engine::kv_in_place(const Step& step) {
  const bool layerwise = hooks_ && hooks_->layerwise();
  if (hooks_ && !layerwise) hooks_->layer_ended();
  for (const Entry& entry : step.entries) {
    if (entry.ended) continue;
    Sequence& s = *entry.sequence;
    memory_.written(s.kv, std::span(s.tokens).subspan(size_t(entry.first), size_t(entry.n_tokens)));
    if (s.leaves && !layerwise) hooks_->kv_written(s, 0, model_.config().n_layers, entry.first, entry.end());
  }
}

void Engine::tidy(Step& step) {
  for (SequencePtr& s : step.ended) release(*s);
  step.ended.clear();
  step.entries.clear();
  step.begun = false;
  std::erase(running_, nullptr);
  for (SequencePtr& s : arrived_) running_.push_back(std::move(s));
  arrived_.clear();
}

// What a choice has of its own begins with its first token.
void Engine::open_choice(Sequence& s, int choice) {
  if (s.n_output() > 0) return;
  s.choice = choice;
  s.stands_for = 1;
  s.sampler = SamplerState(s.request->sampling, choice, s.request->prompt);
  s.text = OutputText(options_.tokenizer, *s.request);
}

// One sequence's next token. A first token may be the last one here.
void Engine::take_token(const Entry& entry, Sampled sampled, uint64_t row_hash, double now) {
  Sequence& s = *entry.sequence;
  const bool first = entry.end() == s.given;
  if (first) s.prompt_ticket.reset();
  const bool ended = accept_token(s, size_t(entry.end()), std::move(sampled), row_hash, now);
  if (!ended && !(first && s.leaves)) return;
  SequencePtr gone = remove(s);
  if (!ended) {
    std::vector<SequencePtr> choices;
    choices.push_back(std::move(gone));
    hooks_->prefill_done(std::move(choices));
    return;
  }
  if (s.leaves) hooks_->prefill_cancelled(s);
  const auto later = std::find_if(next_.entries.begin(), next_.entries.end(),
                                  [&s](const Entry& other) { return other.sequence == &s; });
  if (next_.begun && later != next_.entries.end()) {
    later->ended = true;
    next_.ended.push_back(std::move(gone));
    return;
  }
  release(s);
}

SequencePtr Engine::remove(const Sequence& s) {
  return std::move(
      *std::find_if(running_.begin(), running_.end(), [&s](const SequencePtr& other) { return other.get() == &s; }));
}

// The prompt of n > 1 choices is done: each gets a first token of its own, and those who go on stay here or leave.
void Engine::split(Sequence& s, const float* logits, double now) {
  const SequencePtr spent = remove(s);
  const size_t vocab = size_t(model_.config().vocab);
  const uint64_t hash = row_hash(logits, vocab);
  std::vector<SequencePtr> alive;
  for (int choice = 0; choice < s.stands_for; ++choice) {
    SequencePtr child = make_sequence(s.request, state_of(s), s.sink, s.cancelled, options_.tokenizer);
    open_choice(*child, choice);
    child->attempt = s.attempt;
    child->leaves = s.leaves;
    child->computed = s.computed;
    child->probed = child->scheduled = true;
    if (alive.empty()) child->prompt_logprobs = std::exchange(s.prompt_logprobs, {});
    Sampled sampled = sample({logits, vocab}, s.request->sampling, child->sampler, sampler_scratch_);
    if (!accept_token(*child, size_t(s.n_prompt()), std::move(sampled), hash, now)) alive.push_back(std::move(child));
  }
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

// Token `at` of the sequence. True: it has ended.
bool Engine::accept_token(Sequence& s, size_t at, Sampled sampled, uint64_t row_hash, double now) {
  const Request& request = *s.request;
  const int32_t token = sampled.chosen.token;
  s.logits_hash = chain_hash(s.logits_hash, row_hash);
  if (at == s.tokens.size()) {
    s.tokens.push_back(token);
  } else {
    s.tokens[at] = token;
  }
  const int n_output = int(at) + 1 - s.n_prompt();
  ++stats_.generated_tokens;
  TokenEvent event = event_of(s, s.choice, now);
  event.sampled = std::move(sampled);
  event.prompt_logprobs = std::exchange(s.prompt_logprobs, {});

  bool may_stop = n_output >= request.min_tokens;
  auto among = [token](const auto& list) { return std::find(list.begin(), list.end(), token) != list.end(); };
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
    } else if (n_output >= request.max_tokens) {
      event.finish = FinishReason::length;
      event.text += s.text.flush();
    }
  }
  event.token = token;
  event.has_logprobs = request.sampling.top_logprobs >= 0;
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
  auto reason = [now](const SequencePtr& s) {
    if (s->cancelled && s->cancelled->load(std::memory_order_relaxed)) return FinishReason::abort;
    const bool late = s->request->deadline_s > 0 && now > s->request->deadline_s;
    return late ? FinishReason::timeout : FinishReason::none;
  };
  auto ended = [&](const SequencePtr& s) {
    const FinishReason why = reason(s);
    if (why != FinishReason::none) end(*s, why, "", now);
    return why != FinishReason::none;
  };
  if (std::any_of(running_.begin(), running_.end(),
                  [&](const SequencePtr& s) { return reason(s) != FinishReason::none; })) {
    settle();
    std::erase_if(running_, ended);  // not outside: who is cancelled only now may be under way
  }
  std::erase_if(waiting_, ended);
}

void Engine::end_all(FinishReason reason, const std::string& error) {
  settle();
  double now = clock_.now();
  for (SequencePtr& s : running_) end(*s, reason, error, now);
  for (SequencePtr& s : waiting_) end(*s, reason, error, now);
  running_.clear();
  waiting_.clear();
}

}  // namespace xpyd::batch
