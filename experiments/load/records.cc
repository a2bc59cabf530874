#include "experiments/load/records.h"

#include <cerrno>
#include <cstring>

namespace xpyd {

RecordReader::RecordReader(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "rb"), std::fclose) {
  if (!file_) return;
  const int first = std::getc(file_.get());
  if (first == 0xEF && std::getc(file_.get()) == 0xBB && std::getc(file_.get()) == 0xBF) return;
  std::clearerr(file_.get());  // if it is a folder, reading the first record reports it
  if (first == 0xEF)
    std::rewind(file_.get());
  else
    std::ungetc(first, file_.get());
}

bool RecordReader::is_array() {
  if (!file_) return false;
  const int c = skip_blanks();
  std::clearerr(file_.get());
  std::ungetc(c, file_.get());
  return c == '[';
}

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
  Result<bool> found = value(object);
  if (found && found.value() && object->front() != '{') return error("expected '{', the beginning of a conversation");
  return found;
}

Result<bool> RecordReader::value(std::string* value) {
  if (!file_) return unreadable();
  value->clear();
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
  int depth = 0;
  bool in_string = false, escaped = false;
  while (true) {
    if (c == EOF) return error("the file ends inside the conversation that begins here");
    value->push_back(char(c));
    if (value->size() > kMaxBytes) return error("a conversation of more than 16 MiB");
    if (in_string) {
      if (escaped)
        escaped = false;
      else if (c == '\\')
        escaped = true;
      else if (c == '"')
        in_string = false;
      if (!in_string && depth == 0) return true;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if ((c == '}' || c == ']') && --depth <= 0) {
      return true;
    }
    c = get();
    if (depth > 0 || in_string) continue;
    if (c == ',' || c == ']') std::ungetc(c, file_.get());
    if (c == ',' || c == ']' || c == ' ' || c == '\n' || c == '\r' || c == '\t' || c == EOF) return true;
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
