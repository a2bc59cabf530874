// Nothing grows: resident memory and blocks after many requests are as after the first ones.

#include <unistd.h>

#include <fstream>

#include "experiments/tally.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::soak_test {

long resident_bytes() {
  long total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST_CASE("memory and blocks do not grow over 2,000 requests", "[.][slow][soak]") {
  for (const char* transport : {"local", "handoff"}) {
    TinySetup setup{.topology = "1P1D", .transport = transport};
    setup.pool_bytes = 256 * 256;
    TinyCluster tiny(setup);
    auto sink = std::make_shared<experiments::Tally>();
    long before = 0;
    for (int i = 0; i < 2000; ++i) {
      std::vector<int32_t> prompt;
      for (int t = 0; t < 10 + i % 90; ++t) prompt.push_back((t * (i % 13 + 1) + i) % 96);
      auto request = tiny_request(uint64_t(i), prompt, 1 + i % 7);
      request->n = 1 + i % 3;
      REQUIRE(tiny.cluster->submit(request, sink).ok());
      if (i % 7 == 3) tiny.cluster->turn();
      if (i % 7 == 4) tiny.cluster->abort(uint64_t(i - 1));
      if (i % 7 == 6) tiny.run();
      if (i == 499) {
        tiny.run();
        before = resident_bytes();
      }
    }
    tiny.run();
    long growth = resident_bytes() - before;
    INFO(transport << ": grew by " << growth << " bytes over the last 1,500 requests");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // sanitizers keep freed memory
    CHECK(growth < 256 * 1024);
#endif
    for (const auto& instance : tiny.cluster->instances()) {
      KvStats kv = instance->memory().stats();
      CHECK(kv.free + kv.cached == kv.capacity);
      instance->memory().check_invariants(!tiny.cluster->stats().shared_pool);
    }
    CHECK(sink->ended == 2000 * 2 - 1);  // n = 1, 2, 3, 1, 2, 3, …
  }
}

}  // namespace xpyd::testing::soak_test
