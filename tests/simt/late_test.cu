// The spine once more, with streams whose work is done only when somebody waits for it: a wait that
// is missing between an engine, its memory and its wire is wrong data here.
#include "base/cuda.h"
#include "tests/catch.h"
#include "tests/end_to_end/cuda_parity.h"

namespace xpyd::testing::late_test {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kStride = 97;
#else
constexpr int kStride = 13;
#endif

struct Late {
  Late() { cuda::simt::set_late_streams(true); }
  ~Late() { cuda::simt::set_late_streams(false); }
};

TEST_CASE("cuda parity holds when streams do their work late", "[simt][parity]") {
  Late late;
  check_cuda_parity(kStride);
}

}  // namespace
}  // namespace xpyd::testing::late_test
