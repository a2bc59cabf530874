// tools/check, over stages of its own: what fails is not lost, what is left out is named.
#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "tests/catch.h"

namespace xpyd::testing::check_stages_test {
namespace {

struct Outcome {
  int code = -1;
  std::string output;
  bool says(const std::string& part) const { return output.find(part) != output.npos; }
  std::string last_line() const {
    const size_t end = output.find_last_not_of('\n'), begin = output.rfind('\n', end);
    return output.substr(begin + 1, end - begin);
  }
};

// A row of a table is `name | minutes | needs | command`.
Outcome check(const TempDir& dir, const std::string& table, const std::string& arguments) {
  const std::string stages = dir.path + "/stages";
  {
    std::ofstream file(stages);
    std::istringstream rows(table);
    for (std::string name, minutes, needs, command; std::getline(rows, name, '|') && std::getline(rows, minutes, '|') &&
                                                    std::getline(rows, needs, '|') && std::getline(rows, command);)
      file << "check-" << name.substr(0, name.find(' ')) << ": ##" << minutes << "|" << needs << "| a stage\n\t@" << command << "\n";
  }
  const std::string command = "CHECK_STAGES=" + stages + " CHECK_MAKE='make -f " + stages + "' CHECK_LOGS=" + dir.path +
                              "/logs tools/check " + arguments + " 2>&1";
  Outcome outcome;
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe);
  char part[4096];
  for (size_t n; (n = fread(part, 1, sizeof part, pipe)) > 0;) outcome.output.append(part, n);
  outcome.code = WEXITSTATUS(pclose(pipe));
  return outcome;
}

TEST_CASE("make check: counts tests of stages, and fails when one of them fails", "[issues][check]") {
  TempDir dir;
  const std::string good =
      "suite | 1 | - | echo 5 passed, 0 failed, 2 skipped\n"
      "plain | 1 | - | true | cat\n";
  Outcome all = check(dir, good, "");
  CHECK(all.code == 0);
  CHECK(all.last_line() == "6 passed, 0 failed, 2 skipped");
  Outcome one = check(dir, good, "plain");
  CHECK(one.code == 0);
  CHECK(one.last_line() == "1 passed, 0 failed, 0 skipped");
  CHECK(check(dir, good, "nowhere").code == 2);

  // By its exit code alone, by its own count alone (an exit code that a pipe has lost), by neither's middle.
  Outcome code = check(dir, "a | 1 | - | echo the reason; exit 3\n" + good, "");
  CHECK(code.code == 1);
  CHECK(code.says("the reason"));
  CHECK(code.says("a FAILED with exit code 2"));
  CHECK(code.last_line() == "6 passed, 1 failed, 2 skipped");
  Outcome words = check(dir, "a | 1 | - | echo 3 passed, 2 failed, 1 skipped; echo 'make: *** Error 1'; exit 2\n", "");
  CHECK(words.code == 1);
  CHECK(words.last_line() == "3 passed, 2 failed, 1 skipped");
  Outcome twice = check(dir, "a | 1 | - | for i in 1 2; do echo 3 passed, 0 failed, 1 skipped; done; echo bye\n", "");
  CHECK(twice.code == 0);
  CHECK(twice.last_line() == "6 passed, 0 failed, 2 skipped");
  Outcome count = check(dir, "a | 1 | - | echo 3 passed, 2 failed, 0 skipped\n", "");
  CHECK(count.code == 1);
  CHECK(count.last_line() == "3 passed, 2 failed, 0 skipped");
}

TEST_CASE("make check: a stage that cannot end in time, or at all here, is left out by name", "[issues][check]") {
  TempDir dir;
  // The test row says one minute and takes a second: the machine counts as twice as quick, not more.
  const std::string table =
      "test   | 1 | -     | echo 1 passed, 0 failed, 0 skipped\n"
      "long   | 6 | -     | echo must not run; false\n"
      "absent | 1 | false | echo must not run; false\n"
      "short  | 3 | -     | echo 2 passed, 0 failed, 0 skipped\n";
  Outcome bounded = check(dir, table, "--test --minutes 2");
  CHECK(bounded.code == 0);
  CHECK_FALSE(bounded.says("must not run"));
  CHECK(bounded.says("left out: long: expected to take 3.0 min, and 0.0 of 2 are gone"));
  CHECK(bounded.says("left out: absent: it needs: false"));
  CHECK(bounded.last_line() == "3 passed, 0 failed, 2 skipped");
  Outcome named = check(dir, table, "--minutes 9 short");
  CHECK(named.code == 0);
  CHECK(named.says("left out: long: not asked for"));
  CHECK(named.last_line() == "2 passed, 0 failed, 2 skipped");
  // Without a bound everything that can run is run, and `make test` is not part of it.
  Outcome free = check(dir, table, "");
  CHECK(free.code == 1);
  CHECK(free.says("must not run"));
  CHECK(free.last_line() == "2 passed, 1 failed, 1 skipped");
  // Where the tests fail, that is all.
  Outcome failing = check(dir, "test | 1 | - | false\n" + table.substr(table.find('\n') + 1), "--test");
  CHECK(failing.code == 1);
  CHECK(failing.last_line() == "0 passed, 1 failed, 0 skipped");
}

}  // namespace
}  // namespace xpyd::testing::check_stages_test
