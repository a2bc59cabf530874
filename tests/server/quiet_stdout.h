#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>

namespace xpyd::testing {

// Keeps the result tables out of the tests' output.
class QuietStdout {
 public:
  QuietStdout() : kept_(dup(1)) {
    std::fflush(stdout);
    int null = open("/dev/null", O_WRONLY);
    dup2(null, 1);
    close(null);
  }
  ~QuietStdout() {
    std::fflush(stdout);
    dup2(kept_, 1);
    close(kept_);
  }

 private:
  int kept_;
};

}  // namespace xpyd::testing
