#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "experiments/bench/harness.h"
#include "tests/catch.h"
#include "tests/json.h"

namespace xpyd::testing::bench_test {
namespace {

BenchCase sleeper(const char* name, int us, std::vector<std::string> versus = {}, double target = 0) {
  return {.name = name,
          .n_threads = 1,
          .run =
              [us] {
                if (us > 0) usleep(useconds_t(us));
              },
          .check = [] { return std::string(); },
          .work = {.bytes = 1, .flops = 1},
          .limit = Limit::none,
          .target = target,
          .versus = std::move(versus)};
}

void group_for_test(Bench& bench) { bench.measure({sleeper("a case", 100)}); }
REGISTER_BENCH("bench_test", group_for_test);

BenchOptions quick() {
  BenchOptions options;
  options.rounds = 3;
  options.n_threads = 1;
  options.sample_ms = 0.001;
  return options;
}

}  // namespace

TEST_CASE("a wrong result is not timed and fails the bench", "[base][bench]") {
  Bench bench(quick());
  int runs = 0;
  BenchCase wrong = sleeper("wrong", 1);
  wrong.check = [] { return std::string("off by one"); };
  wrong.run = [&] { ++runs; };
  BenchCase unchecked = wrong;
  unchecked.check = nullptr;
  bench.measure({wrong, unchecked});
  REQUIRE(runs == 0);
  REQUIRE(bench.rows().empty());
  REQUIRE(bench.exit_code() == 1);
}

TEST_CASE("a round in which other processes had the cpus is set aside, and is repeated as often as it was wanted",
          "[base][bench]") {
  const pid_t other = fork();
  REQUIRE(other >= 0);
  if (other == 0)
    for (;;) asm volatile("");
  BenchOptions options = quick();
  options.rounds = 1;
  int runs = 0;
  const auto measured = [&] {
    Bench bench(options);
    BenchCase counted = sleeper("counted", 0);
    counted.run = [&] { usleep(150000), ++runs; };
    bench.measure({counted});
    return bench.rows();
  };
  const std::vector<BenchRow> all = measured();
  options.max_taken = 0.25 / double(sysconf(_SC_NPROCESSORS_ONLN));  // of all cpus; the other process has one of them
  runs = 0;
  const std::vector<BenchRow> none = measured();
  kill(other, SIGKILL);
  waitpid(other, nullptr, 0);
  REQUIRE(all.size() == 1);
  CHECK(all[0].taken > options.max_taken);
  CHECK(all[0].set_aside == 0);
  CHECK(none.empty());
  CHECK(runs == 1 + 2);  // a warm-up, the round, and once again
}

}  // namespace xpyd::testing::bench_test
