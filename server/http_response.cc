#include "server/http_response.h"

#include <algorithm>
#include <charconv>

#include "server/http_message.h"

namespace xpyd {
namespace {

constexpr size_t kMaxHeadBytes = 64 << 10;
constexpr uint64_t kMaxBodyBytes = uint64_t{1} << 40;
constexpr size_t kMaxEventBytes = 16 << 20;

std::string_view trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t' || text.back() == '\r')) text.remove_suffix(1);
  return text;
}

template <class T>
bool parse_all(std::string_view text, T* out, int base = 10) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out, base);
  return error == std::errc() && end == text.data() + text.size();
}

Error malformed(const std::string& what) { return {ErrorCode::io, "malformed response: " + what}; }

}  // namespace

const std::string& HttpResponseParser::header(const std::string& lower_case_name) const {
  static const std::string none;
  auto found = headers_.find(lower_case_name);
  return found == headers_.end() ? none : found->second;
}

Status HttpResponseParser::head_complete() {
  size_t end = line_.find('\n');
  std::string_view first = trim(std::string_view(line_).substr(0, end));
  // "HTTP/1.1 200 OK"
  if (first.size() < 12 || first.substr(0, 7) != "HTTP/1." || first[8] != ' ' ||
      !parse_all(first.substr(9, 3), &status_) || status_ < 100 || status_ > 599)
    return malformed("status line '" + std::string(first.substr(0, 80)) + "'");
  reason_ = trim(first.substr(12));
  headers_.clear();
  while (end != line_.npos) {
    size_t begin = end + 1;
    end = line_.find('\n', begin);
    std::string_view line = trim(std::string_view(line_).substr(begin, end - begin));
    if (line.empty()) continue;
    size_t colon = line.find(':');
    if (colon == line.npos || colon == 0) return malformed("header '" + std::string(line.substr(0, 80)) + "'");
    headers_[lower(line.substr(0, colon))] = trim(line.substr(colon + 1));
  }
  line_.clear();
  if (status_ < 200) return ok();  // 100 Continue: another head follows
  left_ = 0;
  const std::string& length = header("content-length");
  if (lower(header("transfer-encoding")).find("chunked") != std::string::npos) {
    state_ = State::chunk_size;
  } else if (status_ == 204 || status_ == 304) {
    state_ = State::complete;
  } else if (!length.empty()) {
    if (!parse_all(length, &left_) || left_ > kMaxBodyBytes)
      return malformed("Content-Length '" + length.substr(0, 80) + "'");
    state_ = left_ == 0 ? State::complete : State::body_length;
  } else {
    state_ = State::body_close;
    left_ = kMaxBodyBytes;
  }
  return ok();
}

Status HttpResponseParser::feed(std::string_view bytes, const std::function<void(std::string_view)>& body) {
  // One line more of the head, a chunk size or the trailer; false: its end is not here yet.
  auto take_line = [&] {
    size_t end = bytes.find('\n');
    size_t n = end == bytes.npos ? bytes.size() : end + 1;
    line_.append(bytes.substr(0, n));
    bytes.remove_prefix(n);
    return end != std::string_view::npos;
  };
  while (!bytes.empty()) {
    switch (state_) {
      case State::head: {
        bool whole = take_line();
        if (line_.size() > kMaxHeadBytes) return malformed("more than 64 KiB of headers");
        // The blank line; before a status line it is skipped.
        size_t last = line_.size() > 1 ? line_.rfind('\n', line_.size() - 2) : line_.npos;
        size_t begin = last == line_.npos ? 0 : last + 1;
        if (!whole || !trim(std::string_view(line_).substr(begin, line_.size() - begin - 1)).empty()) break;
        if (begin == 0) {
          line_.clear();
          break;
        }
        if (Status status = head_complete(); !status) return status;
        break;
      }
      case State::body_length:
      case State::body_close:
      case State::chunk_data: {
        size_t n = size_t(std::min<uint64_t>(bytes.size(), left_));
        if (n == 0) return malformed("more than 1 TiB of body");
        body(bytes.substr(0, n));
        bytes.remove_prefix(n);
        left_ -= n;
        if (left_ == 0 && state_ == State::body_length) state_ = State::complete;
        if (left_ == 0 && state_ == State::chunk_data) state_ = State::chunk_end;
        break;
      }
      case State::chunk_size: {
        bool whole = take_line();
        if (line_.size() > 256) return malformed("chunk size of more than 256 bytes");
        if (!whole) break;
        std::string_view size = trim(std::string_view(line_).substr(0, line_.find_first_of(";\n")));
        if (size.empty() || !parse_all(size, &left_, 16) || left_ > kMaxBodyBytes)
          return malformed("chunk size '" + std::string(size.substr(0, 80)) + "'");
        line_.clear();
        state_ = left_ == 0 ? State::trailer : State::chunk_data;
        break;
      }
      case State::chunk_end:
      case State::trailer: {
        bool whole = take_line();
        if (line_.size() > kMaxHeadBytes) return malformed("more than 64 KiB of trailer");
        if (!whole) break;
        bool blank = trim(std::string_view(line_).substr(0, line_.size() - 1)).empty();
        line_.clear();
        if (state_ == State::chunk_end) {
          if (!blank) return malformed("a chunk is longer than its size");
          state_ = State::chunk_size;
        } else if (blank) {
          state_ = State::complete;
        }
        break;
      }
      case State::complete: return malformed("bytes after its end");
    }
  }
  return ok();
}

Status HttpResponseParser::finish() {
  if (state_ == State::body_close) state_ = State::complete;
  if (state_ == State::complete) return ok();
  if (status_ == 0) return Error{ErrorCode::io, "the server closed before it answered"};
  return Error{ErrorCode::io, "the server closed in the middle of its answer"};
}

bool SseParser::feed(std::string_view bytes, const std::function<void(const std::string&)>& event) {
  for (char c : bytes) {
    bool lf_of_crlf = c == '\n' && after_cr_;
    after_cr_ = c == '\r';
    if (lf_of_crlf) continue;
    if (c != '\n' && c != '\r') {
      line_ += c;
      if (line_.size() + data_.size() > kMaxEventBytes) return false;
      continue;
    }
    if (line_.empty()) {
      if (has_data_) event(data_);
      data_.clear();
      has_data_ = false;
    } else if (line_.rfind("data:", 0) == 0) {
      size_t begin = line_.size() > 5 && line_[5] == ' ' ? 6 : 5;
      if (has_data_) data_ += '\n';
      data_.append(line_, begin);
      has_data_ = true;
    }
    line_.clear();
  }
  return true;
}

}  // namespace xpyd
