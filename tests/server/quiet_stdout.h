#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace xpyd::testing {

// Redirects stdout, or stderr (2), to a file while it lives.
class CaughtStdout {
 public:
  explicit CaughtStdout(const std::string& path, int of = 1) : of_(of), kept_(dup(of)) {
    std::fflush(nullptr);
    const int file = open(path.c_str(), O_WRONLY | O_CREAT, 0600);
    dup2(file, of);
    close(file);
  }
  ~CaughtStdout() {
    std::fflush(nullptr);
    dup2(kept_, of_);
    close(kept_);
  }

 private:
  int of_, kept_;
};

// Keeps result tables out of the tests' output.
class QuietStdout : CaughtStdout {
 public:
  QuietStdout() : CaughtStdout("/dev/null") {}
};

}  // namespace xpyd::testing
