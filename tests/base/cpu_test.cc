// The row of a table that a processor takes, how --cpu-kernels limits it, and the rows that copy.
#include "base/cpu.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/copy.h"
#include "base/random.h"
#include "tests/catch.h"

#if defined(__x86_64__)
namespace xpyd {
void copy_streaming_avx512_emulated(const Copy* copies, size_t n);
}
#endif

namespace xpyd::testing::cpu_test {

TEST_CASE("copy_streaming: every row copies all bytes and no other, at every alignment and length", "[base][copy]") {
  std::vector<CopyVariant> rows(copy_variants().begin(), copy_variants().end());
#if defined(__x86_64__)
  rows.push_back({"avx512, emulated", copy_streaming_avx512_emulated, Isa::avx2});
#endif
  std::vector<std::byte> src(1 << 13), before(1 << 13);
  Random random(2);
  for (std::byte& b : src) b = std::byte(random.next());
  for (std::byte& b : before) b = std::byte(random.next());
  for (size_t bytes : {0, 1, 31, 32, 33, 127, 128, 129, 255, 256, 1000, 4096})
    for (size_t to = 0; to < 70; to += 3)
      for (size_t from : {0, 1, 16, 33, 64}) {
        std::vector<std::byte> dst = before, expected = before;
        std::copy_n(src.begin() + ptrdiff_t(from), bytes, expected.begin() + ptrdiff_t(to));
        Copy copy{src.data() + from, dst.data() + to, bytes};
        for (const CopyVariant& row : rows) {
          if (!cpu_has(row.needs)) continue;
          dst = before;
          row.run(&copy, 1);
          if (dst != expected) FAIL(row.name << ": " << bytes << " bytes from " << from << " to " << to);
        }
      }
  std::vector<std::byte> dst = before, expected = before;
  std::vector<Copy> pieces;
  for (size_t i = 0; i < 20; ++i) {
    Copy piece{src.data() + (19 - i) * 350, dst.data() + i * 300, 17 * i};
    std::copy_n(piece.source, piece.bytes, expected.begin() + ptrdiff_t(i * 300));
    pieces.push_back(piece);
  }
  for (const CopyVariant& row : rows) {
    if (!cpu_has(row.needs)) continue;
    INFO(row.name);
    dst = before;
    row.run(pieces.data(), pieces.size());
    CHECK(dst == expected);
  }
  dst = before;
  copy_streaming(pieces);
  CHECK(dst == expected);
}

TEST_CASE("cpu: the row taken needs most of those that run here within the limit, and is the first of equals",
          "[base][cpu]") {
  constexpr IsaRow kRows[] = {
      {"a", Isa::portable}, {"b", Isa::portable}, {"c", Isa::avx512_bf16}, {"d", Isa::avx2}, {"e", Isa::avx2}};
  const bool avx2 = !*cpu_lacks(Isa::avx2), bf16 = !*cpu_lacks(Isa::avx512_bf16);
  CHECK(cpu_has(Isa::portable));
  CHECK(best_row(kRows).name == std::string(bf16 ? "c" : avx2 ? "d" : "a"));
  limit_isa(Isa::avx512_vnni);
  CHECK_FALSE(cpu_has(Isa::avx512_bf16));
  CHECK(best_row(kRows).name == std::string(avx2 ? "d" : "a"));
  limit_isa(Isa::portable);
  CHECK(best_row(kRows).name == std::string("a"));
  CHECK_FALSE(cpu_has(Isa::avx2));
  limit_isa(Isa::avx512_bf16);
  CHECK(cpu_has(Isa::avx2) == avx2);
}

}  // namespace xpyd::testing::cpu_test
