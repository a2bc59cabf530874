// Runs Catch2. It closes with the ten slowest tests, those skipped and why, those failed and where, and one line, `N
// passed, N failed, N skipped`, with an exit code to match. Run it from the repository's root. For
// --require-device=NAME see tests/catch.h.

#define CATCH_CONFIG_RUNNER
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <sstream>
#include <vector>

#include "tests/catch.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// Tests ask for more memory than there is. The answer is null, as without the sanitizer.
extern "C" const char *__asan_default_options(), *__tsan_default_options();
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options() { return __asan_default_options(); }
#endif

namespace xpyd::testing {
namespace {

struct Summary {
  int passed = 0;
  std::string current, faults;                  // of the test that runs
  std::map<std::string, std::string> skipped;   // test -> why
  std::vector<std::string> failed;              // test, and its first faults
  std::chrono::steady_clock::time_point began;  // of the test that runs
  std::vector<std::pair<double, std::string>> seconds;
} summary;

std::map<std::string, DeviceFound (*)()>& devices() {
  static std::map<std::string, DeviceFound (*)()> registered;
  return registered;
}

// Takes --require-device=NAME out of the arguments, and returns NAME.
std::string take_required_device(int& argc, char** argv) {
  const char* from_environment = std::getenv("XPYD_REQUIRE_DEVICE");
  std::string required = from_environment ? from_environment : "";
  const std::string flag = "--require-device=";
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]).starts_with(flag))
      required = argv[i] + flag.size();
    else
      argv[kept++] = argv[i];
  }
  argv[argc = kept] = nullptr;
  return required;
}

std::string existing(const std::string& path) { return std::filesystem::exists(path) ? path : std::string(); }

void start_case(const std::string& name) {
  summary.current = name;
  summary.faults.clear();
  summary.began = std::chrono::steady_clock::now();
}

// Keeps the first faults of a test for the end, because its own report may be thousands of lines above.
void note_assertion(const Catch::AssertionStats& stats) {
  const Catch::AssertionResult& result = stats.assertionResult;
  if (result.isOk() || summary.faults.size() > 2000) return;
  std::ostringstream text;
  text << "\n  " << result.getSourceInfo() << ": " << result.getExpressionInMacro();
  if (result.hasExpandedExpression()) text << " [" << result.getExpandedExpression() << "]";
  if (result.hasMessage()) text << " " << result.getMessage();
  for (const Catch::MessageInfo& info : stats.infoMessages) text << "\n    " << info.message;
  summary.faults += text.str().substr(0, 1000);
}

void finish_case(const std::string& name, bool ok) {
  summary.seconds.emplace_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - summary.began).count(),
                               name);
  if (!ok) {
    summary.failed.push_back(name + summary.faults);
    summary.skipped.erase(name);
  } else if (!summary.skipped.count(name)) {
    ++summary.passed;
  }
}

#ifdef XPYD_CATCH_V3
struct Listener : Catch::EventListenerBase {
  using EventListenerBase::EventListenerBase;
  void testCaseStarting(const Catch::TestCaseInfo& info) override { start_case(info.name); }
  void assertionEnded(const Catch::AssertionStats& stats) override { note_assertion(stats); }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    finish_case(stats.testInfo->name, stats.totals.assertions.failed == 0);
  }
};
#else
struct Listener : Catch::TestEventListenerBase {
  using TestEventListenerBase::TestEventListenerBase;
  void testCaseStarting(const Catch::TestCaseInfo& info) override { start_case(info.name); }
  bool assertionEnded(const Catch::AssertionStats& stats) override {
    note_assertion(stats);
    return true;
  }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    finish_case(stats.testInfo.name, stats.totals.assertions.failed == 0);
  }
};
#endif
CATCH_REGISTER_LISTENER(Listener)

}  // namespace

void mark_skipped(const std::string& why) {
  std::string& all = summary.skipped[summary.current];
  if (all.find(why) == std::string::npos) all += (all.empty() ? "" : "; ") + why;
  SUCCEED("skipped: " << why);
}

DeviceOfTests::DeviceOfTests(const char* name, DeviceFound (*look)()) { devices()[name] = look; }

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
  using namespace xpyd::testing;
  const std::string required = take_required_device(argc, argv);
  if (!required.empty() && !devices().count(required)) {
    std::printf("device %s is required: this program has no tests on one\n", required.c_str());
    return 1;
  }
  // Files that servers keep for their clients (model/folder.h) go below build/, too.
  const TempDir cache;
  setenv("XDG_CACHE_HOME", std::filesystem::absolute(cache.path).c_str(), 1);
#ifdef __SANITIZE_ADDRESS__
  // For servers that a test ends: LeakSanitizer's tracer waits for ever for a thread that ends while it attaches to it.
  setenv("ASAN_OPTIONS", "detect_leaks=0", 0);
#endif
  Catch::Session session;
  int code = session.applyCommandLine(argc, argv);
  if (code != 0) return code;
  for (const auto& [name, look] : devices()) {
    const DeviceFound found = look();
    if (name == required && (!found.missing.empty() || !found.hardware)) {
      std::printf("device %s is required: %s\n", name.c_str(),
                  found.hardware ? found.missing.c_str() : "this program runs its kernels on an interpreter");
      return 1;
    }
    if (found.missing.empty()) continue;
    std::printf("skipped: every test (%s)\n", found.missing.c_str());
    std::printf("0 passed, 0 failed, %d skipped\n", int(Catch::getAllTestCasesSorted(session.config()).size()));
    return 0;
  }
  code = session.run();
  std::sort(summary.seconds.rbegin(), summary.seconds.rend());
  for (size_t i = 0; summary.seconds.size() > 10 && i < 10; ++i)
    std::printf("slow: %6.2f s %s\n", summary.seconds[i].first, summary.seconds[i].second.c_str());
  std::map<std::string, std::vector<std::string>> skipped_by_reason;
  for (auto& [name, why] : summary.skipped) skipped_by_reason[why].push_back(name);
  for (auto& [why, names] : skipped_by_reason) {
    std::printf("skipped: %s\n", why.c_str());
    for (const std::string& name : names) std::printf("  %s\n", name.c_str());
  }
  for (const std::string& failed : summary.failed) std::printf("failed: %s\n", failed.c_str());
  std::printf("%d passed, %d failed, %d skipped\n", summary.passed, int(summary.failed.size()),
              int(summary.skipped.size()));
  bool nothing_ran = summary.passed + int(summary.skipped.size()) == 0;
  return code != 0 || !summary.failed.empty() || nothing_ran ? 1 : 0;
}
