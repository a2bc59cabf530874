#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace xpyd::testing {

// What is printed goes to a file.
class CaughtStdout {
 public:
  explicit CaughtStdout(const std::string& path) : kept_(dup(1)) {
    std::fflush(stdout);
    const int file = open(path.c_str(), O_WRONLY | O_CREAT, 0600);
    dup2(file, 1);
    close(file);
  }
  ~CaughtStdout() {
    std::fflush(stdout);
    dup2(kept_, 1);
    close(kept_);
  }

 private:
  int kept_;
};

// Keeps the result tables out of the tests' output.
class QuietStdout : CaughtStdout {
 public:
  QuietStdout() : CaughtStdout("/dev/null") {}
};

}  // namespace xpyd::testing
