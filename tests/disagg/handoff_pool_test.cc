#include "disagg/transport/handoff_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing {
namespace {

TEST_CASE("handoff pool: members of one file hand a sequence over, and outlive who made it",
          "[transport][handoff]") {
  const KvOptions options = tiny_options(4, 8);
  auto made = HandoffPool::create("paged", options, 2).value();
  JoinedPool p = join_handoff_pool(made->address(), "paged", options).value();
  JoinedPool d = join_handoff_pool(made->address(), "paged", options).value();
  CHECK(p.n_instances == 2);
  CHECK(p.pool->layout().n_blocks == 16);
  CHECK(p.pool->data() != d.pool->data());  // two mappings
  CHECK(made->ledger().count_free() == 16);
  auto p_kv = find_kv_scheme("paged")->make(p.pool, options);
  auto d_kv = find_kv_scheme("paged")->make(d.pool, options);
  std::vector<int32_t> prompt(11, 7);
  const KvHandover handover = p_kv->hand_over(fill(*p_kv, prompt, 0).handle);
  CHECK(made->ledger().count_free() == 13);
  const std::string address = made->address();
  made.reset();
  const KvHandle here = d_kv->adopt(handover, prompt, 0);
  REQUIRE(here != kNoKv);
  p_kv.reset(), p.pool.reset();
  CHECK(wrong_rows(d_kv->view(here), prompt, 0) == 0);
  const auto late = join_handoff_pool(address, "paged", options);
  REQUIRE_FALSE(late.ok());
  CHECK(late.error().code == ErrorCode::unavailable);
}

TEST_CASE("handoff pool: who means another pool is told what differs", "[transport][handoff]") {
  const KvOptions options = tiny_options(4, 8);
  auto made = HandoffPool::create("paged", options, 2).value();
  auto error = [&](auto change) {
    KvOptions other = options;
    change(other);
    const auto joined = join_handoff_pool(made->address(), "paged", other);
    REQUIRE_FALSE(joined.ok());
    CHECK(joined.error().code == ErrorCode::invalid_argument);
    return joined.error().message;
  };
  CHECK(error([](KvOptions& o) { o.pool_bytes *= 2; }).find("--kv-bytes") != std::string::npos);
  CHECK(error([](KvOptions& o) { o.shape.n_layers = 1; }).find("layers is 1 here, 2 at") !=
        std::string::npos);
  CHECK(error([](KvOptions& o) { o.shape.dtype = Dtype::bf16; }).find("--kv-dtype") !=
        std::string::npos);
  CHECK(error([](KvOptions& o) { o.order = KvOrder::token_major; }).find("--kv-layout") !=
        std::string::npos);
  CHECK(error([](KvOptions& o) { o.block_tokens = 2; }).find("tokens of a block is 2 here, 4 at") !=
        std::string::npos);
  for (const std::string& address :
       {std::string(), std::string("@"), std::string("x"), std::string(200, '@')}) {
    const auto joined = join_handoff_pool(address, "paged", options);
    REQUIRE_FALSE(joined.ok());
    CHECK(joined.error().code == ErrorCode::invalid_argument);
  }
  const auto nobody = join_handoff_pool("@xpyd-handoff-nobody", "paged", options);
  REQUIRE_FALSE(nobody.ok());
  CHECK(nobody.error().code == ErrorCode::unavailable);
  CHECK(nobody.error().message.find("processes of one host") != std::string::npos);
}

TEST_CASE("handoff pool: another user gets nothing", "[transport][handoff]") {
  if (geteuid() != 0) SKIP_TEST("only root can be another user");
  const KvOptions options = tiny_options(4, 8);
  auto made = HandoffPool::create("paged", options, 2).value();
  const pid_t pid = fork();
  if (pid == 0) {
    if (setuid(65534) != 0) _exit(3);
    const auto joined = join_handoff_pool(made->address(), "paged", options);
    const bool refused = !joined && joined.error().code == ErrorCode::unavailable &&
                         joined.error().message.find("conductor's user") != std::string::npos;
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(made->ledger().count_free() == 16);
}

}  // namespace
}  // namespace xpyd::testing
