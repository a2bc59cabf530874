#include "base/thread_team.h"

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/catch.h"

namespace xpyd::testing::thread_team_test {

TEST_CASE("run() calls the body once for each rank and waits for all", "[base][thread_team]") {
  for (int n : {1, 2, 3, 8}) {
    ThreadTeam team(n);
    REQUIRE(team.size() == n);
    std::vector<int> calls(static_cast<size_t>(n),
                           0);  // plain ints: run() itself must order the accesses
    for (int round = 0; round < 500; ++round) {
      team.run([&](int rank) { ++calls[size_t(rank)]; });
      for (int c : calls) REQUIRE(c == round + 1);
    }
  }
}

TEST_CASE("barrier() separates phases, also with more threads than cores", "[base][thread_team]") {
  for (int n : {1, 2, 3, 8}) {
    ThreadTeam team(n);
    std::vector<int> phase(static_cast<size_t>(n), 0);
    std::atomic<int> wrong{0};
    team.run([&](int rank) {
      for (int step = 1; step <= 100; ++step) {
        phase[size_t(rank)] = step;
        team.barrier();
        for (int p : phase)
          if (p != step) ++wrong;
        team.barrier();
      }
    });
    REQUIRE(wrong == 0);
  }
}

TEST_CASE("parked members wake up, and so does an owner that has waited long", "[base][thread_team]") {
  ThreadTeam team(3);
  int sum = 0;
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the members park
    std::vector<int> seen(3, 0);
    team.run([&](int rank) {
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the owner parks
      seen[size_t(rank)] = 1;
    });
    sum += std::accumulate(seen.begin(), seen.end(), 0);
  }
  REQUIRE(sum == 60);
}

TEST_CASE("share() cuts n into ranges that cover it once, in multiples of the grain", "[base][thread_team]") {
  for (int n : {0, 1, 5, 16, 100})
    for (int size : {1, 2, 3, 7})
      for (int grain : {1, 4, 8}) {
        int next = 0;
        for (int rank = 0; rank < size; ++rank) {
          Range r = share(n, rank, size, grain);
          REQUIRE(r.begin == next);
          REQUIRE(r.end >= r.begin);
          REQUIRE((r.begin % grain == 0 || r.begin == n));
          next = r.end;
        }
        REQUIRE(next == n);
      }
}

}  // namespace xpyd::testing::thread_team_test
