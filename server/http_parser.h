// Bytes -> HttpRequest. Boost.Beast parses; what it is lenient about, and what two servers in a row
// could read differently (request smuggling), is refused here.
//
// Thread safety: none; one parser belongs to one connection.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "server/http_message.h"

namespace xpyd {

class HttpParser {
 public:
  enum class State { header, body, done, failed };

  explicit HttpParser(const HttpLimits& limits);
  ~HttpParser();

  // Reads from the front of `input` and says how much of it was used; the rest must be offered
  // again, in front of what comes later. Input after a whole request is left alone (pipelining).
  size_t feed(std::string_view input);

  State state() const { return state_; }
  // The header is complete, the body is not, and the client waits for "100 Continue". True once.
  bool wants_continue();
  size_t body_bytes() const { return request_.body.size(); }  // received so far
  // state() is body or done: the header is whole.
  HttpRequest& request() { return request_; }
  // state() == done: gives the request away and is ready for the next one.
  HttpRequest take();

  // state() == failed: the answer to give before closing.
  int error_status() const { return error_status_; }
  const std::string& error() const { return error_; }

 private:
  class Beast;
  size_t feed_header(std::string_view input);
  size_t feed_beast(std::string_view input);
  bool header_block_ok(std::string_view block);
  bool framing_ok();
  bool fail(int status, std::string why);

  HttpLimits limits_;
  State state_ = State::header;
  HttpRequest request_;
  std::unique_ptr<Beast> beast_;
  size_t scanned_ = 0;  // header bytes already searched for the end
  bool skipped_blank_line_ = false;
  bool continue_wanted_ = false;
  int error_status_ = 0;
  std::string error_;
};

}  // namespace xpyd
