// What a server sends back, byte by byte: an HTTP/1.1 response, and the events inside its body.
//
// Thread safety: each object belongs to one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "base/status.h"

namespace xpyd {

// Bytes of one response -> status line, headers, decoded body. Bounded: 64 KiB of head, 1 TiB of
// body.
class HttpResponseParser {
 public:
  // Decoded body bytes go to `body` as they come. The error says what was malformed.
  Status feed(std::string_view bytes, const std::function<void(std::string_view)>& body);
  // The server closed: an error unless the response was complete, or ends at the close.
  Status finish();
  bool complete() const { return state_ == State::complete; }
  int status() const { return status_; }  // 0 before the status line
  const std::string& reason() const { return reason_; }
  const std::string& header(const std::string& lower_case_name) const;  // "" when absent

 private:
  enum class State { head, body_length, body_close, chunk_size, chunk_data, chunk_end, trailer, complete };
  Status head_complete();
  State state_ = State::head;
  std::string line_;  // head, chunk size and trailer bytes so far
  int status_ = 0;
  std::string reason_;
  std::map<std::string, std::string> headers_;  // names in lower case
  uint64_t left_ = 0;                           // body bytes still to come
};

// Bytes of a text/event-stream -> the data of each event, lines joined by "\n".
class SseParser {
 public:
  // False: an event of more than 16 MiB.
  bool feed(std::string_view bytes, const std::function<void(const std::string&)>& event);

 private:
  std::string line_, data_;
  bool has_data_ = false, after_cr_ = false;
};

}  // namespace xpyd
