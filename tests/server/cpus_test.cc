// Tests the syntax of --cpus, and that instances run on the cores that it names.
#include "base/thread_team.h"
#include "server/build.h"
#include "tests/matchers.h"
#include "tests/program.h"

namespace xpyd::testing::cpus_test {
namespace {

using Cpus = std::vector<std::vector<int>>;

// Counts the threads of a process by their list of allowed cores, as the kernel writes it: "0", "0-1".
std::map<std::string, int> allowed_of_threads(const std::string& process) {
  std::map<std::string, int> lists;
  std::error_code gone;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/" + process + "/task", gone)) {
    std::ifstream status(thread.path() / "status");
    for (std::string line; std::getline(status, line);)
      if (constexpr std::string_view kField = "Cpus_allowed_list:\t"; line.starts_with(kField))
        ++lists[line.substr(kField.size())];
  }
  return lists;
}

std::unique_ptr<Build> stack_of(const Words& words) {
  return make_build(Options::parse(option_table(), "serve", words, 0).value()).value();
}

}  // namespace

TEST_CASE("cpus: --cpus gives each named instance its cores", "[cpus]") {
  const std::vector<int> here = usable_cpus();
  const std::string first = std::to_string(here[0]);
  CHECK(parse_cpus("", {"P0"}).value().empty());
  CHECK(parse_cpus("D0=" + first + " P0=" + first, {"P0", "D0"}).value() == Cpus{{here[0]}, {here[0]}});
  CHECK(parse_cpus("P0=" + first + ",D0=" + first, {"P0", "D0"}).value() == Cpus{{here[0]}, {here[0]}});
  CHECK(parse_cpus(first, {}).value() == Cpus{{here[0]}});
  if (here.size() > 1 && here[1] == here[0] + 1) {
    const std::string second = std::to_string(here[1]);
    CHECK(parse_cpus("C0=" + first + "-" + second, {"C0"}).value() == Cpus{{here[0], here[1]}});
    CHECK(parse_cpus("C0=" + second + "+" + first, {"C0"}).value() == Cpus{{here[1], here[0]}});
  }
  struct Case {
    std::string text;
    std::vector<std::string> names;
    const char* said;
  };
  for (const Case& c :
       {Case{"P0=" + first, {"P0", "D0"}, "it gives no cores to D0"}, Case{"X0=" + first, {"P0"}, "`X0="},
        Case{first, {"P0"}, "names no instance: expected P0=CORES"},
        Case{"P0=100000", {"P0"}, "`100000` is not a core that this process may use"},
        Case{"P0=x", {"P0"}, "`x` is not a core"}, Case{"P0=" + first + "+" + first, {"P0"}, " twice"},
        Case{"P0=", {"P0"}, "it gives no cores to P0"}, Case{"P0=" + first, {}, "is not a core"}}) {
    const auto parsed = parse_cpus(c.text, c.names);
    INFO(c.text);
    REQUIRE_FALSE(parsed.ok());
    CHECK(parsed.error().code == ErrorCode::invalid_argument);
    CHECK_THAT(parsed.error().message, Contains("--cpus " + c.text + ": ") && Contains(c.said));
  }
}

TEST_CASE("cpus: instances of one process compute on their own cores, and other threads are not pinned", "[cpus]") {
  const std::vector<int> here = usable_cpus();
  if (here.size() < 2) SKIP_TEST("one cpu only");
  const std::string p = std::to_string(here[0]), d = std::to_string(here[1]);
  const auto before = allowed_of_threads("self");
  const auto build = stack_of({"--topology", "1P1D", "--kv-bytes", "4MiB", "--cpus", "P0=" + p + ",D0=" + d});
  REQUIRE(build->runtime->start().ok());
  std::map<std::string, int> now;
  until(60, [&] {
    now = allowed_of_threads("self");
    return now[p] > 0 && now[d] > 0;
  });
  CHECK(now[p] >= 1);
  CHECK(now[d] >= 1);
  CHECK(usable_cpus() == here);  // the thread that built the instances is not pinned
  build->runtime->stop();
  const auto two_threads = Options::parse(option_table(), "serve", {"--cpus", "P0=" + p + ",D0=" + d, "--threads", "2"},
                                          0);
  const auto refused = prepare_build(two_threads.value());
  REQUIRE_FALSE(refused.ok());
  CHECK_THAT(refused.error().message, Contains("sets the number of threads too"));
}

TEST_CASE("cpus: all compute threads of a worker process run on the worker's cores", "[cpus][processes]") {
  NEEDS_PROGRAM();
  const std::string last = std::to_string(usable_cpus().back());
  Program server(
      {"serve", "--topology", "1C", "--processes", "--kv-bytes", "4MiB", "--port", "0", "--cpus", "C0=" + last});
  REQUIRE(server.port() != 0);
  // The worker is the server's child. It runs on one core once it has begun to compute.
  std::map<std::string, int> lists;
  until(60, [&] {
    lists.clear();
    for (pid_t worker : server.children())
      for (auto& [list, n] : allowed_of_threads(std::to_string(worker))) lists[list] += n;
    return lists[last] >= 3;
  });
  CHECK(lists[last] >= 3);
  lists.erase(last);
  int others = 0;
  for (const auto& [list, n] : lists) others += n;
#ifdef __SANITIZE_THREAD__
  CHECK(others <= 2);  // ThreadSanitizer adds a thread of its own
#else
  CHECK(others <= 1);  // the thread that waits for signals
#endif
  CHECK(server.end(SIGTERM) == 0);
}

}  // namespace xpyd::testing::cpus_test
