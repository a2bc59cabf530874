#include "batch/sequence.h"

namespace xpyd::batch {

SequencePtr make_sequence(std::shared_ptr<const Request> request, const ChoiceState& state,
                          std::shared_ptr<EventSink> sink, std::shared_ptr<std::atomic<bool>> cancelled,
                          const Tokenizer* tokenizer) {
  auto s = std::make_unique<Sequence>();
  static_cast<ChoiceState&>(*s) = state;
  s->output.clear();
  s->tokens.reserve(request->prompt.size() + size_t(request->max_tokens));
  s->tokens = request->prompt;
  s->tokens.insert(s->tokens.end(), state.output.begin(), state.output.end());
  s->given = int(s->tokens.size());
  if (s->queued_s <= 0) s->queued_s = request->arrival_s;
  if (!state.output.empty()) {
    s->sampler = SamplerState(request->sampling, state.choice, request->prompt);
    s->text = OutputText(tokenizer, *request);
    for (int32_t token : state.output) {
      repeat_draw(request->sampling, token, s->sampler);
      s->text.feed(token, *request);
    }
  }
  s->request = std::move(request);
  s->sink = std::move(sink);
  s->cancelled = std::move(cancelled);
  return s;
}

bool append_room(KvMemory& memory, const Sequence& s, int n_tokens) {
  return memory.append(s.kv, s.computed - memory.written_tokens(s.kv) + n_tokens);
}

void open_choice(Sequence& s, int choice, const Tokenizer* tokenizer) {
  if (s.n_output() > 0) return;
  s.choice = choice;
  s.stands_for = 1;
  s.sampler = SamplerState(s.request->sampling, choice, s.request->prompt);
  s.text = OutputText(tokenizer, *s.request);
}

ChoiceState state_of(const Sequence& s) {
  ChoiceState state = s;
  state.output.assign(s.tokens.begin() + s.n_prompt(), s.tokens.end());
  return state;
}

TokenEvent event_of(const Sequence& s, int choice, double now) {
  TokenEvent event;
  event.request_id = s.request->id;
  event.choice = choice;
  event.cached_tokens = s.cached_tokens;
  event.logits_hash = s.logits_hash;
  event.queued_s = s.queued_s;
  event.scheduled_s = s.scheduled_s;
  event.time_s = now;
  return event;
}

void emit_end(const Sequence& sequence, FinishReason reason, const std::string& error, double now) {
  for (int choice = sequence.choice; choice < sequence.choice + sequence.stands_for; ++choice) {
    TokenEvent event = event_of(sequence, choice, now);
    event.finish = reason;
    event.error = error;
    sequence.sink->on_event(std::move(event));
  }
}

}  // namespace xpyd::batch
