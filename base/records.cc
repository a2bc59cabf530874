#include "base/records.h"

#include <cerrno>
#include <cstring>

namespace xpyd {

Result<bool> RecordReader::line(std::string* line) {
  if (!file_) return unreadable();
  do {
    line->clear();
    record_line_ = line_;
    int c = get();
    if (c == EOF && std::ferror(file_.get())) return unreadable();
    if (c == EOF) return false;
    for (; c != EOF && c != '\n'; c = get()) {
      line->push_back(char(c));
      if (line->size() > kMaxBytes) return error("a line of more than 16 MiB");
    }
    if (line->ends_with('\r')) line->pop_back();
  } while (line->find_first_not_of(" \t\r") == line->npos);
  return true;
}

Result<bool> RecordReader::object(std::string* object) {
  if (!file_) return unreadable();
  object->clear();
  int c = skip_blanks();
  if (!begun_ && c != '[') return error("expected '[', the beginning of an array of conversations");
  if (!begun_) c = skip_blanks();
  if (c == ']') {
    if (skip_blanks() != EOF) return error("text after the end of the array");
    return false;
  }
  if (begun_) {
    if (c != ',') return error("expected ',' or ']' after a conversation");
    c = skip_blanks();
  }
  begun_ = true;
  if (c != '{') return error("expected '{', the beginning of a conversation");
  int depth = 0;
  bool in_string = false, escaped = false;
  while (true) {
    if (c == EOF) return error("the file ends inside the conversation that begins here");
    object->push_back(char(c));
    if (object->size() > kMaxBytes) return error("a conversation of more than 16 MiB");
    if (in_string) {
      if (escaped)
        escaped = false;
      else if (c == '\\')
        escaped = true;
      else if (c == '"')
        in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if ((c == '}' || c == ']') && --depth == 0) {
      return true;
    }
    c = get();
  }
}

Error RecordReader::unreadable() const { return {ErrorCode::io, path_ + ": " + std::strerror(errno)}; }

int RecordReader::skip_blanks() {
  int c = get();
  while (c == ' ' || c == '\n' || c == '\r' || c == '\t') c = get();
  record_line_ = line_;
  return c;
}

}  // namespace xpyd
