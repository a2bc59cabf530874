// Reads files of many records one at a time. A file of any size needs the memory of one record, and an error names its
// line.
//
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "base/status.h"

namespace xpyd {

class RecordReader {
 public:
  static constexpr size_t kMaxBytes = 16 << 20;  // of one record
  // A byte order mark at the beginning of the file is skipped.
  explicit RecordReader(const std::string& path);

  bool is_open() const { return bool(file_); }

  // "FILE:LINE" where the last record that was read begins.
  std::string where() const { return path_ + ":" + std::to_string(record_line_); }

  // Reads the next line that is not blank, without its line end. False: the file has ended. Errors: `io` if the file
  // cannot be read, `invalid_argument` for a record of more than kMaxBytes; the same for value() and object().
  Result<bool> line(std::string* line);

  // True if the file begins with '[', so it is a JSON array and not lines. Requires that nothing has been read.
  bool is_array();

  // Reads the next value of a file that is a JSON array. False: the array has ended. The text is not yet checked to be
  // JSON.
  Result<bool> value(std::string* value);

  // As value(), for an array of objects.
  Result<bool> object(std::string* object);

 private:
  int get() {
    int c = std::getc(file_.get());
    if (c == '\n') ++line_;
    return c;
  }
  int skip_blanks();
  Error unreadable() const;
  Error error(const std::string& what) const { return invalid(where() + ": " + what); }

  std::string path_;
  std::unique_ptr<FILE, int (*)(FILE*)> file_;
  bool begun_ = false;
  int64_t line_ = 1, record_line_ = 1;
};

}  // namespace xpyd
