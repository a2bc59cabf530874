// A progress bar on stderr: one line, redrawn in place. If stderr is not a terminal, nothing is written.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.h"

namespace xpyd {

class Progress {
 public:
  // Draws on file descriptor `fd` if `enabled` and `fd` is a terminal.
  Progress(std::string label, int64_t total, Clock& clock, bool enabled = true, int fd = 2);
  ~Progress();  // calls finish()
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Redraws at most ten times a second. `note` follows the bar.
  void update(int64_t done, const std::string& note = "");
  void finish();  // clears the line; later updates do nothing

  // The line without control characters, for `elapsed_s` seconds since the start; at most `columns` wide.
  static std::string line(const std::string& label, int64_t done, int64_t total, double elapsed_s,
                          const std::string& note, int columns);

 private:
  std::string label_;
  int64_t total_;
  Clock& clock_;
  int fd_;
  bool active_;
  bool drawn_ = false;
  double start_s_, last_s_;
};

}  // namespace xpyd
