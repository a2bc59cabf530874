// Contains is what Catch2 v3 calls ContainsSubstring. (Its own Contains is for ranges.)
#pragma once

#include "tests/catch.h"

#ifdef XPYD_CATCH_V3
namespace xpyd::testing {
inline auto Contains(const std::string& part) { return Catch::Matchers::ContainsSubstring(part); }
}  // namespace xpyd::testing
#else
namespace xpyd::testing {
using Catch::Matchers::Contains;
}
#endif
