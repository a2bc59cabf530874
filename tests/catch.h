// The one way into Catch2 (v2 on Debian 12, v3 on Debian 13), with counted skips and shared fixtures.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#define XPYD_CATCH_V3 1
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

#include <string>

#include "base/rooms.h"

namespace xpyd::testing {

// Counts the running test as skipped in the closing line, and prints the reason.
void mark_skipped(const std::string& why);

// Path of a file or folder of ../shared, or "" if it is absent (then use SKIP_TEST).
std::string shared_path(const std::string& relative);

// Path of a fixture in tests/data.
std::string data_path(const std::string& relative);

// A device that this program's tests run on, registered by a static object. If it is missing, no test runs, and all
// count as skipped. With --require-device=NAME or XPYD_REQUIRE_DEVICE=NAME that is a failure, and so is a stand-in for
// the hardware.
struct DeviceFound {
  std::string missing;  // why it is missing, or ""
  bool hardware = true;
};
struct DeviceOfTests {
  DeviceOfTests(const char* name, DeviceFound (*look)());
};

// A fresh folder under build/, removed with the object.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  std::string path;
};

}  // namespace xpyd::testing

#define SKIP_TEST(why)                  \
  do {                                  \
    ::xpyd::testing::mark_skipped(why); \
    return;                             \
  } while (0)
