#include "batch/engine/emission.h"

#include <algorithm>
#include <utility>

#include "base/row_hash.h"

namespace xpyd::batch {

bool Emission::accept(Sequence& s, int at, Sampled sampled, uint64_t row_hash, double now) {
  if (!sampled.finite) {
    emit_end(s, FinishReason::error,
             "the model's logits are not finite: its weights contain NaN or infinite values, or its numbers overflow",
             now);
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
  set_text_and_end(s, event, at + 1 - s.n_prompt());
  const bool ended = event.finish != FinishReason::none;
  s.sink->on_event(std::move(event));
  return ended;
}

void Emission::set_text_and_end(Sequence& s, TokenEvent& event, int n_output) const {
  const Request& request = *s.request;
  const int32_t token = event.token;
  auto among = [token](const auto& list) { return std::find(list.begin(), list.end(), token) != list.end(); };
  const bool eos = !request.ignore_eos && among(options_.eos_tokens);
  const bool stop_token = !eos && among(request.stop_token_ids);
  if (eos || stop_token) {
    event.finish = FinishReason::stop;
    if (stop_token) event.stop_token = token;
    if (request.include_stop_text) event.text = s.text.feed(token, request).text;
    event.text += s.text.flush();
    return;
  }
  OutputText::Piece piece = s.text.feed(token, request);
  event.text = std::move(piece.text);
  if (piece.stop) {
    event.finish = FinishReason::stop;
    event.stop_text = *piece.stop;
  } else if (n_output >= request.max_tokens) {
    event.finish = FinishReason::length;
    event.text += s.text.flush();
  }
}

}  // namespace xpyd::batch
