#include "disagg/transport/handoff/handoff_pool.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "tests/allocator/kv_fixture.h"
#include "tests/allocator/shared_blocks.h"
#include "tests/catch.h"

namespace xpyd::testing::handoff_pool_test {
namespace {

TEST_CASE("handoff pool: members of one pool hand a sequence over, and outlive its maker", "[transport][handoff]") {
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
  const KvHandover handover = p_kv->handoff().hand_over(fill(*p_kv, prompt, 0).handle);
  CHECK(made->ledger().count_free() == 13);
  const std::string address = made->address();
  made.reset();
  const KvHandle here = d_kv->handoff().adopt(handover, prompt, 0);
  REQUIRE(here != kNoKv);
  p_kv.reset(), p.pool.reset();
  CHECK(wrong_rows(d_kv->view(here), prompt, 0) == 0);
  const auto late = join_handoff_pool(address, "paged", options);
  REQUIRE_FALSE(late.ok());
  CHECK(late.error().code == ErrorCode::unavailable);
}

TEST_CASE("handoff pool: a member that expects another pool is told what differs", "[transport][handoff]") {
  const KvOptions options = tiny_options(4, 8);
  auto made = HandoffPool::create("paged", options, 2).value();
  const std::pair<void (*)(KvOptions&), const char*> kOthers[] = {
      {[](KvOptions& o) { o.pool_bytes *= 2; }, "--kv-bytes"},
      {[](KvOptions& o) { o.shape.n_layers = 1; }, "layers is 1 here, 2 at"},
      {[](KvOptions& o) { o.shape.dtype = Dtype::bf16; }, "--kv-dtype"},
      {[](KvOptions& o) { o.order = KvOrder::token_major; }, "--kv-layout"},
      {[](KvOptions& o) { o.block_tokens = 2; }, "tokens of a block is 2 here, 4 at"},
  };
  for (const auto& [change, says] : kOthers) {
    INFO(says);
    KvOptions other = options;
    change(other);
    const auto joined = join_handoff_pool(made->address(), "paged", other);
    REQUIRE_FALSE(joined.ok());
    CHECK(joined.error().code == ErrorCode::invalid_argument);
    CHECK(joined.error().message.find(says) != std::string::npos);
  }
  const auto ranks = join_handoff_pool(made->address(), "paged", options,
                                       {.n_layers = 2, .n_kv_heads = 2, .tp = 1, .pp = 2});
  REQUIRE_FALSE(ranks.ok());
  CHECK(ranks.error().message.find("pipeline stages is 2 here, 1 at the conductor") != std::string::npos);
  for (const std::string& address : {std::string(), std::string("@"), std::string("x"), std::string(200, '@')}) {
    const auto joined = join_handoff_pool(address, "paged", options);
    REQUIRE_FALSE(joined.ok());
    CHECK(joined.error().code == ErrorCode::invalid_argument);
  }
  const auto nobody = join_handoff_pool("@xpyd-handoff-nobody", "paged", options);
  REQUIRE_FALSE(nobody.ok());
  CHECK(nobody.error().code == ErrorCode::unavailable);
  CHECK(nobody.error().message.find("processes of one host") != std::string::npos);
}

// A member that ends slowly has lost its lock and still has its blocks. Its successor waits for the place, and is not
// told that all places are taken.
TEST_CASE("handoff pool: the successor of a member that ends slowly gets its place", "[transport][handoff]") {
#if defined(__SANITIZE_THREAD__)
  SKIP_TEST("ThreadSanitizer follows no threads of a forked process");
#endif
  const KvOptions options = tiny_options(4, 8);
  auto made = HandoffPool::create("paged", options, 1).value();
  SharedBlocks shared(1, sizeof(std::atomic<int>));
  auto& closed = *reinterpret_cast<std::atomic<int>*>(shared.data());
  const pid_t pid = fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    const auto joined = join_handoff_pool(made->address(), "paged", options);
    if (!joined || close_range(3, ~0u, 0) != 0) _exit(1);
    closed = 1;
    for (;;) pause();
  }
  while (closed == 0 && waitpid(pid, nullptr, WNOHANG) != pid) std::this_thread::yield();
  REQUIRE(closed == 1);
  // The member is killed when its successor has taken a place too many and has left it.
  std::atomic<bool> over = false;
  std::thread end([&, before = made->ledger().changes()] {
    while (made->ledger().changes() == before && !over) std::this_thread::yield();
    kill(pid, SIGKILL);
  });
  const auto next = join_handoff_pool(made->address(), "paged", options);
  over = true;
  end.join();
  INFO((next ? "" : next.error().message));
  CHECK(next.ok());
  CHECK(waitpid(pid, nullptr, 0) == pid);
}

TEST_CASE("handoff pool: a process of another user cannot join", "[transport][handoff]") {
#if defined(__SANITIZE_THREAD__)
  SKIP_TEST("ThreadSanitizer follows no threads of a forked process");
#endif
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

TEST_CASE("handoff pool: a process without free descriptors is told so, and does not ask for ever",
          "[transport][handoff][issues]") {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  SKIP_TEST("UBSan wants a descriptor of its own, and ThreadSanitizer follows no threads of a forked process");
#endif
  auto made = HandoffPool::create("paged", tiny_options(4, 8), 2).value();
  int refused = 0;
  for (rlim_t most = 4; refused < 64; ++most) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(60);
      const rlimit few{most, most};
      if (setrlimit(RLIMIT_NOFILE, &few) != 0) _exit(2);
      _exit(join_handoff_pool(made->address(), "paged", tiny_options(4, 8)).ok() ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    REQUIRE(WIFEXITED(status));
    if (WEXITSTATUS(status) == 0) break;
    REQUIRE(WEXITSTATUS(status) == 1);
    ++refused;
  }
  CHECK(refused > 0);
  CHECK(refused < 64);
}

}  // namespace
}  // namespace xpyd::testing::handoff_pool_test
