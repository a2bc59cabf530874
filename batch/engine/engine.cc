#include "batch/engine/engine.h"

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
      // A model that chooses by itself would have to wait for drafts.
      window_(options_.ahead && !(options_.speculation.on() && model.chooses()) ? model.window() : 1),
      by_layer_(options_.by_layer && model.window() == 1 && memory.n_ranks() == 1),
      clock_(clock),
      hooks_(hooks) {
  chunks_.options = options_.chunks;
  if (!chunks_.options.policy) chunks_.options.policy = find_chunk_policy("fixed");
  if (by_layer_) memory_.load_by_layer();
  if (options_.speculation.on())
    drafter_ = options_.speculation.drafter->make(options_.speculation, {model_, memory_, clock_});
  const ModelConfig& c = model.config();
  if (c.n_predict) hidden_.resize(size_t(std::max(options_.step_tokens, options_.max_batch)) * size_t(c.hidden));
  logits_.resize(size_t(options_.max_batch) * size_t(model.config().vocab));
}

void Engine::submit(SequencePtr sequence) {
  charge(clock_.now());
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

void Engine::adopt(SequencePtr sequence) {
  charge(clock_.now());
  sequence->probed = sequence->scheduled = true;  // where its KV was computed
  waiting_.insert(first_without_kv(), std::move(sequence));
}

// Behind it no other one holds any to keep.
std::deque<SequencePtr>::iterator Engine::first_without_kv() {
  return std::find_if(waiting_.begin(), waiting_.end(), [](const SequencePtr& s) { return !s->keeps_kv(); });
}

void Engine::check_invariants() const {
  bool without = false;
  for (const SequencePtr& s : waiting_) {
    XPYD_CHECK(!(without && s->keeps_kv()), "who waits without KV stands before who holds some");
    without |= !s->keeps_kv();
  }
}

int Engine::waiting_with_kv() const {
  return int(std::count_if(waiting_.begin(), waiting_.end(), [](const SequencePtr& s) { return s->kv != kNoKv; }));
}

int64_t Engine::pending_tokens() const {
  int64_t tokens = 0;
  for (const SequencePtr& s : waiting_) tokens += s->pending();
  for (const SequencePtr& s : running_) tokens += s->pending();
  return tokens;
}

int Engine::blocks_wanted() const {
  const int block_tokens = memory_.stats().block_tokens;
  int blocks = 0;
  for (const SequencePtr& s : waiting_)
    if (s->kv == kNoKv) blocks += (int(s->tokens.size()) + block_tokens - 1) / block_tokens;
  return blocks;
}

bool Engine::step() {
  const double start = clock_.now(), stepped = stats_.step_seconds, waited = stats_.wait_seconds;
  const bool copying = memory_.poll();
  const bool moved = iterate(start);
  const double computed = in_waves() ? stats_.wait_seconds - waited : stats_.step_seconds - stepped;
  stats_.schedule_seconds += clock_.now() - start - computed;
  if (moved || (!copying && loading_ == 0)) return moved;
  // Only copies to or from a tier go on.
  clock_.sleep(50e-6);
  return true;
}

bool Engine::iterate(double now) {
  charge(now);
  const bool ended = look_at_waves();
  drop_ended(now);
  poll_loads();
  if (window_ > 1 && int(under_way_.size()) == window_) return wait();
  make_plan();
  if (!under_way_.empty() && needs_settling()) return wait();
  while (!plan_.preempts.empty() && give_up_early()) make_plan();
  if (!under_way_.empty() && needs_settling()) return wait();
  const bool moved = apply_plan(now);
  if (!next_->entries.empty()) keep_chunks();  // a step that has nothing to run is no decision
  if (next_->entries.empty()) return under_way_.empty() ? moved || ended : wait();
  next_->shape = {.steps = 0};
  for (const Entry& entry : next_->entries) {
    next_->shape.add_tokens(entry.n_tokens, entry.first);
    stats_.prompt_tokens += std::clamp(entry.sequence->n_prompt() - entry.first, 0, entry.n_tokens);
  }
  if (in_waves()) {
    begin();
    return true;
  }
  stats_.work.add(next_->shape);
  const double planned = clock_.now();
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
  const bool watches = (hooks_ && hooks_->layerwise()) || std::ranges::any_of(next_->entries, [](const Entry& entry) {
                         return entry.sequence->arrival != nullptr;
                       });
  return arrays_.gather(next_->entries, memory_, watches ? this : nullptr, hidden_.empty() ? nullptr : hidden_.data(),
                        size_t(model_.config().hidden));
}

void Engine::layer_reads(int layer) {
  for (const Entry& entry : next_->entries)
    if (KvArrival* arrival = entry.sequence->arrival.get()) arrival->wait(layer);
}

void Engine::layer_done(int layer) {
  layer_reads(layer);
  if (hooks_ && hooks_->layerwise()) tell_layers(*next_, layer + 1);
}

bool Engine::chosen_by_model() const {
  return window_ > 1 && model_.chooses() &&
         std::none_of(next_->entries.begin(), next_->entries.end(), [](const Entry& entry) {
           const Sequence& s = *entry.sequence;
           return entry.n_prompt_rows > 0 ||
                  (entry.wants_logits && (s.stands_for > 1 || more_than_a_draw(s.request->sampling)));
         });
}

// ---- One step at a time: the CPU waits, then chooses from the logits.

void Engine::forward() {
  XPYD_CHECK(under_way_.empty());
  const StepInput input = gather();
  const double start = clock_.now();
  model_.forward(input, logits_.data());
  const double now = clock_.now();
  stats_.wait_seconds += now - start;
  charge(now);
  stats_.flops += model_.work(input).flops;
  const float* hidden = hidden_.data();
  for (Entry& entry : next_->entries) {
    entry.sequence->computed = entry.first + entry.n_known();
    entry.hidden = hidden;
    keep_hidden(entry);
    hidden += size_t(entry.n_tokens) * size_t(model_.config().hidden);
  }
  settle_arrivals(*next_);
  kv_in_place(*next_);
  choose(*next_, logits_.data(), now);
  tidy(*next_);
}

// What is held now has been since the last call: between two of them nobody gets memory, or gives it up, but at once
// before or after one.
void Engine::charge(double now) {
  const double seconds = now - std::exchange(charged_s_, now);
  const auto add = [&](const auto& sequences) {
    for (const SequencePtr& s : sequences)
      if (s && s->kv != kNoKv)
        (s->n_output() > 0 ? stats_.decode_block_s : stats_.prompt_block_s) += seconds *
                                                                               double(memory_.blocks(s->kv).size());
  };
  add(running_), add(waiting_);
}

// For the multi-token head: what the last computed token has become.
void Engine::keep_hidden(const Entry& entry) const {
  if (hidden_.empty()) return;
  Sequence& s = *entry.sequence;
  const size_t width = size_t(model_.config().hidden);
  const float* row = entry.hidden + size_t(s.computed - 1 - entry.first) * width;
  s.hidden.assign(row, row + width);
  s.hidden_tokens = s.computed;
}

// Of sequences whose first KV came meanwhile. What was computed without it is nothing: who stays here begins anew, who
// leaves has told others of it.
void Engine::settle_arrivals(Step& step) {
  for (Entry& entry : step.entries) {
    Sequence& s = *entry.sequence;
    if (!s.arrival) continue;
    const bool whole = s.arrival->is_whole();
    s.arrival.reset();
    const int there = memory_.written_tokens(s.kv);
    if (whole) {
      memory_.written(s.kv, std::span(s.tokens).subspan(size_t(there), size_t(entry.first - there)));
      continue;
    }
    entry.ended = true;
    s.cached_tokens = there;
    SequencePtr gone = remove(s);
    if (s.leaves) {
      hooks_->prefill_broken(s);
      retire(std::move(gone));
    } else {
      preempt(std::move(gone));
    }
  }
}

void Engine::choose(Step& step, const float* logits, double now) {
  const size_t vocab = size_t(model_.config().vocab);
  std::vector<std::pair<Sequence*, const float*>> splits;  // last: who ends makes room for choices
  for (Entry& entry : step.entries) {
    const float* row = logits;
    logits += vocab * size_t(entry.n_rows());
    if (entry.ended) continue;
    Sequence& s = *entry.sequence;
    for (int at = entry.first; at < entry.first + entry.n_prompt_rows; ++at, row += vocab)
      s.prompt_logprobs[size_t(at) + 1] = judge({row, vocab}, s.tokens[size_t(at) + 1], s.request->prompt_logprobs,
                                                sampler_scratch_);
    if (!entry.wants_logits) continue;
    if (s.stands_for > 1) {
      splits.push_back({&s, row});
    } else {
      choose_checked(entry, row, now);
    }
  }
  for (auto [s, row] : splits) split(*s, row, now);
}

// The next token, and, as far as the drafts computed with it are right, those after it. Only what is right is written.
void Engine::choose_checked(const Entry& entry, const float* row, double now) {
  Sequence& s = *entry.sequence;
  const size_t vocab = size_t(model_.config().vocab);
  open_choice(s, s.choice);
  int at = s.computed = entry.first + entry.n_known();
  stats_.draft_tokens += entry.n_drafts;
  draft_credit_.pay(entry.n_drafts * entry.draft_price);
  for (const int end = entry.end();; row += vocab) {
    Sampled sampled = sample({row, vocab}, s.request->sampling, s.sampler, sampler_scratch_);
    const bool right = at < end && s.tokens[size_t(at)] == sampled.chosen.token;
    if (!right) s.tokens.resize(size_t(at));
    stats_.accepted_tokens += right;
    draft_credit_.token(right);
    if (take_token(s, at, std::move(sampled), row_hash(row, vocab), now)) return;
    if (!right) break;
    memory_.written(s.kv, std::span(s.tokens).subspan(size_t(at), 1));
    s.computed = ++at;
    keep_hidden(entry);
  }
  s.draft_record.saw(entry.n_drafts, at - (entry.first + entry.n_known()));
  if (at < entry.end()) memory_.trim(s.kv);
}

// ---- Waves: several steps at a time.

// Where the model chooses, a token that is not known yet is -1 - r in its sequence, r being the row that chooses it;
// the step after may compute it already. So a sequence's end is seen one step late, and that step's work on it is
// dropped. Where the engine does, a sequence whose token is being computed waits for it; prompts do not, whose chunks
// follow each other.

void Engine::begin() {
  draws_.clear();
  StepInput input = gather();
  next_->layers_told = 0;
  for (const Entry& entry : next_->entries) {
    input.watched = input.watched || (hooks_ && entry.sequence->leaves);
    if (!entry.wants_logits || !model_.chooses()) continue;
    Sequence& s = *entry.sequence;
    open_choice(s, s.choice);
    draws_.push_back(next_draw(s.request->sampling, s.sampler));
    s.tokens.push_back(-int32_t(draws_.size()));
  }
  if (!model_.chooses()) {
    if (!input.watched) input.observer = nullptr;
    next_->logits.resize(input.logit_rows.size() * size_t(model_.config().vocab));
  }
  model_.begin(input, draws_, next_->logits.data());
  stats_.flops += model_.work(input).flops;
  for (const Entry& entry : next_->entries) entry.sequence->computed = entry.end();
  under_way_.push_back(std::move(next_));
  if (spare_.empty()) spare_.push_back(std::make_unique<Step>());
  next_ = std::move(spare_.back());
  spare_.pop_back();
  if (int(under_way_.size()) == window_) wait();
}

// What is new: KV that stages have written, and waves that have ended.
bool Engine::look_at_waves() {
  bool any = false;
  for (; !under_way_.empty() && model_.ended(); any = true) finish();
  for (size_t i = 0; i < under_way_.size(); ++i) tell_layers(*under_way_[i], model_.layers_written(int(i)));
  return any;
}

// For the oldest step, or other news. Always true: something has moved, or may move now.
bool Engine::wait() {
  const double start = clock_.now();
  const bool over = model_.wait();
  stats_.wait_seconds += clock_.now() - start;
  if (over) finish();
  return true;
}

void Engine::finish() {
  std::unique_ptr<Step> step = std::move(under_way_.front());
  under_way_.pop_front();
  chosen_.resize(step->entries.size());
  model_.end(chosen_.data());
  const double now = clock_.now();
  charge(now);
  kv_in_place(*step);
  if (model_.chooses()) {
    auto chosen = chosen_.begin();
    for (Entry& entry : step->entries) {
      if (!entry.wants_logits) continue;
      const Chosen& c = *chosen++;
      if (entry.ended) continue;
      Sampled sampled;
      sampled.chosen.token = c.token;
      sampled.nan_logits = c.nan_logits;
      take_token(*entry.sequence, entry.end(), std::move(sampled), c.row_hash, now);
    }
  } else {
    choose(*step, step->logits.data(), now);
    stats_.work.add(step->shape);
    ++stats_.steps;
    const auto stages = model_.stage_seconds();
    if (!stages.empty()) stats_.step_seconds += *std::max_element(stages.begin(), stages.end());
  }
  tidy(*step);
  spare_.push_back(std::move(step));
}

// ---- What a step gave.

// KV in the layers below `layers` is in place.
void Engine::tell_layers(Step& step, int layers) {
  const int told = std::exchange(step.layers_told, std::max(layers, step.layers_told));
  if (!hooks_ || layers <= told) return;
  hooks_->layer_ended();
  for (const Entry& entry : step.entries)
    if (Sequence& s = *entry.sequence; !entry.ended && s.leaves)
      hooks_->kv_written(s, told, layers, entry.first, entry.end());
}

void Engine::kv_in_place(Step& step) {
  for (const Entry& entry : step.entries) {
    if (entry.ended) continue;
    Sequence& s = *entry.sequence;
    memory_.written(s.kv, std::span(s.tokens).subspan(size_t(entry.first), size_t(entry.n_known())));
  }
  tell_layers(step, model_.config().n_layers);
}

void Engine::tidy(Step& step) {
  for (SequencePtr& s : step.ended) release(*s);
  step.ended.clear();
  step.entries.clear();
  step.layers_told = 0;
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

// Token `at` of one sequence, its next. A first token may be the last one here. True: the sequence is gone.
bool Engine::take_token(Sequence& s, int at, Sampled sampled, uint64_t row_hash, double now) {
  const bool first = at == s.given;
  if (first) s.prompt_ticket.reset();
  const bool ended = accept_token(s, size_t(at), std::move(sampled), row_hash, now);
  if (!ended && !(first && s.leaves)) return false;
  SequencePtr gone = remove(s);
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

// A sequence that is over. What is under way for it is dropped, and its KV is in use until the last of that ends.
void Engine::retire(SequencePtr s) {
  Step* last = nullptr;
  for (const auto& step : under_way_)
    for (Entry& entry : step->entries)
      if (entry.sequence == s.get()) entry.ended = true, last = step.get();
  if (last)
    last->ended.push_back(std::move(s));
  else
    release(*s);
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
    child->hidden_tokens = s.hidden_tokens;
    child->hidden = s.hidden;
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
  s.arrival.reset();
  if (s.kv != kNoKv) memory_.free(std::exchange(s.kv, kNoKv));
}

void Engine::end(SequencePtr s, FinishReason reason, const std::string& error, double now) {
  if (s->leaves) hooks_->prefill_cancelled(*s);
  emit_end(*s, reason, error, now);
  retire(std::move(s));
}

void Engine::drop_ended(double now) {
  auto reason = [now](const SequencePtr& s) {
    if (s->cancelled && s->cancelled->load(std::memory_order_relaxed)) return FinishReason::abort;
    const bool late = s->request->deadline_s > 0 && now > s->request->deadline_s;
    return late ? FinishReason::timeout : FinishReason::none;
  };
  const auto ended = [&](SequencePtr& s) {
    const FinishReason why = reason(s);
    if (why != FinishReason::none) end(std::move(s), why, "", now);
    return why != FinishReason::none;
  };
  std::erase_if(running_, ended);
  std::erase_if(waiting_, ended);
}

void Engine::end_all(FinishReason reason, const std::string& error) {
  while (!under_way_.empty()) wait();
  double now = clock_.now();
  for (SequencePtr& s : running_) end(std::move(s), reason, error, now);
  for (SequencePtr& s : waiting_) end(std::move(s), reason, error, now);
  running_.clear();
  waiting_.clear();
}

}  // namespace xpyd::batch
