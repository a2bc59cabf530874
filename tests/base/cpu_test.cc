// Which row of a table a processor takes, and what --cpu-kernels makes of that.
#include "base/cpu.h"

#include <string>

#include "tests/catch.h"

namespace xpyd::testing::cpu_test {

TEST_CASE("cpu: the row that needs most of those that run here, the first of several, none above the limit",
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

TEST_CASE("cpu: what is lacking of a set is lacking of those that include it", "[base][cpu]") {
  std::string lacks;
  for (const IsaRow& row : kIsas) {
    if (!lacks.empty()) CHECK(cpu_lacks(row.needs) == lacks);
    lacks = cpu_lacks(row.needs);
  }
}

}  // namespace xpyd::testing::cpu_test
