// Tests which calls are allowed for a sequence whose KV is still loading.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "allocator/offload/offloaded_memory.h"
#include "allocator/schemes.h"
#include "base/device/device.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"
#include "tests/link_device.h"

namespace xpyd::testing::tier_load_test {
namespace {

// A prompt of 21 tokens, of which 20 come from host memory at one layer a second.
struct Loading {
  VirtualClock clock;
  LinkDevice link{clock, 1.0 / double(20 * kTinyShape.token_bytes() / 2)};
  std::unique_ptr<KvMemory> memory;
  std::vector<int32_t> prompt = counting(21);
  KvHandle handle = kNoKv;

  Loading() {
    KvOptions options = tiny_options(4, 16, false, KvOrder::layer_major, 64);
    options.clock = &clock;
    options.device = &link;
    options.tiers = {.host_bytes = 16 * 4 * kTinyShape.token_bytes(), .block_tokens = 4};
    memory = make_offloaded(make_ranked_memory("paged", options, {}).value(), options).value();
    memory->free(fill(*memory, prompt, 0).handle);
    for (; memory->copying(); memory->poll()) clock.seconds += 1;
    const KvReservation second = memory->reserve(prompt, 0).value();
    REQUIRE(second.loading);
    handle = second.handle;
    REQUIRE_FALSE(memory->ready(handle));
  }
};

TEST_CASE("tiers: a sequence that is still loading allows exactly the documented calls", "[tiers][tier_load]") {
  enum When { always, never };
  struct Call {
    const char* name;
    When when;
    std::function<void(Loading& l)> call;
  };
  const Call calls[] = {
      {"reserve", always, [](Loading& l) { l.memory->free(l.memory->reserve(l.prompt, 0).value().handle); }},
      {"probe", always, [](Loading& l) { (void)l.memory->probe(l.prompt, 0); }},
      {"promise", always, [](Loading& l) { (void)l.memory->matched_tokens(l.prompt, 0); }},
      {"append", never, [](Loading& l) { (void)l.memory->append(l.handle, 21); }},
      {"written", never, [](Loading& l) { l.memory->commit(l.handle, std::span(l.prompt).last(1)); }},
      {"trim", never, [](Loading& l) { l.memory->rollback(l.handle); }},
      {"fork", never, [](Loading& l) { (void)l.memory->fork(l.handle); }},
      {"free", always, [](Loading& l) { l.memory->free(l.handle), l.handle = kNoKv; }},
      {"pin", always, [](Loading& l) { l.memory->unpin(l.memory->pin(l.handle, 0, 20)); }},
      {"hand_over", never, [](Loading& l) { (void)l.memory->handoff().hand_over(l.handle); }},
      {"view", always, [](Loading& l) { (void)l.memory->view(l.handle); }},
      {"written_tokens", always, [](Loading& l) { CHECK(l.memory->written_tokens(l.handle) == 0); }},
      {"blocks", always, [](Loading& l) { (void)l.memory->blocks(l.handle); }},
      {"tail_shared", always, [](Loading& l) { (void)l.memory->tail_shared(l.handle); }},
      {"stats", always, [](Loading& l) { (void)l.memory->stats(); }},
      {"states", always, [](Loading& l) { (void)l.memory->states(); }},
      {"clear_prefix_cache", always, [](Loading& l) { l.memory->clear_prefix_cache(); }},
      {"poll", always, [](Loading& l) { (void)l.memory->poll(); }},
  };
  for (const Call& c : calls) {
    INFO(c.name);
    if (c.when == always) {
      Loading l;
      c.call(l);
      l.memory->check_invariants();
      for (; l.memory->copying(); l.memory->poll()) l.clock.seconds += 1;
      if (l.handle != kNoKv) {
        CHECK(l.memory->ready(l.handle));
        CHECK(l.memory->written_tokens(l.handle) == 20);
        CHECK(wrong_rows(*l.memory, l.handle, std::span(l.prompt).first(20), 0) == 0);
        l.memory->free(l.handle);
      }
      l.memory->check_invariants();
      CHECK(l.memory->stats().free == l.memory->stats().capacity);
      continue;
    }
    const pid_t child = fork();
    if (child == 0) {
      signal(SIGABRT, SIG_DFL);
      close(2);
      Loading l;
      c.call(l);
      _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT));
  }
}

}  // namespace
}  // namespace xpyd::testing::tier_load_test
