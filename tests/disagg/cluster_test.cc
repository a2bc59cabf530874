// The whole path without HTTP: placement, prefill, transfer, decode, and each way in which a request can end.

#include "disagg/instance/cluster.h"

#include <map>
#include <set>
#include <thread>

#include "disagg/handover/held_messages.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::cluster_test {

using Tokens = std::vector<int32_t>;

constexpr size_t kTokenBytes = 256;  // of the tiny model

Tokens prompt_of(int length, int salt = 0) {
  Tokens prompt;
  for (int i = 0; i < length; ++i) prompt.push_back((i * 5 + salt * 11 + 1) % 96);
  return prompt;
}

// The tokens of an undisturbed colocated run.
const Tokens& oracle(const Tokens& prompt, int max_tokens) {
  static std::map<std::pair<Tokens, int>, Tokens> known;
  Tokens& tokens = known[{prompt, max_tokens}];
  if (!tokens.empty()) return tokens;
  TinyCluster tiny({.scheme = "contiguous", .batching = "static", .pool_bytes = 1 << 20});
  REQUIRE(tiny.submit(tiny_request(1, prompt, max_tokens)).ok());
  tiny.run();
  return tokens = tiny.recorder->choice(1).tokens;
}

// Every block is free or cached again, and the conductor counts no load.
void check_quiescent(TinyCluster& tiny) {
  CHECK(tiny.cluster->wait_idle(0));
  bool alone = !tiny.cluster->stats().shared_pool;
  for (const auto& instance : tiny.cluster->instances()) {
    instance->memory().check_invariants(alone);
    KvStats kv = instance->memory().stats();
    CHECK(kv.free + kv.cached == kv.capacity);
    const InstanceId id = instance->options().id;
    const PlacedLoad load =
        tiny.cluster->conductor().look([id](const ClusterState& cluster) { return cluster.find(id)->load; });
    CHECK(load.queued_requests == 0);
    CHECK(load.queued_tokens == 0);
    CHECK(load.sequences == 0);
  }
}

void ask(TinyCluster& tiny, uint64_t id, const Tokens& prompt, int max_tokens, int n = 1) {
  auto request = tiny_request(id, prompt, max_tokens);
  request->n = n;
  REQUIRE(tiny.submit(request).ok());
}
// Each choice has ended once with the oracle's tokens.
void check_choice(TinyCluster& tiny, uint64_t id, const Tokens& prompt, int max_tokens, int n = 1) {
  for (int c = 0; c < n; ++c) {
    const Recorder::Choice choice = tiny.recorder->choice(id, c);
    CHECK(choice.ends == 1);
    CHECK(choice.tokens == oracle(prompt, max_tokens));
    CHECK(choice.finish == FinishReason::length);
  }
}

TEST_CASE("conditional_threshold keeps short prompts on D, and a prefix that D has cached is not sent again",
          "[cluster][order]") {
  TinySetup setup{.topology = "1P1D", .step_tokens = 512, .pool_bytes = 4096 * kTokenBytes};
  setup.disagg = "conditional_threshold";
  setup.disagg_options = {.max_local_prefill_tokens = 25, .max_prefill_queue = 100};
  TinyCluster tiny(setup);
  const auto serve = [&](uint64_t id, int length) {
    ask(tiny, id, prompt_of(length), 4);
    tiny.run();
    check_choice(tiny, id, prompt_of(length), 4);
    return tiny.cluster->stats().instances[0];
  };
  CHECK(serve(1, 25).steps == 0);
  const InstanceStats stats = serve(2, 60);
  CHECK(stats.transfers == 1);
  CHECK(stats.transfer_bytes == (60 - 1 - 16) * int64_t(kTokenBytes));  // D has one block of the first prompt
  CHECK(stats.generated_tokens == 1);  // P samples a token, which is discarded because D computes the last prompt token
  CHECK(serve(3, 70).transfers == 1);  // D has a cached prefix and computes the rest itself
  check_quiescent(tiny);
}

TEST_CASE("n choices share the prompt's KV, and each is a stream of its own", "[cluster]") {
  for (const char* topology : {"1C", "1P1D"})
    for (const char* transport : {"local", "handoff"})
      for (const char* scheme : {"paged", "contiguous"}) {
        if (*transport == 'h' && *scheme == 'c') continue;  // tables of blocks are handed over
        INFO(topology << " " << transport << " " << scheme);
        auto run = [&](int n, int slots) {
          TinySetup setup{.topology = topology, .scheme = scheme, .transport = transport};
          setup.pool_bytes = size_t(slots) * 512 * kTokenBytes;
          auto tiny = std::make_unique<TinyCluster>(setup);
          auto request = tiny_request(1, prompt_of(37), 9);
          request->n = n;
          request->sampling.temperature = 1;
          request->sampling.seed = 42;
          REQUIRE(tiny->submit(request).ok());
          tiny->run();
          check_quiescent(*tiny);
          return tiny;
        };
        auto many = run(5, 8), tight = run(5, 2), one = run(1, 8);
        std::set<Tokens> distinct;
        for (int c = 0; c < 5; ++c) {
          Recorder::Choice choice = many->recorder->choice(1, c);
          CHECK(choice.ends == 1);
          CHECK(choice.tokens.size() == 9);
          distinct.insert(choice.tokens);
          // Contiguous memory may have no slot to fork into. Its choices then compute the prompt again and say the
          // same.
          CHECK(tight->recorder->choice(1, c).tokens == choice.tokens);
        }
        CHECK(distinct.size() == 5);
        CHECK(one->recorder->choice(1, 0).tokens == many->recorder->choice(1, 0).tokens);
      }
}

TEST_CASE("a shared pool full of prompts that wait for their hand-over does not stop D", "[cluster]") {
  for (int n : {1, 8})
    for (const char* topology : {"1P1D", "2P1D"}) {
      INFO(topology << " n " << n);
      TinySetup setup{.topology = topology, .transport = "handoff", .max_batch = 8};
      setup.block_tokens = 4;
      setup.pool_bytes = 64 * kTokenBytes;  // per instance; a request of n = 8 wants up to 250 tokens
      TinyCluster tiny(setup);
      for (uint64_t id = 0; id < 24; ++id) ask(tiny, id, prompt_of(30, int(id)), 25, n);
      for (int turns = 0; !tiny.cluster->wait_idle(0) && turns < 100000; ++turns) tiny.cluster->turn();
      CHECK(tiny.recorder->ended() == 24 * n);
      for (uint64_t id = 0; id < 24; ++id) check_choice(tiny, id, prompt_of(30, int(id)), 25, n);
      check_quiescent(tiny);
    }
}

TEST_CASE("cluster: a request that can never fit is refused at once", "[cluster]") {
  TinySetup setup{.topology = "1P1D", .max_batch = 4};
  setup.pool_bytes = 64 * kTokenBytes;
  TinyCluster tiny(setup);
  Status huge = tiny.submit(tiny_request(5, prompt_of(60), 5));  // 65 tokens; the pool has 64
  REQUIRE_FALSE(huge.ok());
  CHECK(huge.error().code == ErrorCode::invalid_argument);
  CHECK(tiny.submit(tiny_request(6, prompt_of(60), 4)).ok());
  Status longer = tiny.submit(tiny_request(7, prompt_of(500), 13));
  REQUIRE_FALSE(longer.ok());
  CHECK(longer.error().message.find("512") != std::string::npos);
  auto wide = tiny_request(8, prompt_of(3), 1);
  wide->n = 5;
  CHECK_FALSE(tiny.submit(wide).ok());
  tiny.run();
  CHECK(tiny.recorder->ended() == 1);
  tiny.cluster->drain();
  CHECK(tiny.submit(tiny_request(9, prompt_of(3), 1)).error().code == ErrorCode::unavailable);
  check_quiescent(tiny);
}

TEST_CASE("instances as threads: each request ends once, with many clients, aborts and a stop in the middle",
          "[cluster]") {
  for (const char* topology : {"1C", "1P1D", "2P2D"})
    for (const char* transport : {"local", "handoff"}) {
      INFO(topology << " " << transport);
      TinySetup setup{.topology = topology, .placement = "random", .transport = transport};
      setup.pool_bytes = 512 * kTokenBytes;
      setup.step_tokens = 32;
      TinyCluster tiny(setup);
      REQUIRE(tiny.cluster->start().ok());
      constexpr int kRequests = 60;
      std::vector<std::thread> clients;
      for (int client = 0; client < 3; ++client)
        clients.emplace_back([&, client] {
          for (int i = client; i < kRequests; i += 3) {
            auto request = tiny_request(uint64_t(i), prompt_of(20 + i, i % 7), 10);
            while (!tiny.submit(request).ok()) std::this_thread::yield();
            if (i % 5 == 4) tiny.cluster->abort(uint64_t(i));
          }
        });
      for (std::thread& client : clients) client.join();
      REQUIRE(tiny.cluster->wait_idle(60));
      for (uint64_t id = 500; id < 540; ++id) {  // one at a time, to threads that may have gone to sleep
        REQUIRE(tiny.submit(tiny_request(id, prompt_of(30, int(id)), 3)).ok());
        REQUIRE(tiny.cluster->wait_idle(60));
      }
      CHECK(tiny.cluster->trouble().empty());
      for (int i = 0; i < kRequests; i += 11) {
        Recorder::Choice choice = tiny.recorder->choice(uint64_t(i));
        CHECK(choice.ends == 1);
        if (i % 5 != 4) CHECK(choice.tokens == oracle(prompt_of(20 + i, i % 7), 10));
      }
      for (uint64_t id = 1000; id < 1020; ++id) CHECK(tiny.submit(tiny_request(id, prompt_of(60, int(id)), 200)).ok());
      tiny.cluster->stop();
      CHECK(tiny.recorder->ended() == kRequests + 40 + 20);
    }
}

struct Log final : MessageBus {
  std::vector<std::pair<InstanceId, std::string>> sent;
  void send(InstanceId, InstanceId to, Message message) override {
    const auto* token = std::get_if<TokenOf>(&message);
    sent.push_back({to, token                                          ? "token " + std::to_string(token->index)
                        : std::holds_alternative<Report>(message)      ? "report"
                        : std::holds_alternative<KvDelivered>(message) ? "delivered"
                                                                       : "other"});
  }
};

TEST_CASE("held post: the conductor gets a prompt's first token before the decode instance hears of the prompt",
          "[held_post]") {
  using Sent = std::vector<std::pair<InstanceId, std::string>>;
  Log log;
  HeldMessages bus(log);
  bus.send(1, kConductor, TokenOf{.index = 5});
  bus.hold();
  // Each prompt of a step asks D for room, because D's answer is wanted while the step runs.
  for (int prompt = 0; prompt < 2; ++prompt) {
    bus.send(1, 2, ReserveKv{});
    bus.send(1, kConductor, AttemptProgress{1, AttemptProgress::started});
  }
  REQUIRE(log.sent == Sent{{kConductor, "token 5"}, {2, "other"}, {2, "other"}});
  bus.send(1, kConductor, TokenOf{.index = 3});
  CHECK_FALSE(bus.has_answers());
  bus.send(1, kConductor, TokenOf{.index = 0});
  CHECK(bus.has_answers());
  bus.send(1, 2, KvDelivered{});
  CHECK(log.sent.size() == 3);
  bus.send_now(1, kConductor, Report{});
  CHECK(log.sent.size() == 4);
  log.sent.pop_back();
  bus.release(1, Report{});
  CHECK(Sent(log.sent.begin() + 3, log.sent.end()) == Sent{{kConductor, "report"},
                                                           {kConductor, "other"},
                                                           {kConductor, "other"},
                                                           {kConductor, "token 3"},
                                                           {kConductor, "token 0"},
                                                           {2, "delivered"}});
  bus.send(1, 2, KvDelivered{});
  CHECK(log.sent.size() == 10);
  CHECK_FALSE(bus.has_answers());
}

}  // namespace xpyd::testing::cluster_test
