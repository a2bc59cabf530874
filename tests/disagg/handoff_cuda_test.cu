// The pool that a card exports, on the interpreter and on a card. One member writes through its mapping, and the other
// one reads the bytes through its own. Two processes use it in tests/simt/build_test.cu and in tools/gpu-report (`xpyd
// --processes`).
#include "base/device/device_cuda.h"
#include "disagg/transport/handoff/handoff_pool.h"
#include "tests/catch.h"
#include "tests/disagg/card_rows.h"

namespace xpyd::testing {
namespace {

TEST_CASE("cuda handoff: two members that each map one exported pool hand a sequence over", "[cuda][handoff]") {
  REQUIRE(cuda::open().ok());
  auto device = make_cuda_device();
  KvOptions options = tiny_options(4, 8);
  options.device = device.get();
  auto made = HandoffPool::create("paged", options, 2).value();
  JoinedPool p = join_handoff_pool(made->address(), "paged", options).value();
  JoinedPool d = join_handoff_pool(made->address(), "paged", options).value();
  CHECK(p.pool->data() != d.pool->data());
  auto p_kv = find_kv_scheme("paged")->make(p.pool, options);
  auto d_kv = find_kv_scheme("paged")->make(d.pool, options);
  std::vector<int32_t> prompt(11, 7);
  const KvHandover handover = p_kv->handoff().hand_over(fill_on_card(*p_kv, prompt));
  const KvHandle here = d_kv->handoff().adopt(handover, prompt, 0);
  REQUIRE(here != kNoKv);
  p_kv->handoff().discard(handover);
  made.reset();  // the memory stays with the members that map it
  CHECK(rows_on_card(*d_kv, here, prompt, 0, false) == 0);
  p_kv.reset(), p.pool.reset();
  prompt.push_back(3);
  REQUIRE(d_kv->append(here, 1));
  rows_on_card(*d_kv, here, prompt, 11, true);
  CHECK(rows_on_card(*d_kv, here, prompt, 0, false) == 0);
}

}  // namespace
}  // namespace xpyd::testing
