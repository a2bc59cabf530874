// Runs Catch2 and closes with one line, `N passed, N failed, N skipped`, and an exit code to match.
// Run from the repository's root. --require-device=NAME: see tests/catch.h.

#define CATCH_CONFIG_RUNNER
#include "tests/catch.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>

#if defined(__SANITIZE_ADDRESS__)
// Tests ask for more memory than there is: null, as without the sanitizer.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
#endif

namespace xpyd::testing {
namespace {

struct Summary {
  int passed = 0, failed = 0;
  std::string current;
  std::map<std::string, std::string> skipped;  // test -> why
} summary;

std::map<std::string, DeviceFound (*)()>& devices() {
  static std::map<std::string, DeviceFound (*)()> registered;
  return registered;
}

// Takes --require-device=NAME out of the arguments.
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
  Catch::Session session;
  int code = session.applyCommandLine(argc, argv);
  if (code != 0) return code;
  for (const auto& [name, look] : devices()) {
    const DeviceFound found = look();
    if (name == required && (!found.missing.empty() || !found.hardware)) {
      std::printf("device %s is required: %s\n", name.c_str(),
                  found.hardware ? found.missing.c_str()
                                 : "this program runs its kernels on an interpreter");
      return 1;
    }
    if (found.missing.empty()) continue;
    std::printf("skipped: every test (%s)\n", found.missing.c_str());
    std::printf("0 passed, 0 failed, %d skipped\n",
                int(Catch::getAllTestCasesSorted(session.config()).size()));
    return 0;
  }
  code = session.run();
  for (auto& [name, why] : summary.skipped)
    std::printf("skipped: %s (%s)\n", name.c_str(), why.c_str());
  std::printf("%d passed, %d failed, %d skipped\n", summary.passed, summary.failed,
              int(summary.skipped.size()));
  bool nothing_ran = summary.passed + int(summary.skipped.size()) == 0;
  return code != 0 || summary.failed > 0 || nothing_ran ? 1 : 0;
}
