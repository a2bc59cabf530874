// One /v1/completions or /v1/chat/completions call on its way: its prompts are submitted, their events come back as
// stream events or are gathered into one answer, in OpenAI's JSON, and its end is counted and logged.
//
// Thread safety: the I/O thread's, but for the sinks, which engine threads call.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "server/api.h"

namespace xpyd::server {

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  Generation(Api& api, GenerationCall call, std::shared_ptr<HttpExchange> exchange, std::string id,
             std::string client_id, double arrival_s);
  void start();
  // Ends the call when the cluster has not done so well after its deadline.
  void check_deadline(double now);
  // The HTTP status it was answered with; 499: the client left first. 0: not yet.
  int status() const { return status_; }

 private:
  class Sink;
  // What an answer says of a choice: all of it, or in a stream one token.
  struct Part {
    std::string text;
    bool with_logprobs = false;
    std::vector<Sampled> logprobs;  // of each token
    std::vector<int32_t> offsets;   // code points before each token's text
    std::vector<int32_t> token_ids;
    FinishReason finish = FinishReason::none;
    std::string stop_text;  // why it stopped, when not by EOS
    int32_t stop_token = -1;
  };
  struct Choice {
    Part part;                // not yet sent
    int32_t text_length = 0;  // code points so far
    int tokens = 0;
    bool began = false;  // a stream event of it went out
    FinishReason finish = FinishReason::none;
    std::string reply;  // in a session: what it keeps of this turn
    std::vector<int32_t> session_tokens;
    double last_token_s = 0;
    int preemptions = 0;
  };
  struct Prompt {
    std::shared_ptr<const Request> request;
    int prompt_tokens = 0, cached_tokens = 0, ended = 0;
    std::vector<Sampled> logprobs;  // of its tokens, where asked for
    double queued_s = 0, scheduled_s = 0, first_token_s = 0, last_token_s = 0;
  };

  void on_event(size_t prompt, TokenEvent event, double received_s);
  void count(Prompt& prompt, Choice& choice, const TokenEvent& event, double received_s);
  void gather(Choice& choice, TokenEvent event);
  void echo(size_t prompt, Choice& choice) const;
  void stream(size_t prompt, size_t index);
  void remember(Choice& choice, const TokenEvent& event);
  void end_turn(bool whole);
  void complete();
  void fail(const ApiError& error);
  void on_gone();
  void abort_all();
  void end();
  void send_event(const std::string& event);
  struct Usage {
    int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  };
  Usage usage() const;
  static void add_usage(JsonText& out, const Usage& usage);
  void add_choice(JsonText& out, size_t index, bool first) const;
  std::string answer(const std::string& choices_and_usage) const;
  HttpHeaders headers() const;
  std::string log_text(double now) const;

  Api& api_;
  GenerationCall call_;
  std::shared_ptr<HttpExchange> exchange_;
  std::string id_, client_id_;
  double arrival_s_;
  std::string shared_;  // of all answers: the fields between object and choices
  std::vector<Prompt> prompts_;
  std::vector<Choice> choices_;      // [prompt][n]
  size_t expected_ = 0, ended_ = 0;  // choices
  bool streaming_ = false;           // the stream's head is sent
  bool over_ = false;                // answered, failed or gone: nothing more to send
  int status_ = 0;
};

}  // namespace xpyd::server
