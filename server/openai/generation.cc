#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>

#include "base/utf8.h"
#include "server/openai/api.h"

namespace xpyd::server {
namespace {

const ApiError kTookTooLong = {.status = 504,
                               .message = "the request exceeded the server's time limit (--request-timeout)",
                               .code = "request_timeout"};

// One server-sent event with a single data line.
std::string sse_event(std::string_view event) { return "data: " + std::string(event) + "\n\n"; }

// The text of one token for a JSON string. Bytes that are not UTF-8 are written as OpenAI does: "bytes:\xe2\x80".
std::string token_text(const Tokenizer* tokenizer, int32_t id) {
  if (tokenizer == nullptr || id < 0 || id >= tokenizer->vocab_size()) return "token_id:" + std::to_string(id);
  const std::string& piece = tokenizer->piece(id);
  if (is_utf8(piece)) return piece;
  std::string out = "bytes:";
  for (char c : piece) {
    char hex[8];
    std::snprintf(hex, sizeof hex, "\\x%02x", static_cast<unsigned char>(c));
    out += hex;
  }
  return out;
}

// Writes {"token","logprob","bytes"} and leaves the object open.
void open_chat_logprob(JsonText& out, const Tokenizer* tokenizer, const TokenLogprob& token) {
  out.open('{').add("token", token_text(tokenizer, token.token), "logprob", token.logprob);
  out.key("bytes").open('[');
  if (tokenizer != nullptr && token.token >= 0 && token.token < tokenizer->vocab_size())
    for (char c : tokenizer->piece(token.token)) out.value(int{static_cast<unsigned char>(c)});
  out.close(']');
}

void add_chat_logprobs(JsonText& out, const Tokenizer* tokenizer, const std::vector<Sampled>& tokens) {
  out.open('{').key("content").open('[');
  for (const Sampled& sampled : tokens) {
    open_chat_logprob(out, tokenizer, sampled.chosen);
    out.key("top_logprobs").open('[');
    for (const auto& other : sampled.top) {
      open_chat_logprob(out, tokenizer, other);
      out.close('}');
    }
    out.close(']').close('}');
  }
  out.close(']').close('}');
}

// True for a prompt's first token, which has no logprob.
bool is_first(const Sampled& s) { return std::isnan(s.chosen.logprob); }

// vLLM's format: an object keyed by token id, the prompt's own token first.
void add_prompt_logprobs(JsonText& out, const Tokenizer* tokenizer, const std::vector<Sampled>& prompt) {
  out.key("prompt_logprobs").open('[');
  for (const Sampled& s : prompt) {
    if (is_first(s)) {
      out.value(nullptr);
      continue;
    }
    auto add = [&](const TokenLogprob& t, int64_t rank) {
      out.key(std::to_string(t.token));
      out.object("logprob", t.logprob, "rank", rank, "decoded_token", token_text(tokenizer, t.token));
    };
    out.open('{');
    add(s.chosen, s.rank);
    for (size_t i = 0; i < s.top.size(); ++i)
      if (s.top[i].token != s.chosen.token) add(s.top[i], static_cast<int64_t>(i) + 1);
    out.close('}');
  }
  out.close(']');
}

void add_completion_logprobs(JsonText& out, const Tokenizer* tokenizer, const std::vector<Sampled>& tokens,
                             const std::vector<int32_t>& offsets) {
  out.open('{').key("tokens").open('[');
  for (const Sampled& s : tokens) out.value(token_text(tokenizer, s.chosen.token));
  out.close(']').key("token_logprobs").open('[');
  for (const Sampled& s : tokens) out.value(s.chosen.logprob);
  out.close(']').key("top_logprobs").open('[');
  for (const Sampled& s : tokens) {
    if (is_first(s)) {
      out.value(nullptr);
      continue;
    }
    // Of several tokens with the same text only the likeliest is listed. A client's dictionary would keep the last.
    std::vector<std::string> listed;
    auto add = [&](const TokenLogprob& t) {
      std::string text = token_text(tokenizer, t.token);
      if (std::find(listed.begin(), listed.end(), text) != listed.end()) return;
      out.add(text, t.logprob);
      listed.push_back(std::move(text));
    };
    out.open('{');
    for (const auto& other : s.top) add(other);
    add(s.chosen);
    out.close('}');
  }
  out.close(']').add("text_offset", offsets).close('}');
}

}  // namespace

// Engine threads call this sink. Everything else runs on the I/O thread.
class Generation::Sink final : public EventSink {
 public:
  Sink(std::shared_ptr<Generation> generation, size_t prompt, Clock& clock, HttpPost post)
      : generation_(std::move(generation)), prompt_(prompt), clock_(clock), post_(std::move(post)) {}
  void on_event(TokenEvent event) override {
    post_([g = generation_, prompt = prompt_, e = std::move(event), now = clock_.now()]() mutable {
      g->on_event(prompt, std::move(e), now);
    });
  }

 private:
  std::shared_ptr<Generation> generation_;
  size_t prompt_;
  Clock& clock_;
  HttpPost post_;
};

Generation::Generation(Api& api, GenerationCall call, std::shared_ptr<HttpExchange> exchange, std::string id,
                       double arrival_s)
    : api_(api), call_(std::move(call)), exchange_(std::move(exchange)), id_(std::move(id)), arrival_s_(arrival_s) {
  JsonText shared;
  if (call_.turn) shared.add("session_generation", call_.turn.generation());
  shared.add("created", int64_t{std::time(nullptr)}).add("model", api.model_.name).add("system_fingerprint", nullptr);
  shared_ = shared.take();
}

void Generation::start() {
  auto self = shared_from_this();
  exchange_->on_gone([weak = weak_from_this()] {
    if (auto g = weak.lock()) g->on_gone();
  });
  if (over_) return end();  // the client left while its body was being read
  choices_.resize(call_.prompts.size() * static_cast<size_t>(call_.prompts[0].n));
  prompts_.resize(call_.prompts.size());
  double timeout = api_.options_.request_timeout_s;
  for (size_t i = 0; i < call_.prompts.size(); ++i) {
    auto request = std::make_shared<Request>(std::move(call_.prompts[i]));
    request->id = ++api_.last_request_id_;
    request->arrival_s = arrival_s_;
    request->deadline_s = timeout > 0 ? arrival_s_ + timeout : 0;
    if (!call_.has_seed) request->sampling.seed = api_.random_.next();
    // kv_salt() needs this: the server's request ids start again at 1, but caches of its workers may survive.
    if (request->prompt_logprobs >= 0 && request->cache_salt == 0) request->cache_salt = api_.id_random_.next();
    prompts_[i].request = request;
    prompts_[i].seen.arrival_s = arrival_s_;
    Status taken = api_.service_.submit(request, std::make_shared<Sink>(self, i, api_.clock_, api_.post_));
    if (taken.ok()) {
      expected_ += static_cast<size_t>(request->n);
      continue;
    }
    ApiError error = {.status = 500, .message = taken.error().message};
    if (taken.error().code == ErrorCode::invalid_argument)
      error.status = 400, error.param = call_.chat ? "messages" : "prompt";
    if (taken.error().code == ErrorCode::unavailable) error.status = 503, error.code = "unavailable";
    prompts_.resize(i);  // the others were never submitted
    return fail(error);
  }
  // Requests that the cluster has refused by now get an HTTP status, because their event was posted before this.
  if (call_.stream)
    api_.post_([self] {
      if (!self->over_) self->begin_stream();
    });
}

void Generation::on_event(size_t prompt_index, TokenEvent event, double received_s) {
  Prompt& prompt = prompts_[prompt_index];
  const int n = prompt.request->n;
  XPYD_CHECK(event.choice >= 0 && event.choice < n, "event of choice " + std::to_string(event.choice));
  const size_t index = prompt_index * static_cast<size_t>(n) + static_cast<size_t>(event.choice);
  Choice& choice = choices_[index];
  XPYD_CHECK(choice.finish == FinishReason::none, "event after the end of a choice");
  auto self = shared_from_this();
  count(prompt, choice, event, received_s);
  if (!event.prompt_logprobs.empty()) prompt.logprobs = std::move(event.prompt_logprobs);
  bool last = event.finish != FinishReason::none;
  if (!over_ && call_.turn && !call_.prompt_only) remember(choice, event);
  if (!over_) {
    if (event.finish == FinishReason::refused) {
      fail({.status = 429, .message = event.error, .code = "objective_missed"});
    } else if (event.finish == FinishReason::error || event.finish == FinishReason::timeout) {
      fail(event.finish == FinishReason::timeout
               ? kTookTooLong
               : ApiError{.status = 500, .message = event.error, .code = "internal_error"});
    } else {
      gather(choice, std::move(event));
      if (call_.stream) stream(prompt_index, index);
    }
  }
  if (last && ended_ == expected_) complete();
}

void Generation::count(Prompt& prompt, Choice& choice, const TokenEvent& event, double received_s) {
  FinishedRequest& seen = prompt.seen;
  prompt.cached_tokens = std::max(prompt.cached_tokens, event.cached_tokens);
  seen.queued_s = event.queued_s;
  seen.last_token_s = received_s;
  if (event.token >= 0) {
    ++choice.tokens;
    api_.metrics_.generated_token();
    if (choice.last_token_s > 0) api_.metrics_.inter_token(received_s - choice.last_token_s);
    choice.last_token_s = received_s;
    if (seen.first_token_s == 0) {
      seen.first_token_s = received_s;
      seen.scheduled_s = event.scheduled_s;
      api_.metrics_.first_token(received_s - arrival_s_, prompt.n_tokens());
      if (call_.turn && prompt.cached_tokens == 0) api_.metrics_.history_computed(call_.turn.so_far().n_tokens);
    }
  }
  if (event.finish == FinishReason::none) return;
  choice.finish = event.finish;
  ++ended_;
  seen.finishes.push_back(event.finish);
  if (++prompt.ended == prompt.request->n) api_.metrics_.finished(seen);
}

// ---- Sessions.

// A token that ends the reply (EOS, stop_token_ids) is not kept, unless the client wants it in the text. Tokens of a
// stop string are kept, because a token may hold more than the string.
void Generation::remember(Choice& choice, const TokenEvent& event) {
  const bool ends = event.finish == FinishReason::stop && event.stop_text.empty() &&
                    !(event.stop_token >= 0 && prompts_[0].request->include_stop_text);
  if (event.token >= 0 && !ends) choice.session_tokens.push_back(event.token);
  choice.reply += event.text;
}

// Called before the client sees the end, so that it can send the next turn at once. Not `whole`: the turn is undone.
void Generation::end_turn(bool whole) {
  if (!call_.turn) return;
  if (!whole) return call_.turn.release();
  if (call_.session_end) return call_.turn.end();
  Conversation now;
  Choice& choice = choices_[0];
  now.n_tokens = prompts_[0].n_tokens() + choice.tokens;
  if (call_.chat) {
    now.messages = std::move(call_.messages);
    now.messages.push_back({"assistant", std::move(choice.reply)});
  } else {
    now.tokens = prompts_[0].request->prompt;
    now.tokens.insert(now.tokens.end(), choice.session_tokens.begin(), choice.session_tokens.end());
  }
  call_.turn.commit(std::move(now));
}

// ---- The answer.

void Generation::gather(Choice& choice, TokenEvent event) {
  Part& part = choice.part;
  part.finish = event.finish;
  part.with_logprobs = event.has_logprobs;
  if (call_.prompt_only) return;
  if (event.token >= 0 && call_.return_token_ids) part.token_ids.push_back(event.token);
  if (event.has_logprobs) {
    part.offsets.push_back(choice.text_length);
    part.logprobs.push_back(std::move(event.sampled));
  }
  part.text += event.text;
  choice.text_length += int(count_code_points(event.text));
}

// Puts the prompt before a choice's first part: its text and, if requested, the logprobs of its tokens.
void Generation::echo(size_t prompt_index, Choice& choice) const {
  const Prompt& prompt = prompts_[prompt_index];
  const std::string& text = call_.prompt_texts[prompt_index];
  const auto shift = int32_t(count_code_points(text));
  std::vector<int32_t> offsets;
  if (prompt.request->sampling.top_logprobs >= 0) {
    const bool has_text = api_.model_.tokenizer != nullptr;
    Detokenizer pieces = has_text ? Detokenizer(*api_.model_.tokenizer, true) : Detokenizer();
    int32_t length = 0;
    for (int32_t id : prompt.request->prompt) {
      offsets.push_back(length);
      if (has_text) length += int(count_code_points(pieces.feed(id)));
    }
  }
  Part& part = choice.part;
  part.text.insert(0, text);
  for (int32_t offset : part.offsets) offsets.push_back(offset + shift);
  part.offsets = std::move(offsets);
  part.logprobs.insert(part.logprobs.begin(), prompt.logprobs.begin(), prompt.logprobs.end());
  choice.text_length += shift;
}

void Generation::add_choice(JsonText& out, size_t index, bool first) const {
  const Part& part = choices_[index].part;
  const Tokenizer* tokenizer = api_.model_.tokenizer;
  out.open('{').add("index", index);
  if (!call_.chat) {
    out.add("text", part.text);
  } else {
    out.key(call_.stream ? "delta" : "message").open('{');
    if (first) out.add("role", "assistant");
    if (first || !part.text.empty()) out.add("content", part.text);
    out.close('}');
  }
  out.key("logprobs");
  if (!part.with_logprobs)
    out.value(nullptr);
  else if (call_.chat)
    add_chat_logprobs(out, tokenizer, part.logprobs);
  else
    add_completion_logprobs(out, tokenizer, part.logprobs, part.offsets);
  out.key("finish_reason");
  if (part.finish == FinishReason::none)
    out.value(nullptr);
  else
    out.value(finish_reason_name(part.finish));
  const Prompt& prompt = prompts_[index / static_cast<size_t>(prompts_[0].request->n)];
  if (call_.return_token_ids) out.add("token_ids", part.token_ids);
  if (call_.return_token_ids && first) out.add("prompt_token_ids", prompt.request->prompt);
  if (call_.prompt_logprobs && !call_.chat) add_prompt_logprobs(out, tokenizer, prompt.logprobs);
  out.close('}');
}

void Generation::add_usage(JsonText& out, const Usage& usage) {
  out.key("usage").open('{').add("prompt_tokens", usage.prompt_tokens, "completion_tokens", usage.completion_tokens);
  out.add("total_tokens", usage.prompt_tokens + usage.completion_tokens);
  out.key("prompt_tokens_details").object("cached_tokens", usage.cached_tokens).close('}');
}

std::string Generation::answer(const std::string& choices_and_usage) const {
  const char* object = !call_.chat ? "text_completion" : call_.stream ? "chat.completion.chunk" : "chat.completion";
  JsonText out;
  out.open('{').add("id", id_, "object", object);
  return out.take() + "," + shared_ + ",\"choices\":" + choices_and_usage + "}";
}

void Generation::complete() {
  if (over_) return end();
  over_ = true;
  status_ = 200;
  const FinishReason finish = choices_[0].finish;
  end_turn(finish == FinishReason::stop || finish == FinishReason::length);
  JsonText out;
  out.open('[');
  if (call_.stream) {
    out.close(']');
    add_usage(out, usage());
    if (call_.include_usage) send(sse_event(answer(out.take())));
    send("data: [DONE]\n\n");
    exchange_->end_stream();
    return end();
  }
  for (size_t i = 0; i < choices_.size(); ++i) {
    const size_t prompt = i / static_cast<size_t>(prompts_[0].request->n);
    Part& part = choices_[i].part;
    part.with_logprobs = prompts_[prompt].request->sampling.top_logprobs >= 0;
    if (call_.echo) echo(prompt, choices_[i]);
    add_choice(out, i, true);
  }
  out.close(']');
  add_usage(out, usage());
  if (call_.chat && call_.prompt_logprobs) add_prompt_logprobs(out, api_.model_.tokenizer, prompts_[0].logprobs);
  exchange_->respond({.headers = {{"X-Request-Id", id_}}, .body = answer(out.take())});
  end();
}

// Sends one event per token. The first has the role, the last the finish reason. Clients count events as tokens and
// take the first event for the first token.
void Generation::stream(size_t prompt_index, size_t index) {
  Choice& choice = choices_[index];
  const bool first = !std::exchange(choice.began, true);
  if (first && call_.echo) echo(prompt_index, choice);
  JsonText out;
  out.open('[');
  add_choice(out, index, first);
  out.close(']');
  if (call_.include_usage) out.add("usage", nullptr);
  send(sse_event(answer(out.take())));
  choice.part = {};
}

// The head is sent before the first event, so that proxies see that the server is working.
void Generation::begin_stream() {
  if (std::exchange(streaming_, true)) return;
  HttpResponse head;
  head.content_type = "text/event-stream; charset=utf-8";
  head.headers = {{"X-Request-Id", id_}, {"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  exchange_->begin_stream(std::move(head));
}

void Generation::send(std::string bytes) {
  begin_stream();
  exchange_->write(std::move(bytes));
}

// ---- The end.

void Generation::fail(const ApiError& error) {
  over_ = true;
  status_ = error.status;
  end_turn(false);
  abort_all();
  if (streaming_) {
    send(sse_event(error_body(error)) + "data: [DONE]\n\n");
    exchange_->end_stream();
  } else {
    HttpResponse response = api_.error_response(error);
    response.headers.emplace_back("X-Request-Id", id_);
    exchange_->respond(std::move(response));
  }
  if (ended_ == expected_) end();
}

void Generation::on_gone() {
  if (over_) return;
  over_ = true;
  status_ = 499;
  end_turn(false);
  abort_all();
}

void Generation::abort_all() {
  for (const Prompt& prompt : prompts_)
    if (prompt.request && prompt.ended < prompt.request->n) api_.service_.abort(prompt.request->id);
}

void Generation::end() {
  if (api_.live_.erase(this) == 0) return;
  const LogLevel level = status_ >= 500 ? LogLevel::error : status_ >= 400 ? LogLevel::warning : LogLevel::info;
  api_.log_line(level, log_text());
}

Generation::Usage Generation::usage() const {
  Usage sum;
  for (const Prompt& prompt : prompts_) {
    sum.prompt_tokens += prompt.n_tokens();
    sum.cached_tokens += prompt.cached_tokens;
  }
  for (const Choice& choice : choices_)
    if (!call_.prompt_only) sum.completion_tokens += choice.tokens;
  return sum;
}

std::string Generation::log_text() const {
  const Usage total = usage();
  std::string line = "request id=" + id_ + " status=" + std::to_string(status_) +
                     " prompt_tokens=" + std::to_string(total.prompt_tokens) +
                     " completion_tokens=" + std::to_string(total.completion_tokens);
  if (!choices_.empty()) line += std::string(" finish=") + finish_reason_name(choices_[0].finish);
  line += " e2e_ms=" + std::to_string(std::lround(1e3 * (api_.clock_.now() - arrival_s_)));
  // Field names are client text: log the first few, shortened and printable.
  for (size_t i = 0; i < std::min<size_t>(call_.ignored.size(), 4); ++i) {
    line += i == 0 ? " ignored=" : ",";
    for (char c : call_.ignored[i].substr(0, 32))
      line += std::isalnum(static_cast<unsigned char>(c)) || c == '_' ? c : '?';
  }
  return line;
}

}  // namespace xpyd::server
