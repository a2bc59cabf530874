#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/json/json.h"
#include "base/numbers.h"
#include "experiments/load/bench.h"

namespace xpyd::server {
namespace {

using nlohmann::json;

constexpr size_t kMaxErrorBody = 4096;

int integer_or_0(const json& object, const char* name) {
  auto value = get_int(object, name, 0, INT32_MAX);
  return value ? int(value.value()) : 0;
}

// Whether a chat's delta has text, reasoning or tool calls, under the names that servers use.
bool has_output(const json& delta) {
  for (const char* name : {"content", "reasoning_content", "reasoning"})
    if (const json* text = find_field(delta, name);
        text && text->is_string() && !text->get_ref<const std::string&>().empty())
      return true;
  const json* calls = find_field(delta, "tool_calls");
  return calls && calls->is_array() && !calls->empty();
}

// The "message" of OpenAI's envelope, or of the flat form that some servers use.
std::string error_message(const json& body) {
  if (!body.is_object()) return "";
  const json* error = find_field(body, "error");
  if (error && error->is_string()) return error->get<std::string>();
  auto message = get_string(error && error->is_object() ? *error : body, "message");
  return message ? message.value() : "";
}

}  // namespace

Result<ServerCard> read_server_card(HttpClient& client, const std::string& model) try {
  const json answer = need(
      parse_json(need(client.fetch({.method = "GET", .target = "/v1/models", .body = ""})), "/v1/models"));
  std::string names;
  for (const json& entry : *need(get_array(answer, "data", "/v1/models"))) {
    const std::string id = need(get_string(entry, "id", "/v1/models"));
    names += (names.empty() ? "" : ", ") + id;
    if (!model.empty() && id != model) continue;
    ServerCard card;
    card.model = id;
    auto root = get_string(entry, "root");
    card.root = root ? root.value() : card.model;
    card.max_model_len = integer_or_0(entry, "max_model_len");
    card.vocab = integer_or_0(entry, "vocab_size");
    return card;
  }
  return invalid("--model: the server has no '" + model + "'; it has: " + names);
} catch (const Error& error) {
  return error;
}

Result<int> count_tokens(HttpClient& client, const std::string& model, const std::string& text) try {
  json request = {{"model", model}, {"prompt", text}, {"add_special_tokens", false}};
  const json answer = need(
      parse_json(need(client.fetch({.target = "/tokenize", .body = json_text(request)})), "/tokenize"));
  return int(need(get_array(answer, "tokens", "/tokenize"))->size());
} catch (const Error& error) {
  return error;
}

Status make_texts(HttpClient& client, const SendOptions& options, std::vector<BenchRequest>& requests) try {
  for (BenchRequest& request : requests) {
    if (!request.text.empty()) continue;
    const std::string body =
        JsonText().object("model", options.model, "tokens", prompt_tokens(request, options.vocab)).take();
    const json answer = need(parse_json(
        need(client.fetch({.target = "/detokenize", .body = body}), "the chat endpoint needs prompts as text: "),
        "/detokenize"));
    request.text = need(get_string(answer, "prompt", "/detokenize"));
  }
  return ok();
} catch (const Error& error) {
  return error;
}

std::string completion_body(const BenchRequest& request, int i, const SendOptions& options) {
  JsonText out;  // text, not a tree, because a prompt may have 100,000 ids
  out.open('{').add("model", options.model, "max_tokens", request.output_tokens);
  out.add("temperature", options.temperature, "stream", true);
  out.key("stream_options").object("include_usage", true);
  if (options.ignore_eos) out.add("ignore_eos", true);
  if (options.temperature > 0) out.add("seed", options.seed + uint64_t(i));
  if (is_chat(options))
    out.key("messages").open('[').object("role", "user", "content", request.text).close(']');
  else if (request.text.empty())
    out.add("prompt", prompt_tokens(request, options.vocab));
  else
    out.add("prompt", request.text);
  return out.close('}').take();
}

void AnswerReader::feed(int status, std::string_view bytes, double now_s) {
  if (status != 200) {
    error_body_.append(bytes.substr(0, kMaxErrorBody - std::min(kMaxErrorBody, error_body_.size())));
    return;
  }
  if (!sse_.feed(bytes, [&](const std::string& data) { event(data, now_s); }))
    record_.error = "the stream has an event of more than 16 MiB";
}

void AnswerReader::event(const std::string& data, double now_s) {
  if (data == "[DONE]") {
    done_ = true;
    return;
  }
  if (!record_.error.empty()) return;
  auto parsed = parse_json(data, "event");
  if (!parsed) {
    record_.error = parsed.error().message;
    return;
  }
  const json& event = parsed.value();
  const json* error = event.is_object() ? find_field(event, "error") : nullptr;
  if (!event.is_object() || error) {
    std::string message = error_message(event);
    // A refusal after the response head was sent cannot be an HTTP 429 any more.
    if (error && error->is_object()) {
      const auto code = get_string(*error, "code");
      record_.refused = code.ok() && code.value() == "objective_missed";
    }
    record_.error = "error in the stream: " + (message.empty() ? data.substr(0, 200) : message);
    return;
  }
  const json* choices = find_field(event, "choices");
  if (choices && choices->is_array() && !choices->empty()) {
    const json& choice = (*choices)[0];
    const json* delta = choice.is_object() ? find_field(choice, "delta") : nullptr;
    auto text = delta && delta->is_object() ? get_string(*delta, "content") : get_string(choice, "text");
    if (delta && !(delta->is_object() && has_output(*delta))) return;  // the role, or the end, of a chat
    record_.chunk_s.push_back(now_s);
    if (keep_text_ && text) record_.text += text.value();
  }
  const json* usage = find_field(event, "usage");
  if (usage && usage->is_object()) {
    record_.has_usage = true;
    record_.output_tokens = integer_or_0(*usage, "completion_tokens");
    if (int prompt = integer_or_0(*usage, "prompt_tokens")) record_.input_tokens = prompt;
  }
}

void AnswerReader::finish(const HttpOutcome& outcome, double now_s) {
  record_.end_s = now_s;
  if (!record_.has_usage) record_.output_tokens = int(record_.chunk_s.size());
  record_.refused = record_.refused || outcome.status == 429;
  if (double seconds = 0; record_.refused && read_number(outcome.retry_after, seconds) && seconds >= 0)
    record_.retry_after_s = seconds;
  if (outcome.status != 0 && outcome.status != 200) {
    record_.error = "HTTP " + std::to_string(outcome.status) + " " + outcome.reason;
    auto parsed = parse_json(error_body_, "error");
    std::string message = parsed ? error_message(parsed.value()) : "";
    if (!message.empty()) record_.error += ": " + message.substr(0, 300);
  } else if (!outcome.error.empty()) {
    record_.error = outcome.error;
  } else if (record_.error.empty() && record_.chunk_s.empty()) {
    record_.error = "the stream ended without any chunk";
  } else if (record_.error.empty() && !done_) {
    record_.error = "the stream ended without [DONE]";
  }
}

LoadRun send_load(HttpClient& client, const std::vector<BenchRequest>& requests, const std::vector<double>& due,
                  const SendOptions& options, Clock& clock,
                  const std::function<void(int done, int in_flight)>& on_progress, const std::atomic<bool>& stop) {
  XPYD_CHECK(requests.size() == due.size());
  int n = int(requests.size()), started = 0, done = 0;
  LoadRun run;
  std::vector<RequestRecord> records(requests.size());
  std::vector<bool> answered(requests.size(), false);
  std::vector<std::unique_ptr<AnswerReader>> readers(requests.size());
  HttpCall call{.method = "POST", .target = options.endpoint, .body = "", .timeout_s = options.timeout_s};
  std::set<std::pair<double, size_t>> ready;                  // (seconds after the start, request)
  std::vector<std::vector<size_t>> waiting(requests.size());  // by request: those that wait for its end
  for (size_t i = 0; i < requests.size(); ++i) {
    if (requests[i].after < 0)
      ready.emplace(due[i], i);
    else
      waiting[size_t(requests[i].after)].push_back(i);
  }
  size_t made = requests.size();  // the request whose body is in `call`
  // Makes the next body before it is due, because a long prompt takes a millisecond.
  const auto make_next = [&] {
    if (ready.empty() || made == ready.begin()->second) return;
    made = ready.begin()->second;
    call.body = completion_body(requests[made], int(made), options);
  };
  make_next();
  run.start_s = clock.now();
  while (done < n && !stop.load()) {
    make_next();
    bool room = !ready.empty() && (options.max_concurrency == 0 || started - done < options.max_concurrency);
    double wait_s = room ? run.start_s + ready.begin()->first - clock.now() : 0.1;
    if (room && wait_s <= 0) {
      const double due_s = ready.begin()->first;
      const size_t i = ready.begin()->second;
      ready.erase(ready.begin());
      ++started;
      RequestRecord& record = records[i];
      record.input_tokens = requests[i].input_tokens;
      record.due_s = run.start_s + due_s;
      readers[i] = std::make_unique<AnswerReader>(record, options.keep_text);
      record.sent_s = clock.now();
      client.start(
          call, [&, i](int status, std::string_view bytes) { readers[i]->feed(status, bytes, clock.now()); },
          [&, i](const HttpOutcome& outcome) {
            readers[i]->finish(outcome, clock.now());
            readers[i].reset();
            answered[i] = true;
            ++done;
            for (size_t next : waiting[i]) ready.emplace(clock.now() - run.start_s + requests[next].think_s, next);
          });
      make_next();
      wait_s = 0;
    }
    client.poll(wait_s);
    on_progress(done, started - done);
  }
  client.abort_all();
  run.duration_s = clock.now() - run.start_s;
  run.unanswered = n - done;
  for (size_t i = 0; i < records.size(); ++i)
    if (answered[i]) run.records.push_back(std::move(records[i]));
  return run;
}

}  // namespace xpyd::server
