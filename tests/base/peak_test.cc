#include "base/peak/peak.h"

#include <algorithm>
#include <cstring>
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

}  // namespace xpyd::testing::peak_test
