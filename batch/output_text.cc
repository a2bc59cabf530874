#include "batch/output_text.h"

#include <algorithm>

namespace xpyd::batch {
namespace {

// Length of the longest suffix of `text` that is a proper prefix of a stop string.
size_t forming_stop(const std::string& text, const std::vector<std::string>& stops) {
  size_t longest = 0;
  for (const std::string& stop : stops) {
    for (size_t n = std::min(stop.size() - 1, text.size()); n > longest; --n) {
      if (text.compare(text.size() - n, n, stop, 0, n) == 0) longest = n;
    }
  }
  return longest;
}

// Moves `end` back to a boundary between UTF-8 sequences of `text`.
size_t utf8_boundary(const std::string& text, size_t end) {
  while (end > 0 && end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return end;
}

}  // namespace

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::none: return "none";
    case FinishReason::stop: return "stop";
    case FinishReason::length: return "length";
    case FinishReason::abort: return "abort";
    case FinishReason::timeout: return "timeout";
    case FinishReason::error: return "error";
    case FinishReason::refused: return "refused";
  }
  return "error";
}

OutputText::OutputText(const Tokenizer* tokenizer, const Request& request) : tokenizer_(tokenizer) {
  if (!tokenizer) return;
  detokenizer_ = Detokenizer(*tokenizer, request.skip_special_tokens);
  if (request.prompt_is_text_prefix) detokenizer_.continues_text();
}

OutputText::Piece OutputText::feed(int32_t token, const Request& request) {
  Piece piece;
  if (!tokenizer_) return piece;
  held_ += detokenizer_.feed(token);
  size_t first = std::string::npos;
  for (const std::string& stop : request.stop) {
    size_t at = held_.find(stop);
    if (at < first) {
      first = at;
      piece.stop = &stop;
    }
  }
  if (piece.stop) {
    if (request.include_stop_text) first += piece.stop->size();
    piece.text = held_.substr(0, first);
    held_.clear();
    return piece;
  }
  size_t keep = utf8_boundary(held_, held_.size() - forming_stop(held_, request.stop));
  piece.text = held_.substr(0, keep);
  held_.erase(0, keep);
  return piece;
}

void OutputText::set_text_and_end(TokenEvent& event, const Request& request, const std::vector<int>& eos_tokens,
                                  int n_output) {
  const int32_t token = event.token;
  auto among = [token](const auto& list) { return std::find(list.begin(), list.end(), token) != list.end(); };
  const bool eos = !request.ignore_eos && among(eos_tokens);
  const bool stop_token = !eos && among(request.stop_token_ids);
  if (eos || stop_token) {
    event.finish = FinishReason::stop;
    if (stop_token) event.stop_token = token;
    if (request.include_stop_text) event.text = feed(token, request).text;
    event.text += flush();
    return;
  }
  Piece piece = feed(token, request);
  event.text = std::move(piece.text);
  if (piece.stop) {
    event.finish = FinishReason::stop;
    event.stop_text = *piece.stop;
  } else if (n_output >= request.max_tokens) {
    event.finish = FinishReason::length;
    event.text += flush();
  }
}

std::string OutputText::flush() {
  if (!tokenizer_) return {};
  std::string rest = std::move(held_) + detokenizer_.flush();
  held_.clear();
  return rest;
}

}  // namespace xpyd::batch
