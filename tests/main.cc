// Runs Catch2 and closes with one line, `N passed, N failed, N skipped`, and an exit code to match.
// Run from the repository's root.

#define CATCH_CONFIG_RUNNER
#include "tests/catch.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <map>

namespace xpyd::testing {
namespace {

struct Summary {
  int passed = 0, failed = 0;
  std::string current;
  std::map<std::string, std::string> skipped;  // test -> why
} summary;

std::string existing(const std::string& path) {
  return std::filesystem::exists(path) ? path : std::string();
}

void finish_case(const std::string& name, bool ok) {
  if (!ok) {
    ++summary.failed;
    summary.skipped.erase(name);
  } else if (!summary.skipped.count(name)) {
    ++summary.passed;
  }
}

#ifdef XPYD_CATCH_V3
struct Listener : Catch::EventListenerBase {
  using EventListenerBase::EventListenerBase;
  void testCaseStarting(const Catch::TestCaseInfo& info) override { summary.current = info.name; }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    finish_case(stats.testInfo->name, stats.totals.assertions.failed == 0);
  }
};
#else
struct Listener : Catch::TestEventListenerBase {
  using TestEventListenerBase::TestEventListenerBase;
  void testCaseStarting(const Catch::TestCaseInfo& info) override { summary.current = info.name; }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    finish_case(stats.testInfo.name, stats.totals.assertions.failed == 0);
  }
};
#endif
CATCH_REGISTER_LISTENER(Listener)

}  // namespace

void mark_skipped(const std::string& why) {
  summary.skipped[summary.current] = why;
  SUCCEED("skipped: " << why);
}

std::string shared_path(const std::string& relative) { return existing("../shared/" + relative); }
std::string data_path(const std::string& relative) { return "tests/data/" + relative; }

TempDir::TempDir() {
  static int counter = 0;
  path = "build/tmp/" + std::to_string(getpid()) + "-" + std::to_string(counter++);
  std::filesystem::create_directories(path);
}
TempDir::~TempDir() { std::filesystem::remove_all(path); }

}  // namespace xpyd::testing

int main(int argc, char** argv) {
  using xpyd::testing::summary;
  Catch::Session session;
  int code = session.applyCommandLine(argc, argv);
  if (code != 0) return code;
  code = session.run();
  for (auto& [name, why] : summary.skipped)
    std::printf("skipped: %s (%s)\n", name.c_str(), why.c_str());
  std::printf("%d passed, %d failed, %d skipped\n", summary.passed, summary.failed,
              int(summary.skipped.size()));
  bool nothing_ran = summary.passed + int(summary.skipped.size()) == 0;
  return code != 0 || summary.failed > 0 || nothing_ran ? 1 : 0;
}
