// Files of many records, read one record at a time: a file of any size takes the memory of one record, and an error
// knows its line.
//
// Thread safety: none.
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
  // A byte order mark at the file's beginning is skipped.
  explicit RecordReader(const std::string& path);

  bool is_open() const { return bool(file_); }

  // "FILE:LINE" where the record read last begins.
  std::string where() const { return path_ + ":" + std::to_string(record_line_); }

  // The next line that is not blank, without its end. False: the end of the file.
  Result<bool> line(std::string* line);

  // Whether the file begins with '[': a JSON array, else lines. Before: nothing of it has been read.
  bool is_array();

  // The next value, of any kind, of a file that is a JSON array. False: the end of the array. The text is not yet
  // checked to be JSON.
  Result<bool> value(std::string* value);

  // The next object of a file that is a JSON array of objects. False: the end of the array. The text is not yet
  // checked to be JSON.
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
