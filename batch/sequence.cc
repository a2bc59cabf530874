#include "batch/sequence.h"

namespace xpyd {

SequencePtr make_sequence(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink,
                          std::shared_ptr<std::atomic<bool>> cancelled) {
  auto sequence = std::make_unique<Sequence>();
  sequence->stands_for = request->n;
  sequence->tokens.reserve(request->prompt.size() + size_t(request->max_tokens));
  sequence->tokens = request->prompt;
  sequence->queued_s = request->arrival_s;
  sequence->request = std::move(request);
  sequence->sink = std::move(sink);
  sequence->cancelled = std::move(cancelled);
  return sequence;
}

void emit_end(const Sequence& sequence, FinishReason reason, const std::string& error, double now) {
  for (int choice = sequence.choice; choice < sequence.choice + sequence.stands_for; ++choice) {
    TokenEvent event;
    event.request_id = sequence.request->id;
    event.choice = choice;
    event.finish = reason;
    event.error = error;
    event.cached_tokens = sequence.cached_tokens;
    event.logits_hash = sequence.logits_hash;
    event.queued_s = sequence.queued_s;
    event.scheduled_s = sequence.scheduled_s;
    event.time_s = now;
    sequence.sink->on_event(std::move(event));
  }
}

}  // namespace xpyd
