// Tests when children are started, restarted and killed: the policy alone, on a clock of the test.
#include <algorithm>
#include <vector>

#include "server/workers/local_workers.h"
#include "tests/catch.h"

namespace xpyd::testing::supervisor_test {
namespace {

constexpr double kTurn = 0.05;  // seconds between two looks

// One child that ends `lives_s` after each start (0: never) and serves `joins_s` after it.
struct OneChild {
  Supervisor supervisor;
  double now = 1000, started_s = -1, lives_s = 0, joins_s = 0;
  bool joins = true, retired = false;
  Presence seen = Presence::absent;
  std::vector<double> starts = {}, kills = {};

  void run(double seconds) {
    for (const double end = now + seconds; now < end; now += kTurn) turn();
  }
  void turn() {
    if (started_s >= 0 && lives_s > 0 && now >= started_s + lives_s) end();
    if (started_s >= 0 && joins && now >= started_s + joins_s) seen = Presence::serving;
    const Supervisor::Orders orders = supervisor.look({&seen, 1}, now);
    for (size_t child : orders.kill) {
      REQUIRE(child == 0);
      kills.push_back(now);
      end();
    }
    for (size_t child : orders.start) {
      REQUIRE(child == 0);
      starts.push_back(now);
      supervisor.started(0, now);
      started_s = now;
    }
  }
  void end() {
    supervisor.ended(0, retired, now);
    started_s = -1;
    seen = Presence::absent;
  }
};

TEST_CASE("supervisor: a child that cannot start is tried 9 times in 30 s and not 532 times", "[server][supervisor]") {
  OneChild child{.supervisor = Supervisor({}, 1), .lives_s = 0.01, .joins = false};
  child.run(30);
  CHECK(child.starts.size() == 9);  // waits double from 0.1 to 6.4 s, 12.7 s in all, then 10 s
  child.run(970);
  CHECK(child.starts.size() >= 9 + 94);  // and every 10 s for ever
  CHECK(child.starts.size() <= 9 + 97);
  double longest = 0;
  for (size_t i = 1; i < child.starts.size(); ++i) longest = std::max(longest, child.starts[i] - child.starts[i - 1]);
  CHECK(longest < 10 + 3 * kTurn);
}

TEST_CASE("supervisor: the restart wait begins anew only after a child has served for long", "[server][supervisor]") {
  OneChild steady{.supervisor = Supervisor({}, 1), .lives_s = 11};
  steady.run(200);
  for (size_t i = 1; i < steady.starts.size(); ++i) CHECK(steady.starts[i] - steady.starts[i - 1] < 11.3);
  OneChild moment{.supervisor = Supervisor({}, 1), .lives_s = 0.5};
  moment.run(200);
  CHECK(moment.starts.size() < 26);
  CHECK(moment.starts.size() > 20);
}

TEST_CASE("supervisor: a silent child is killed after its bound and started again", "[server][supervisor]") {
  OneChild child{.supervisor = Supervisor({.silence_s = 12}, 1), .joins_s = 1};
  child.run(30);
  REQUIRE(child.starts.size() == 1);
  child.joins = false;
  child.seen = Presence::absent;  // stopped: its channel is closed
  const double silent = child.now;
  child.run(11.9);
  CHECK(child.kills.empty());
  child.run(1);
  REQUIRE(child.kills.size() == 1);
  CHECK(child.kills[0] - silent > 12);
  CHECK(child.kills[0] - silent < 12 + 3 * kTurn);
  CHECK(child.starts.size() == 2);
}

TEST_CASE("supervisor: a child that is stopped before it has a channel counts as silent", "[server][supervisor]") {
  OneChild child{.supervisor = Supervisor({.silence_s = 12, .start_s = 600}, 1), .joins = false};
  child.run(30);  // it loads
  child.seen = Presence::stopped;
  child.run(11);
  child.seen = Presence::absent;  // and goes on
  child.run(30);
  CHECK(child.kills.empty());
  child.seen = Presence::stopped;
  const double stopped = child.now;
  child.run(13);
  REQUIRE(child.kills.size() == 1);
  CHECK(child.kills[0] - stopped > 12);
  CHECK(child.starts.size() == 2);
}

TEST_CASE("supervisor: loading a model does not count as silence, but has its own bound", "[server][supervisor]") {
  OneChild slow{.supervisor = Supervisor({.silence_s = 12, .start_s = 120}, 1), .joins_s = 110};
  slow.run(300);
  CHECK(slow.starts.size() == 1);
  CHECK(slow.kills.empty());
  OneChild never{.supervisor = Supervisor({.start_s = 120}, 1), .joins = false};
  never.run(119);
  CHECK(never.kills.empty());
  never.run(2);
  CHECK(never.kills.size() == 1);
  OneChild again{.supervisor = Supervisor({.silence_s = 12, .start_s = 120}, 1)};  // it allocates its memory anew
  again.run(5);
  again.joins = false;
  again.seen = Presence::connected;
  again.run(60);
  CHECK(again.kills.empty());
  again.run(70);
  CHECK(again.kills.size() == 1);
}

TEST_CASE("supervisor: its own sleep does not count as a child's silence", "[server][supervisor]") {
  OneChild child{.supervisor = Supervisor({.silence_s = 12}, 1)};
  child.run(5);
  child.joins = false;
  child.seen = Presence::absent;
  child.run(2);
  child.now += 3600;  // this process was stopped; the child reconnects within 3 s
  child.run(3);
  CHECK(child.kills.empty());
  child.joins = true;
  child.run(30);
  CHECK(child.kills.empty());
  CHECK(child.starts.size() == 1);
}

TEST_CASE("supervisor: a retired child, and any child without restarts, is not started again", "[server][supervisor]") {
  OneChild retired{.supervisor = Supervisor({}, 1), .lives_s = 3, .retired = true};
  retired.run(100);
  CHECK(retired.starts.size() == 1);
  OneChild off{.supervisor = Supervisor({.restart = false}, 1), .lives_s = 3};
  off.run(100);
  CHECK(off.starts.size() == 1);
}

}  // namespace
}  // namespace xpyd::testing::supervisor_test
