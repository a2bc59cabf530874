#include "batch/engine/engine.h"

#include <algorithm>

#include "base/row_hash.h"
#include "base/status.h"

namespace xpyd::batch {

constexpr char kNotFinite[] =
    "the model's logits are not finite: its weights contain NaN or infinite values, or its numbers overflow";

Engine::Engine(Model& model, KvMemory& memory, EngineOptions options, Clock& clock, EngineHooks* hooks)
    : memory_(memory),
      options_(std::move(options)),
      vocab_(size_t(model.config().vocab)),
      n_layers_(model.config().n_layers),
      clock_(clock),
      hooks_(hooks),
      scheduler_(options_, memory, hooks, n_layers_, stats_),
      steps_(model, memory, clock, hooks, options_, stats_) {
  if (options_.speculation.on()) drafts_.emplace(options_, DrafterParts{model, memory, clock});
}

void Engine::submit(SequencePtr sequence) {
  charge(clock_.now());
  scheduler_.submit(std::move(sequence));
}

void Engine::adopt(SequencePtr sequence) {
  charge(clock_.now());
  scheduler_.adopt(std::move(sequence));
}

bool Engine::step() {
  const double start = clock_.now(), stepped = stats_.step_seconds, waited = stats_.wait_seconds;
  const bool copying = memory_.poll();
  const bool moved = iterate(start);
  const double computed = in_waves() ? stats_.wait_seconds - waited : stats_.step_seconds - stepped;
  stats_.schedule_seconds += clock_.now() - start - computed;
  if (moved || (!copying && !scheduler_.loading())) return moved;
  // Only copies to or from an offload tier are in progress.
  clock_.sleep(50e-6);
  return true;
}

bool Engine::iterate(double now) {
  charge(now);
  bool ended = false;
  for (; steps_.ended(); ended = true) finish();
  steps_.tell_written();
  drop_ended(now);
  scheduler_.poll_loads();
  if (steps_.full()) return wait();

  const UnderWay under_way = steps_.under_way();
  if (!scheduler_.plan(now, under_way)) return wait();
  EngineStep& next = steps_.next();
  const bool moved = scheduler_.apply(now, under_way, next.entries);
  if (drafts_) drafts_->add(next.entries, scheduler_.chunks().cost());
  if (next.entries.empty()) return steps_.empty() ? moved || ended : wait();

  run();
  return true;
}

void Engine::run() {
  EngineStep& step = steps_.next();
  step.shape = {.steps = 0};
  for (const StepEntry& entry : step.entries) {
    step.shape.add_tokens(entry.n_tokens, entry.first);
    stats_.prompt_tokens += std::clamp(entry.sequence->n_prompt() - entry.first, 0, entry.n_tokens);
  }
  if (!in_waves()) stats_.work.add(step.shape);
  const double begun = clock_.now();
  if (steps_.begin()) wait();
  if (in_waves()) return;
  ++stats_.steps;
  stats_.step_seconds += clock_.now() - begun;
}

// Waits for the oldest step or, with waves, for other news. Always returns true: something moved or may move now.
bool Engine::wait() {
  if (steps_.wait()) finish();
  return true;
}

// Adds the KV held since the last call. Between two calls no sequence gets or frees memory, except right before or
// after one.
void Engine::charge(double now) {
  const double seconds = now - std::exchange(charged_s_, now);
  const auto add = [&](const auto& sequences) {
    for (const SequencePtr& s : sequences)
      if (s && s->kv != kNoKv)
        (s->n_output() > 0 ? stats_.decode_block_s : stats_.prompt_block_s) += seconds *
                                                                               double(memory_.blocks(s->kv).size());
  };
  add(scheduler_.running()), add(scheduler_.waiting());
}

// ---- Results of a step.

void Engine::finish() {
  std::unique_ptr<EngineStep> step = steps_.end();
  const double now = clock_.now();
  charge(now);
  kv_in_place(*step);
  if (step->by_model) {
    take_chosen(*step, now);
  } else {
    choose(*step, now);
  }
  for (SequencePtr& s : step->ended) scheduler_.release(*s);
  scheduler_.tidy();
  steps_.reuse(std::move(step));
}

void Engine::kv_in_place(EngineStep& step) {
  for (const StepEntry& entry : step.entries) {
    if (entry.ended) continue;
    Sequence& s = *entry.sequence;
    memory_.commit(s.kv, std::span(s.tokens).subspan(size_t(entry.first), size_t(entry.n_known())));
  }
  steps_.tell_layers(step, n_layers_);
}

void Engine::take_chosen(EngineStep& step, double now) {
  auto chosen = step.chosen.begin();
  for (StepEntry& entry : step.entries) {
    if (!entry.wants_logits) continue;
    const Chosen& c = *chosen++;
    if (entry.ended) continue;
    Sampled sampled;
    sampled.chosen.token = c.token;
    sampled.finite = c.nan_logits == 0;
    take_token(*entry.sequence, entry.end(), std::move(sampled), c.row_hash, now);
  }
}

void Engine::choose(EngineStep& step, double now) {
  const float* logits = step.logits.data();
  std::vector<std::pair<Sequence*, const float*>> splits;  // last: sequences that end make room for choices
  for (StepEntry& entry : step.entries) {
    const float* row = logits;
    logits += vocab_ * size_t(entry.n_rows());
    if (entry.ended) continue;
    Sequence& s = *entry.sequence;
    for (int at = entry.first + 1; at <= entry.first + entry.n_prompt_rows; ++at, row += vocab_)
      s.prompt_logprobs[size_t(at)] = judge({row, vocab_}, s.tokens[size_t(at)], s.request->prompt_logprobs, scratch_);
    if (!entry.wants_logits) continue;
    if (!std::ranges::all_of(s.prompt_logprobs, &Sampled::finite)) {
      end(scheduler_.remove(s), FinishReason::error, kNotFinite, now);
    } else if (s.stands_for > 1) {
      splits.push_back({&s, row});
    } else {
      choose_checked(entry, row, now);
    }
  }
  for (auto [s, row] : splits) split(*s, row, now);
}

// Samples the next token and accepts drafts up to the first wrong one. Only accepted tokens are committed to the
// memory.
void Engine::choose_checked(const StepEntry& entry, const float* row, double now) {
  Sequence& s = *entry.sequence;
  open_choice(s, s.choice, options_.tokenizer);
  int at = s.computed = entry.first + entry.n_known();
  stats_.draft_tokens += entry.n_drafts;
  for (const int end = entry.end();; row += vocab_) {
    Sampled sampled = draw(s, row);
    const bool right = at < end && s.tokens[size_t(at)] == sampled.chosen.token;
    if (!right) s.tokens.resize(size_t(at));
    stats_.accepted_tokens += right;
    if (take_token(s, at, std::move(sampled), row_hash(row, vocab_), now)) return;
    if (!right) break;
    memory_.commit(s.kv, std::span(s.tokens).subspan(size_t(at), 1));
    s.computed = ++at;
    steps_.keep_hidden(entry);
  }
  s.draft_record.saw(entry.n_drafts, at - (entry.first + entry.n_known()));
  if (at < entry.end()) memory_.rollback(s.kv);
}

Sampled Engine::draw(Sequence& s, const float* row) {
  return sample({row, vocab_}, s.request->sampling, s.sampler, scratch_);
}

// Stores `sampled` as token `at`, which may hold a draft, and sends its event. True: the sequence has ended. It ends
// with an error if the logits are not finite.
bool Engine::emit(Sequence& s, int at, Sampled sampled, uint64_t row_hash, double now) {
  if (!sampled.finite) {
    emit_end(s, FinishReason::error, kNotFinite, now);
    return true;
  }
  const int32_t token = sampled.chosen.token;
  s.logits_hash = chain_hash(s.logits_hash, row_hash);
  if (size_t(at) == s.tokens.size()) {
    s.tokens.push_back(token);
  } else {
    s.tokens[size_t(at)] = token;
  }
  ++stats_.generated_tokens;
  TokenEvent event = event_of(s, s.choice, now);
  event.token = token;
  event.sampled = std::move(sampled);
  event.prompt_logprobs = std::exchange(s.prompt_logprobs, {});
  event.has_logprobs = s.request->sampling.top_logprobs >= 0;
  s.text.set_text_and_end(event, *s.request, options_.eos_tokens, at + 1 - s.n_prompt());
  const bool ended = event.finish != FinishReason::none;
  s.sink->on_event(std::move(event));
  return ended;
}

// Takes token `at`, the sequence's next. On an instance that hands over, the first token is the last one here. True:
// the sequence is gone.
bool Engine::take_token(Sequence& s, int at, Sampled sampled, uint64_t row_hash, double now) {
  const bool first = at == s.given;
  if (first) s.prompt_ticket.reset();
  const bool ended = emit(s, at, std::move(sampled), row_hash, now);
  if (!ended && !(first && s.leaves)) return false;
  SequencePtr gone = scheduler_.remove(s);
  if (!ended) {
    std::vector<SequencePtr> choices;
    choices.push_back(std::move(gone));
    hooks_->prefill_done(std::move(choices));
    return true;
  }
  if (s.leaves) hooks_->prefill_cancelled(s);
  retire(std::move(gone));
  return true;
}

// Splits a prompt with n > 1 choices: each choice gets its own first token. Choices that continue stay here or leave.
void Engine::split(Sequence& s, const float* row, double now) {
  const SequencePtr spent = scheduler_.remove(s);
  const uint64_t hash = row_hash(row, vocab_);
  std::vector<SequencePtr> alive;
  for (int choice = 0; choice < s.stands_for; ++choice) {
    SequencePtr child = make_sequence(s.request, state_of(s), s.sink, s.cancelled, options_.tokenizer);
    open_choice(*child, choice, options_.tokenizer);
    child->attempt = s.attempt;
    child->leaves = s.leaves;
    child->computed = s.computed;
    child->hidden_tokens = s.hidden_tokens;
    child->hidden = s.hidden;
    child->probed = child->scheduled = true;
    if (alive.empty()) child->prompt_logprobs = std::exchange(s.prompt_logprobs, {});
    Sampled sampled = draw(*child, row);
    if (!emit(*child, s.n_prompt(), std::move(sampled), hash, now)) alive.push_back(std::move(child));
  }
  if (alive.empty()) {
    scheduler_.release(s);
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

// choices[0] holds the KV of all. The others fork it or, if there is no room, wait and recompute it.
void Engine::share_kv(std::vector<SequencePtr> choices) {
  std::vector<SequencePtr> sharing;
  for (size_t i = 1; i < choices.size(); ++i) {
    Result<KvHandle> forked = memory_.fork(choices[0]->kv);
    if (forked) {
      choices[i]->kv = forked.value();
      sharing.push_back(std::move(choices[i]));
    } else {
      scheduler_.preempt(std::move(choices[i]));
    }
  }
  scheduler_.join(std::move(choices[0]));
  for (SequencePtr& s : sharing) scheduler_.join(std::move(s));
}

// Releases an ended sequence. If steps under way still use its KV, the last of them frees it.
void Engine::retire(SequencePtr s) {
  if (!steps_.hold(s)) scheduler_.release(*s);
}

void Engine::end(SequencePtr s, FinishReason reason, const std::string& error, double now) {
  if (s->leaves) hooks_->prefill_cancelled(*s);
  emit_end(*s, reason, error, now);
  retire(std::move(s));
}

void Engine::drop_ended(double now) {
  scheduler_.drop_if([&](SequencePtr& s) {
    const FinishReason why = s->over(now);
    if (why != FinishReason::none) end(std::move(s), why, "", now);
    return why != FinishReason::none;
  });
}

void Engine::end_all(FinishReason reason, const std::string& error) {
  while (!steps_.empty()) wait();
  const double now = clock_.now();
  scheduler_.drop_if([&](SequencePtr& s) {
    end(std::move(s), reason, error, now);
    return true;
  });
}

}  // namespace xpyd::batch
