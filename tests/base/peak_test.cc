#include "base/peak.h"

#include <cstdlib>
#include <fstream>

#include "base/cpu.h"
#include "tests/catch.h"

namespace xpyd::testing::peak_test {
namespace {

Peak example() {
  return {.machine = "a \"quoted\" machine",
          .isa = "avx2",
          .one = {1, 100.5, 25.25, 17.5},
          .all = {4, 400.5, 50.25, 20.5},
          .wake_spin_us = 0.125,
          .wake_parked_us = 30.5};
}

// Restores the variable when the test ends.
struct ScopedVariable {
  ScopedVariable(const char* name_, const std::string& value) : name(name_) {
    const char* old = std::getenv(name);
    had = old != nullptr;
    if (old) before = old;
    setenv(name, value.c_str(), 1);
  }
  ~ScopedVariable() { had ? setenv(name, before.c_str(), 1) : unsetenv(name); }
  const char* name;
  bool had;
  std::string before;
};

}  // namespace

TEST_CASE("the measured peak is positive on one thread and on all", "[base][peak]") {
  ThreadTeam team(2);
  PeakProbe probe(size_t(16) << 20);
  REQUIRE(probe.fma_gflops(team) > 0);
  REQUIRE(probe.read_gbps(team) > 0);
  REQUIRE(probe.copy_gbps(team) > 0);
  REQUIRE(std::string(PeakProbe::isa()) == (cpu_has(Isa::avx2) ? "avx2" : "portable"));
}

TEST_CASE("a peak survives JSON, and its text names every figure", "[base][peak]") {
  Peak peak = example();
  auto back = peak_from_json(to_json(peak));
  REQUIRE(back.ok());
  REQUIRE(back.value().machine == peak.machine);
  REQUIRE(back.value().isa == "avx2");
  REQUIRE(back.value().one.fma_gflops == 100.5);
  REQUIRE(back.value().all.n_threads == 4);
  REQUIRE(back.value().all.read_gbps == 50.25);
  REQUIRE(back.value().all.copy_gbps == 20.5);
  REQUIRE(back.value().wake_spin_us == 0.125);
  REQUIRE(back.value().wake_parked_us == 30.5);
  std::string text = to_text(peak);
  for (const char* figure : {"100.5", "400.5", "50.2", "20.5", "0.12", "30.5"})
    REQUIRE(text.find(figure) != std::string::npos);
}

TEST_CASE("a damaged peak file is an error, not a peak", "[base][peak]") {
  for (const char* text : {"", "[]", "{}", "{\"machine\":\"x\"}",
                           R"({"machine":"m","isa":"avx2","wake_spin_us":0,"wake_parked_us":0,"one":{},"all":{}})",
                           R"({"machine":"m","isa":"avx2","wake_spin_us":0,"wake_parked_us":0,
            "one":{"n_threads":1,"fma_gflops":0,"read_gbps":1,"copy_gbps":1},
            "all":{"n_threads":1,"fma_gflops":1,"read_gbps":1,"copy_gbps":1}})"})
    REQUIRE_FALSE(peak_from_json(text).ok());
}

TEST_CASE("the kept peak is used on this machine and replaced when it is another's", "[base][peak]") {
  testing::TempDir dir;
  ScopedVariable cache("XDG_CACHE_HOME", dir.path);
  REQUIRE(peak_cache_path() == dir.path + "/xpyd/peak.json");
  ThreadTeam team(1);
  Peak measured = cached_peak(team);
  REQUIRE(measured.one.fma_gflops > 0);
  // A file changed in one figure comes back with it: nothing was measured again.
  Peak changed = measured;
  changed.one.copy_gbps = 123456;
  std::ofstream(peak_cache_path()) << to_json(changed);
  REQUIRE(cached_peak(team).one.copy_gbps == 123456);
  changed.machine = "another machine";
  std::ofstream(peak_cache_path()) << to_json(changed);
  REQUIRE(cached_peak(team).one.copy_gbps != 123456);
}

}  // namespace xpyd::testing::peak_test
