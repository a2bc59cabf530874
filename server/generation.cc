#include "server/generation.h"

#include <algorithm>
#include <cstdio>
#include <ctime>

#include "base/utf8.h"
#include "server/json_text.h"

namespace xpyd {
namespace {

// The cluster ends late requests itself; this much later the frontend stops waiting for it.
constexpr double kDeadlineGraceSeconds = 5;

const ApiError kTookTooLong = {
    .status = 504, .message = "the request took longer than this server allows", .code = "request_timeout"};

}  // namespace

// Engine threads come in here; everything else happens on the I/O thread.
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
                       std::string client_id, double arrival_s)
    : api_(api),
      call_(std::move(call)),
      exchange_(std::move(exchange)),
      id_(std::move(id)),
      client_id_(std::move(client_id)),
      arrival_s_(arrival_s),
      format_(call_, api.model_, id_, std::time(nullptr)) {}

void Generation::start() {
  auto self = shared_from_this();
  exchange_->on_gone([weak = weak_from_this()] {
    if (auto g = weak.lock()) g->on_gone();
  });
  if (over_) return end();  // it left while its body was being read
  choices_.resize(call_.prompts.size() * static_cast<size_t>(call_.prompts[0].n));
  prompts_.resize(call_.prompts.size());
  double timeout = api_.options_.request_timeout_s;
  for (size_t i = 0; i < call_.prompts.size(); ++i) {
    auto request = std::make_shared<Request>(std::move(call_.prompts[i]));
    request->id = ++api_.last_request_id_;
    request->arrival_s = arrival_s_;
    request->deadline_s = timeout > 0 ? arrival_s_ + timeout : 0;
    if (!call_.has_seed) request->sampling.seed = api_.random_.next();
    // kv_salt() counts on it: a server's numbers begin anew, what its workers keep may not.
    if (request->prompt_logprobs >= 0 && request->cache_salt == 0) request->cache_salt = api_.id_random_.next();
    prompts_[i].request = request;
    prompts_[i].prompt_tokens = static_cast<int>(request->prompt.size());
    Status taken = api_.service_.submit(request, std::make_shared<Sink>(self, i, api_.clock_, api_.post_));
    if (taken.ok()) {
      expected_ += static_cast<size_t>(request->n);
      continue;
    }
    ApiError error = {.status = 500, .message = taken.error().message};
    if (taken.error().code == ErrorCode::invalid_argument)
      error.status = 400, error.param = call_.chat ? "messages" : "prompt";
    if (taken.error().code == ErrorCode::unavailable)
      error.status = 503, error.code = "queue_full", error.reason = RejectReason::queue_full;
    prompts_.resize(i);  // the others were never sent
    if (error.status != 500) api_.metrics_.rejected(error.reason);
    return fail(error);
  }
}

void Generation::on_event(size_t prompt_index, TokenEvent event, double received_s) {
  Prompt& prompt = prompts_[prompt_index];
  int n = prompt.request->n;
  XPYD_CHECK(event.choice >= 0 && event.choice < n, "event of choice " + std::to_string(event.choice));
  int index = static_cast<int>(prompt_index) * n + event.choice;
  Choice& choice = choices_[static_cast<size_t>(index)];
  XPYD_CHECK(choice.finish == FinishReason::none, "event after the end of a choice");
  auto self = shared_from_this();
  count(prompt, choice, event, received_s);
  if (!event.prompt_logprobs.empty()) prompt.logprobs = std::move(event.prompt_logprobs);
  bool last = event.finish != FinishReason::none;
  if (!over_ && call_.turn && !call_.prompt_only) remember(choice, event);
  if (!over_) {
    if (event.finish == FinishReason::error || event.finish == FinishReason::timeout) {
      fail(event.finish == FinishReason::timeout
               ? kTookTooLong
               : ApiError{.status = 500, .message = event.error, .code = "internal_error"});
    } else if (call_.stream) {
      stream(prompt_index, index, event);
    } else {
      gather(choice, std::move(event));
    }
  }
  if (last && ended_ == expected_) complete();
}

void Generation::count(Prompt& prompt, Choice& choice, const TokenEvent& event, double received_s) {
  prompt.cached_tokens = std::max(prompt.cached_tokens, event.cached_tokens);
  prompt.queued_s = event.queued_s;
  prompt.last_token_s = received_s;
  if (event.token >= 0) {
    ++choice.tokens;
    api_.metrics_.generated_token();
    if (choice.last_token_s > 0) api_.metrics_.inter_token(received_s - choice.last_token_s);
    choice.last_token_s = received_s;
    if (prompt.first_token_s == 0) {
      prompt.first_token_s = received_s;
      prompt.scheduled_s = event.scheduled_s;
      api_.metrics_.first_token(received_s - arrival_s_, prompt.prompt_tokens);
    }
  }
  if (event.finish == FinishReason::none) return;
  choice.finish = event.finish;
  choice.preemptions = event.preemptions;
  ++ended_;
  if (++prompt.ended < prompt.request->n) return;
  FinishedRequest done;
  done.n = prompt.request->n;
  done.prompt_tokens = prompt.prompt_tokens;
  done.cached_tokens = prompt.cached_tokens;
  done.max_tokens = prompt.request->max_tokens;
  size_t first = static_cast<size_t>(&prompt - prompts_.data()) * static_cast<size_t>(done.n);
  for (size_t i = first; i < first + static_cast<size_t>(done.n); ++i) {
    done.finishes.push_back(choices_[i].finish);
    done.generated.push_back(choices_[i].tokens);
    done.preemptions += choices_[i].preemptions;
  }
  done.arrival_s = arrival_s_;
  done.queued_s = prompt.queued_s;
  done.scheduled_s = prompt.scheduled_s;
  done.first_token_s = prompt.first_token_s;
  done.last_token_s = prompt.last_token_s;
  api_.metrics_.finished(done);
}

// ---- a session
// --------------------------------------------------------------------------------------

// A token that ends the reply (end of sequence, stop_token_ids) is no part of it, unless the client
// wants it in the text. Of a stop string the tokens stay: a token may hold more than the string.
void Generation::remember(Choice& choice, const TokenEvent& event) {
  const bool ends = event.finish == FinishReason::stop && event.stop_text.empty() &&
                    !(event.stop_token >= 0 && prompts_[0].request->include_stop_text);
  if (event.token >= 0 && !ends) choice.session_tokens.push_back(event.token);
  choice.reply += event.text;
}

// Before the client hears the end, so that it can go on at once. Not whole: as if never asked.
void Generation::end_turn(bool whole) {
  if (!call_.turn) return;
  if (!whole) return call_.turn.release();
  if (call_.session_end) return call_.turn.end();
  Conversation now;
  Choice& choice = choices_[0];
  if (call_.chat) {
    now.messages = std::move(call_.messages);
    now.messages.push_back({"assistant", std::move(choice.reply)});
  } else {
    now.tokens = prompts_[0].request->prompt;
    now.tokens.insert(now.tokens.end(), choice.session_tokens.begin(), choice.session_tokens.end());
  }
  call_.turn.commit(std::move(now));
}

// ---- one answer
// -----------------------------------------------------------------------------------

void Generation::gather(Choice& choice, TokenEvent event) {
  if (event.token >= 0) {
    choice.offsets.push_back(choice.text_length);
    if (call_.return_token_ids) choice.token_ids.push_back(event.token);
    if (event.has_logprobs) choice.logprobs.push_back(std::move(event.sampled));
  }
  choice.text += event.text;
  choice.text_length += int(count_code_points(event.text));
  choice.stop_text = std::move(event.stop_text);
  choice.stop_token = event.stop_token;
}

void Generation::complete() {
  if (over_) return end();
  over_ = true;
  status_ = 200;
  const FinishReason finish = choices_[0].finish;
  end_turn(finish == FinishReason::stop || finish == FinishReason::length);
  if (call_.stream) {
    if (call_.include_usage) send_event(format_.usage_chunk(usage()));
    exchange_->write("data: [DONE]\n\n");
    exchange_->end_stream();
    return end();
  }
  std::vector<ChoicePart> parts;
  size_t n = static_cast<size_t>(prompts_[0].request->n);
  for (size_t i = 0; i < choices_.size(); ++i) {
    Choice& choice = choices_[i];
    const Prompt& prompt = prompts_[i / n];
    if (call_.prompt_only) choice = {.finish = choice.finish};
    if (call_.echo) {
      choice.text.insert(0, call_.prompt_texts[i / n]);
      auto shift = int32_t(count_code_points(call_.prompt_texts[i / n]));
      for (int32_t& offset : choice.offsets) offset += shift;
      const std::vector<int32_t> offsets = offsets_of(*prompt.request);
      choice.offsets.insert(choice.offsets.begin(), offsets.begin(), offsets.end());
      choice.logprobs.insert(choice.logprobs.begin(), prompt.logprobs.begin(), prompt.logprobs.end());
    }
    ChoicePart part;
    if (call_.prompt_logprobs) part.prompt_logprobs = &prompt.logprobs;
    part.index = static_cast<int>(i);
    part.text = choice.text;
    part.with_logprobs = prompt.request->sampling.top_logprobs >= 0;
    part.logprobs = choice.logprobs;
    part.text_offsets = choice.offsets;
    part.finish = choice.finish;
    part.stop_text = choice.stop_text;
    part.stop_token = choice.stop_token;
    if (call_.return_token_ids) {
      part.token_ids = &choice.token_ids;
      part.prompt_token_ids = &prompt.request->prompt;
    }
    parts.push_back(part);
  }
  HttpResponse response;
  response.headers = headers();
  response.body = format_.whole(parts, usage());
  exchange_->respond(std::move(response));
  end();
}

// Code points of the prompt's text before each of its tokens, where their logprobs are shown.
std::vector<int32_t> Generation::offsets_of(const Request& request) const {
  std::vector<int32_t> offsets;
  if (request.sampling.top_logprobs < 0) return offsets;
  const bool has_text = api_.model_.tokenizer != nullptr;
  Detokenizer text = has_text ? Detokenizer(*api_.model_.tokenizer, true) : Detokenizer();
  int32_t length = 0;
  for (int32_t id : request.prompt) {
    offsets.push_back(length);
    if (has_text) length += int(count_code_points(text.feed(id)));
  }
  return offsets;
}

// ---- a stream
// -------------------------------------------------------------------------------------

// One event per token, the role and the finish reason in the first's and the last's: clients count
// events as tokens, and take the first for the first token.
void Generation::stream(size_t prompt_index, int index, const TokenEvent& event) {
  const Prompt& prompt = prompts_[prompt_index];
  Choice& choice = choices_[static_cast<size_t>(index)];
  ChoicePart part;
  std::string text = call_.prompt_only ? "" : event.text;
  std::vector<Sampled> logprobs;
  std::vector<int32_t> offsets;
  part.first = !std::exchange(choice.began, true);
  if (part.first && call_.echo) {
    text.insert(0, call_.prompt_texts[prompt_index]);
    choice.text_length = int(count_code_points(call_.prompt_texts[prompt_index]));
    logprobs = prompt.logprobs;
    offsets = offsets_of(*prompt.request);
  }
  part.index = index;
  part.text = text;
  part.with_logprobs = event.has_logprobs;
  if (event.has_logprobs && !call_.prompt_only) {
    logprobs.push_back(event.sampled);
    offsets.push_back(choice.text_length);
  }
  part.logprobs = logprobs;
  part.text_offsets = offsets;
  std::vector<int32_t> ids;
  if (call_.return_token_ids) {
    if (event.token >= 0 && !call_.prompt_only) ids.push_back(event.token);
    part.token_ids = &ids;
    if (part.first) part.prompt_token_ids = &prompt.request->prompt;
  }
  part.finish = event.finish;
  part.stop_text = event.stop_text;
  part.stop_token = event.stop_token;
  const int tokens = call_.prompt_only ? 0 : choice.tokens;
  Usage so_far{prompt.prompt_tokens, tokens, prompt.cached_tokens};
  send_event(format_.chunk(part, call_.continuous_usage ? &so_far : nullptr));
  choice.text_length += int(count_code_points(event.text));
}

// The head waits for the first event, so that a failure before it is still an HTTP status.
void Generation::send_event(const std::string& json) {
  if (!std::exchange(streaming_, true)) {
    HttpResponse head;
    head.content_type = "text/event-stream; charset=utf-8";
    head.headers = headers();
    head.headers.emplace_back("Cache-Control", "no-cache");
    head.headers.emplace_back("X-Accel-Buffering", "no");
    exchange_->begin_stream(std::move(head));
  }
  exchange_->write(sse_event(json));
}

// ---- the end
// --------------------------------------------------------------------------------------

void Generation::fail(const ApiError& error) {
  over_ = true;
  status_ = error.status;
  end_turn(false);
  abort_all();
  if (streaming_) {
    exchange_->write(sse_event(error_body(error)) + "data: [DONE]\n\n");
    exchange_->end_stream();
  } else {
    HttpResponse response = api_.error_response(error);
    for (auto& header : headers()) response.headers.push_back(std::move(header));
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

void Generation::check_deadline(double now) {
  double timeout = api_.options_.request_timeout_s;
  if (timeout <= 0 || now < arrival_s_ + timeout + kDeadlineGraceSeconds) return;
  auto self = shared_from_this();
  if (!over_) fail(kTookTooLong);
  end();
}

void Generation::end() {
  if (api_.live_.erase(this) == 0) return;
  const LogLevel level = status_ >= 500 ? LogLevel::error : status_ >= 400 ? LogLevel::warning : LogLevel::info;
  api_.log_line(level, log_text(api_.clock_.now()));
  api_.metrics_.http_request(call_.chat ? "/v1/chat/completions" : "/v1/completions", "POST", status_);
}

Usage Generation::usage() const {
  Usage sum;
  for (const Prompt& prompt : prompts_) {
    sum.prompt_tokens += prompt.prompt_tokens;
    sum.cached_tokens += prompt.cached_tokens;
  }
  for (const Choice& choice : choices_)
    if (!call_.prompt_only) sum.completion_tokens += choice.tokens;
  return sum;
}

HttpHeaders Generation::headers() const { return {{"X-Request-Id", client_id_.empty() ? id_ : client_id_}}; }

std::string Generation::log_text(double now) const {
  Usage total = usage();
  double first = 0;
  for (const Prompt& prompt : prompts_)
    if (prompt.first_token_s > 0 && (first == 0 || prompt.first_token_s < first)) first = prompt.first_token_s;
  char numbers[256];
  std::snprintf(numbers, sizeof numbers,
                " stream=%d prompts=%zu choices=%zu prompt_tokens=%lld cached_tokens=%lld "
                "completion_tokens=%lld",
                call_.stream, prompts_.size(), choices_.size(), static_cast<long long>(total.prompt_tokens),
                static_cast<long long>(total.cached_tokens), static_cast<long long>(total.completion_tokens));
  std::string line = "request id=" + id_ + (call_.chat ? " route=chat" : " route=completions") +
                     " status=" + std::to_string(status_) + numbers;
  if (!choices_.empty() && choices_[0].finish != FinishReason::none)
    line += std::string(" finish=") + finish_reason_name(choices_[0].finish);
  std::snprintf(numbers, sizeof numbers, " ttft_ms=%.1f e2e_ms=%.1f", first > 0 ? 1e3 * (first - arrival_s_) : -1.0,
                1e3 * (now - arrival_s_));
  line += numbers;
  if (!client_id_.empty()) line += " client_id=" + client_id_;
  // Names of fields are a client's text: the first few, short and printable.
  for (size_t i = 0; i < std::min<size_t>(call_.ignored.size(), 4); ++i) {
    line += i == 0 ? " ignored=" : ",";
    for (char c : call_.ignored[i].substr(0, 32))
      line += std::isalnum(static_cast<unsigned char>(c)) || c == '_' ? c : '?';
  }
  return line;
}

}  // namespace xpyd
