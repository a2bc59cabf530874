#include "base/peak/peak.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "base/cpu.h"
#include "base/memory.h"
#include "base/peak/peak_kernels.h"
#include "tests/catch.h"

#if defined(__x86_64__)
namespace xpyd {
extern const PeakKernels kAvx512Peak_emulated;
double bf16_dot_peak_emulated(long iterations, float* sink);
double int8_dot_peak_emulated(long iterations, float* sink);
}  // namespace xpyd
#endif

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

#if defined(__x86_64__)
// A timed loop does as many operations as it counts, and reads all that it is given.
TEST_CASE("peak: loops of every width do the work they count, emulated where the processor lacks the instructions",
          "[base][peak]") {
  if (!cpu_has(Isa::avx2)) SKIP_TEST("no AVX2 here");
  constexpr size_t kBytes = kPeakRows * kPeakRowBytes;
  Buffer from(kBytes), to(kBytes);
  for (size_t i = 0; i < kBytes / 4; ++i) from.as<uint32_t>()[i] = uint32_t(i * 2654435761u);
  auto sink = [](auto run) {
    float value = -1;
    run(&value);
    return value;
  };
  std::vector<PeakKernels> rows = {kAvx2Peak, kAvx512Peak_emulated};
  if (cpu_has(Isa::avx512)) rows.push_back(kAvx512Peak);
  float read = 0;
  for (const PeakKernels& row : rows) {
    const int lanes = row.needs == Isa::avx2 ? 8 : 16;
    // Chain i goes from i to 2: after one step the first lanes are (i + 2) / 2, and 12 of them add up to 45.
    CHECK(sink([&](float* to_sink) { CHECK(row.fma(1, to_sink) == 12 * lanes * 2); }) == 45);
    const float all = sink([&](float* to_sink) { row.read(from.data(), kBytes, to_sink); });
    if (&row == &rows[0]) read = all;
    CHECK(all == read);
    std::fill_n(to.data(), kBytes, std::byte(0));
    row.copy(to.data(), from.data(), kBytes);
    CHECK(std::memcmp(to.data(), from.data(), kBytes) == 0);
  }
  // Every byte changes the result.
  from.data()[kBytes - 1] ^= std::byte(0x80);
  for (const PeakKernels& row : rows)
    CHECK(sink([&](float* to_sink) { row.read(from.data(), kBytes, to_sink); }) != read);
  // 0 + 1 + ... + 11, to which 1 - 1 is added again and again.
  CHECK(sink([](float* to_sink) { CHECK(bf16_dot_peak_emulated(3, to_sink) == 3 * 12 * 16 * 4); }) == 66);
  CHECK(sink([](float* to_sink) { CHECK(int8_dot_peak_emulated(3, to_sink) == 3 * 12 * 16 * 8); }) == 66);
}
#endif

TEST_CASE("a damaged peak file is an error, not a peak", "[base][peak]") {
  for (const char* text : {"", "[]", "{}", "{\"machine\":\"x\"}",
                           R"({"machine":"m","isa":"avx2","wake_spin_us":0,"wake_parked_us":0,"one":{},"all":{}})",
                           R"({"machine":"m","isa":"avx2","wake_spin_us":0,"wake_parked_us":0,
            "one":{"n_threads":1,"fma_gflops":0,"read_gbps":1,"copy_gbps":1},
            "all":{"n_threads":1,"fma_gflops":1,"read_gbps":1,"copy_gbps":1}})"})
    REQUIRE_FALSE(peak_from_json(text).ok());
}

TEST_CASE("a kept peak is used on its own machine, and is replaced on another one", "[base][peak]") {
  testing::TempDir dir;
  const std::string folder = std::filesystem::absolute(dir.path).string();
  {
    ScopedVariable none("XDG_CACHE_HOME", ""), home("HOME", folder);
    CHECK(peak_cache_path() == folder + "/.cache/xpyd/peak.json");
    ScopedVariable nobody("HOME", "");
    CHECK(peak_cache_path() == "");  // never in the working directory
  }
  ScopedVariable cache("XDG_CACHE_HOME", folder);
  REQUIRE(peak_cache_path() == folder + "/xpyd/peak.json");
  ThreadTeam team(1);
  Peak others = example();
  others.machine = "another machine", others.all.n_threads = 1;
  std::filesystem::create_directories(folder + "/xpyd");
  std::ofstream(peak_cache_path()) << to_json(others);
  const Peak measured = cached_peak(team);
  REQUIRE(measured.machine != others.machine);
  REQUIRE(measured.one.fma_gflops > 0);
  REQUIRE(measured.one.fma_gflops != others.one.fma_gflops);
  // A file with one changed figure is returned with it, so nothing was measured again.
  Peak changed = measured;
  changed.one.copy_gbps = 123456;
  std::ofstream(peak_cache_path()) << to_json(changed);
  REQUIRE(cached_peak(team).one.copy_gbps == 123456);
}

}  // namespace xpyd::testing::peak_test
