// The whole path without HTTP: placement, prefill, transfer, decode, and everything that can end a request.

#include "disagg/cluster.h"

#include <cstring>
#include <map>
#include <thread>

#include "tests/catch.h"
#include "tests/tiny_model.h"
#include "tests/wrapped_transport.h"

namespace xpyd::testing::cluster_test {
namespace {

using Tokens = std::vector<int32_t>;

Tokens prompt_of(int length, int salt = 0) {
  Tokens prompt;
  for (int i = 0; i < length; ++i) prompt.push_back((i * 5 + salt * 11 + 1) % 96);
  return prompt;
}

// What an undisturbed colocated run says.
Tokens oracle(const Tokens& prompt, int max_tokens) {
  TinyCluster tiny({.scheme = "contiguous", .batching = "static", .pool_bytes = 1 << 20});
  REQUIRE(tiny.submit(tiny_request(1, prompt, max_tokens)).ok());
  tiny.run();
  return tiny.recorder->choice(1).tokens;
}

// Every block is free or cached again, and the books are right.
void check_quiescent(TinyCluster& tiny) {
  CHECK(tiny.cluster->wait_idle(0));
  bool alone = !tiny.cluster->stats().shared_pool;
  for (const auto& instance : tiny.cluster->instances()) {
    instance->memory().check_invariants(alone);
    KvStats kv = instance->memory().stats();
    CHECK(kv.free + kv.cached == kv.capacity);
    const PlacedLoad load = tiny.cluster->conductor().load(instance->options().id);
    CHECK(load.queued_requests == 0);
    CHECK(load.queued_tokens == 0);
    CHECK(load.sequences == 0);
  }
}

// The local wire, whose transfers are seen to be done some polls later, in another order, and may fail.
class SlowWire final : public WrappedTransport {
 public:
  static inline int fail_every = 0;  // of the transfers, 0 = none
  static Result<std::unique_ptr<KvTransport>> make(const TransportOptions& options) {
    return std::unique_ptr<KvTransport>(std::make_unique<SlowWire>(options));
  }
  explicit SlowWire(const TransportOptions& options) : WrappedTransport("local", options) {}
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    const bool fails = fail_every > 0 && ++posts_ % fail_every == 0;
    const TransferId id = fails ? -posts_ : WrappedTransport::post(transfer, plan);
    if (fails)  // an unknown part of it, which nobody counts
      for (const Copy& copy : plan.copies) std::memcpy(copy.destination, copy.source, copy.bytes / 2);
    flights_[id] = {1 + int(random_.below(9)), fails};
    return id;
  }
  TransferState poll(TransferId id) override {
    Flight& flight = flights_.at(id);
    if (--flight.polls_left > 0) return TransferState::in_flight;
    const bool fails = flight.fails;
    flights_.erase(id);
    if (fails) return TransferState::failed;
    CHECK(WrappedTransport::poll(id) == TransferState::done);
    return TransferState::done;
  }

 private:
  struct Flight {
    int polls_left = 0;
    bool fails = false;
  };
  std::map<TransferId, Flight> flights_;
  int64_t posts_ = 0;
  Random random_{5};
};

const char* kTopologies[] = {"1C", "1P1D", "2P1D", "1P2D", "2P2D", "1C1P1D"};

TEST_CASE("requests end once with the oracle's tokens, in every topology", "[cluster]") {
  for (const char* topology : kTopologies)
    for (const char* transport : {"local", "handoff"})
      for (const char* placement : {"random", "least_loaded", "prefix_aware"}) {
        INFO(topology << " " << transport << " " << placement);
        TinyCluster tiny({.topology = topology, .placement = placement, .transport = transport});
        for (int i = 0; i < 12; ++i)
          REQUIRE(tiny.submit(tiny_request(uint64_t(i), prompt_of(10 + 9 * (i % 5), i % 5), 4)).ok());
        tiny.run();
        for (int i = 0; i < 12; ++i) {
          Recorder::Choice choice = tiny.recorder->choice(uint64_t(i));
          CHECK(choice.ends == 1);
          CHECK(choice.finish == FinishReason::length);
          CHECK(choice.tokens == oracle(prompt_of(10 + 9 * (i % 5), i % 5), 4));
        }
        check_quiescent(tiny);
      }
}

struct Order {
  const char* disagg;
  bool pull;
  int max_local;  // tokens
};
const Order kOrders[] = {{"prefill_first", false, 0},          {"prefill_first", true, 0},
                         {"decode_first", false, 0},           {"conditional_threshold", false, 0},
                         {"conditional_threshold", false, 25}, {"conditional_cost", false, 0},
                         {"conditional_cost", true, 0},        {"append_cost", false, 0}};

TinySetup in_order(const Order& order, const char* topology) {
  TinySetup setup{.topology = topology};
  setup.disagg = order.disagg;
  setup.disagg_options = {.pull = order.pull, .max_local_prefill_tokens = order.max_local, .max_prefill_queue = 100};
  return setup;
}

TEST_CASE("every order of prefill and decode gives the oracle's tokens", "[cluster][order]") {
  for (const Order& order : kOrders)
    for (const char* topology : {"1P1D", "2P1D", "1P2D", "2P2D", "1C1P1D"})
      for (const char* scheme : {"paged", "contiguous", "vattention"})
        for (StreamKv stream : {StreamKv::layer, StreamKv::request}) {
          INFO(order.disagg << " pull " << order.pull << " local to " << order.max_local << " " << topology << " "
                            << scheme << " stream " << int(stream));
          TinySetup setup = in_order(order, topology);
          setup.scheme = scheme;
          setup.stream_kv = stream;
          setup.step_tokens = 16;
          setup.pool_bytes = 4096 * 256;
          TinyCluster tiny(setup);
          for (int i = 0; i < 12; ++i) {
            auto request = tiny_request(uint64_t(i), prompt_of(1 + 9 * (i % 6), i % 5), 4);
            request->n = 1 + i % 3;
            REQUIRE(tiny.submit(request).ok());
          }
          tiny.run();
          for (int i = 0; i < 12; ++i)
            for (int c = 0; c < 1 + i % 3; ++c) {
              Recorder::Choice choice = tiny.recorder->choice(uint64_t(i), c);
              CHECK(choice.ends == 1);
              CHECK(choice.tokens == oracle(prompt_of(1 + 9 * (i % 6), i % 5), 4));
            }
          check_quiescent(tiny);
        }
}

TEST_CASE("the threshold of decode_first keeps short prompts on D, and D's prefix is not sent again",
          "[cluster][order]") {
  TinyCluster tiny(in_order({"conditional_threshold", false, 25}, "1P1D"));
  REQUIRE(tiny.submit(tiny_request(1, prompt_of(25), 4)).ok());
  tiny.run();
  auto stats = tiny.cluster->stats().instances;
  CHECK(stats[0].steps == 0);
  REQUIRE(tiny.submit(tiny_request(2, prompt_of(60), 4)).ok());
  tiny.run();
  stats = tiny.cluster->stats().instances;
  CHECK(stats[0].transfers == 1);
  CHECK(stats[0].transfer_bytes == (60 - 1 - 16) * 256);  // D's cache has one block of the first
  CHECK(stats[0].generated_tokens == 1);                  // sampled there, and nobody's
  CHECK(tiny.recorder->choice(2).tokens == oracle(prompt_of(60), 4));
  // Ten more now, with a cached prefix: D computes them itself.
  auto longer = prompt_of(70);
  REQUIRE(tiny.submit(tiny_request(3, longer, 4)).ok());
  tiny.run();
  CHECK(tiny.cluster->stats().instances[0].transfers == 1);
  CHECK(tiny.recorder->choice(3).tokens == oracle(longer, 4));
  check_quiescent(tiny);
}

TEST_CASE("a pool too small for all: preemption by recompute changes nothing", "[cluster]") {
  for (const char* topology : {"1C", "1P1D"})
    for (const char* transport : {"local", "handoff"})
      for (const char* batching : {"chunked", "prefill_first", "static"})
        for (int block : {1, 4, 16}) {
          INFO(topology << " " << transport << " " << batching << " " << block);
          TinySetup setup{.topology = topology, .batching = batching, .transport = transport};
          setup.block_tokens = block;
          setup.step_tokens = 24;
          setup.pool_bytes = 112 * 256;  // 112 tokens; six sequences of 40 + 30 want 420
          TinyCluster tiny(setup);
          for (int i = 0; i < 6; ++i) REQUIRE(tiny.submit(tiny_request(uint64_t(i), prompt_of(40, i), 30)).ok());
          tiny.run();
          int64_t preemptions = 0;
          for (const InstanceStats& s : tiny.cluster->stats().instances) preemptions += s.preemptions;
          if (std::string(batching) == "chunked" && topology[1] == 'C') CHECK(preemptions > 0);
          for (int i = 0; i < 6; ++i) {
            REQUIRE(tiny.recorder->choice(uint64_t(i)).ends == 1);
            CHECK(tiny.recorder->choice(uint64_t(i)).tokens == oracle(prompt_of(40, i), 30));
          }
          check_quiescent(tiny);
        }
}

TEST_CASE("n choices share the prompt's KV and each is its own stream", "[cluster]") {
  for (const char* topology : {"1C", "1P1D"})
    for (const char* transport : {"local", "handoff"})
      for (const char* scheme : {"paged", "contiguous"}) {
        INFO(topology << " " << transport << " " << scheme);
        auto run = [&](int n, int slots) {
          TinySetup setup{.topology = topology, .scheme = scheme, .transport = transport};
          setup.pool_bytes = size_t(slots) * 512 * 256;
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
        std::map<Tokens, int> distinct;
        for (int c = 0; c < 5; ++c) {
          Recorder::Choice choice = many->recorder->choice(1, c);
          CHECK(choice.ends == 1);
          CHECK(choice.tokens.size() == 9);
          ++distinct[choice.tokens];
          // Also where contiguous memory has no slot to fork into and choices compute the prompt again.
          CHECK(tight->recorder->choice(1, c).tokens == choice.tokens);
        }
        CHECK(distinct.size() == 5);
        CHECK(one->recorder->choice(1, 0).tokens == many->recorder->choice(1, 0).tokens);
      }
}

TEST_CASE("a shared pool full of prompts to be handed over does not stop D", "[cluster]") {
  for (int n : {1, 8})
    for (const char* topology : {"1P1D", "2P1D"}) {
      INFO(topology << " n " << n);
      TinySetup setup{.topology = topology, .transport = "handoff", .max_batch = 8};
      setup.block_tokens = 4;
      setup.pool_bytes = 64 * 256;  // per instance; a request of n = 8 wants up to 250 tokens
      TinyCluster tiny(setup);
      for (uint64_t id = 0; id < 24; ++id) {
        auto request = tiny_request(id, prompt_of(30, int(id)), 25);
        request->n = n;
        REQUIRE(tiny.submit(request).ok());
      }
      int turns = 0;
      while (!tiny.cluster->wait_idle(0) && ++turns < 100000) tiny.cluster->turn();
      CHECK(tiny.recorder->ended() == 24 * n);
      for (uint64_t id = 0; id < 24; ++id)
        for (int c = 0; c < n; ++c) CHECK(tiny.recorder->choice(id, c).tokens == oracle(prompt_of(30, int(id)), 25));
      check_quiescent(tiny);
    }
}

TEST_CASE("a prefix hit is used, reported, kept apart by salt, and never changes a token", "[cluster]") {
  TinyCluster tiny({.topology = "1P1D"});
  Tokens prompt = prompt_of(50);
  for (uint64_t id = 0; id < 3; ++id) {
    auto request = tiny_request(id, prompt, 5);
    if (id == 2) request->cache_salt = 99;
    REQUIRE(tiny.submit(request).ok());
    tiny.run();
  }
  CHECK(tiny.recorder->choice(0).cached_tokens == 0);
  CHECK(tiny.recorder->choice(1).cached_tokens == 48);
  CHECK(tiny.recorder->choice(2).cached_tokens == 0);
  for (uint64_t id = 0; id < 3; ++id) CHECK(tiny.recorder->choice(id).tokens == oracle(prompt, 5));
  // The second time D had the prefix as well: only the rest crossed.
  InstanceStats prefill = tiny.cluster->stats().instances[0];
  CHECK(prefill.transfers == 3);
  CHECK(prefill.transfer_bytes == (50 + 2 + 50) * 256);
  CHECK(prefill.prompt_tokens == 50 + 2 + 50);
}

TEST_CASE("a cached prompt token is counted as reused, not as computed, too, and each on one instance", "[cluster]") {
  for (const char* topology : {"1C", "1P1D", "2P2D"}) {
    INFO(topology);
    TinyCluster tiny({.topology = topology, .placement = "prefix_aware", .step_tokens = 40});
    int64_t prompts = 0, cached = 0, computed = 0;
    for (uint64_t id = 0; id < 6; ++id) {
      auto request = tiny_request(id, prompt_of(90 + int(id) % 3, int(id) % 2), 5);
      if (id == 5) request->n = 2;
      prompts += int64_t(request->prompt.size());
      REQUIRE(tiny.submit(request).ok());
      tiny.run();
      cached += tiny.recorder->choice(id).cached_tokens;
    }
    CHECK(cached >= 4 * 80);
    for (const InstanceStats& s : tiny.cluster->stats().instances) {
      computed += s.prompt_tokens;
      if (s.name[0] == 'D') CHECK(s.prompt_tokens == 0);
    }
    CHECK(computed + cached == prompts);
  }
}

TEST_CASE("abort at every moment frees everything and ends each choice once", "[cluster]") {
  for (const char* topology : {"1C", "1P1D", "2P2D"})
    for (const char* transport : {"local", "handoff"})
      for (int moment = 0; moment < 14; ++moment) {
        INFO(topology << " " << transport << " turn " << moment);
        TinySetup setup{.topology = topology, .transport = transport};
        setup.step_tokens = 16;
        setup.pool_bytes = 128 * 256;
        TinyCluster tiny(setup);
        for (uint64_t id = 0; id < 4; ++id) {
          auto request = tiny_request(id, prompt_of(40, int(id)), 8);
          request->n = 1 + int(id % 3);
          REQUIRE(tiny.submit(request).ok());
        }
        for (int i = 0; i < moment; ++i) tiny.cluster->turn();
        for (uint64_t id = 0; id < 3; ++id) tiny.cluster->abort(id);
        tiny.cluster->abort(77);  // unknown
        tiny.run();
        for (uint64_t id = 0; id < 4; ++id)
          for (int c = 0; c < 1 + int(id % 3); ++c) {
            Recorder::Choice choice = tiny.recorder->choice(id, c);
            CHECK(choice.ends == 1);
            Tokens all = oracle(prompt_of(40, int(id)), 8);
            REQUIRE(choice.tokens.size() <= all.size());
            CHECK(choice.tokens == Tokens(all.begin(), all.begin() + long(choice.tokens.size())));
            if (id == 3) CHECK(choice.finish == FinishReason::length);
          }
        check_quiescent(tiny);
      }
}

TEST_CASE("abort at every moment, in every order", "[cluster][order]") {
  for (const Order& order : kOrders)
    for (int moment = 0; moment < 14; ++moment) {
      INFO(order.disagg << " pull " << order.pull << " turn " << moment);
      TinySetup setup = in_order(order, "2P1D");
      setup.step_tokens = 16;
      setup.pool_bytes = 128 * 256;
      TinyCluster tiny(setup, SlowWire::make);
      SlowWire::fail_every = 0;
      for (uint64_t id = 0; id < 4; ++id) {
        auto request = tiny_request(id, prompt_of(40, int(id)), 8);
        request->n = 1 + int(id % 3);
        REQUIRE(tiny.submit(request).ok());
      }
      for (int i = 0; i < moment; ++i) tiny.cluster->turn();
      for (uint64_t id = 0; id < 3; ++id) tiny.cluster->abort(id);
      while (!tiny.cluster->wait_idle(0)) tiny.cluster->turn();
      for (int i = 0; i < 20; ++i) tiny.cluster->turn();
      for (uint64_t id = 0; id < 4; ++id)
        for (int c = 0; c < 1 + int(id % 3); ++c) {
          Recorder::Choice choice = tiny.recorder->choice(id, c);
          CHECK(choice.ends == 1);
          Tokens all = oracle(prompt_of(40, int(id)), 8);
          REQUIRE(choice.tokens.size() <= all.size());
          CHECK(choice.tokens == Tokens(all.begin(), all.begin() + long(choice.tokens.size())));
          if (id == 3) CHECK(choice.finish == FinishReason::length);
        }
      check_quiescent(tiny);
    }
}

TEST_CASE("a deadline ends a request with timeout", "[cluster]") {
  TinyCluster tiny({.topology = "1P1D"});
  auto request = tiny_request(1, prompt_of(20), 400);
  request->deadline_s = tiny.clock.now() + 0.01;
  REQUIRE(tiny.submit(request).ok());
  auto late = tiny_request(2, prompt_of(20), 4);
  late->deadline_s = tiny.clock.now() - 1;
  REQUIRE(tiny.submit(late).ok());
  while (!tiny.cluster->wait_idle(0)) tiny.cluster->turn();
  CHECK(tiny.recorder->choice(1).ends == 1);
  CHECK(tiny.recorder->choice(2).finish == FinishReason::timeout);
  CHECK(tiny.recorder->choice(2).tokens.empty());
  check_quiescent(tiny);
}

TEST_CASE("the queue is bounded and what can never fit is refused at once", "[cluster]") {
  TinySetup setup{.topology = "1P1D", .max_batch = 4, .max_queue_bytes = 3 * (4096 + 4 * 20)};
  setup.pool_bytes = 64 * 256;
  TinyCluster tiny(setup);
  for (uint64_t id = 0; id < 3; ++id) REQUIRE(tiny.submit(tiny_request(id, prompt_of(20), 4)).ok());
  Status full = tiny.submit(tiny_request(3, prompt_of(20), 4));
  REQUIRE_FALSE(full.ok());
  CHECK(full.error().code == ErrorCode::unavailable);
  tiny.run();
  CHECK(tiny.submit(tiny_request(4, prompt_of(20), 4)).ok());
  tiny.run();
  Status huge = tiny.submit(tiny_request(5, prompt_of(60), 5));  // 65 tokens, the pool has 64
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
  CHECK(tiny.recorder->ended() == 5);
  tiny.cluster->drain();
  CHECK(tiny.submit(tiny_request(9, prompt_of(3), 1)).error().code == ErrorCode::unavailable);
  check_quiescent(tiny);
}

TEST_CASE("one-token answers end on P and give D's reservation back", "[cluster]") {
  for (const char* transport : {"local", "handoff"}) {
    TinyCluster tiny({.topology = "1P1D", .transport = transport});
    for (uint64_t id = 0; id < 5; ++id) REQUIRE(tiny.submit(tiny_request(id, prompt_of(30, int(id)), 1)).ok());
    tiny.run();
    CHECK(tiny.recorder->ended() == 5);
    CHECK(tiny.cluster->stats().instances[0].transfers == 0);
    check_quiescent(tiny);
  }
}

TEST_CASE("a slow or failing wire delays or recomputes, and no token changes", "[cluster]") {
  for (int fail_every : {0, 1, 3})
    for (StreamKv stream : {StreamKv::layer, StreamKv::chunk, StreamKv::request})
      for (int aborted : {0, 3}) {
        INFO("fail every " << fail_every << ", stream " << int(stream) << ", aborted " << aborted);
        SlowWire::fail_every = fail_every;
        TinySetup setup{.topology = "2P1D", .stream_kv = stream};
        setup.step_tokens = 16;
        setup.pool_bytes = 256 * 256;
        TinyCluster tiny(setup, SlowWire::make);
        for (uint64_t id = 0; id < 8; ++id) REQUIRE(tiny.submit(tiny_request(id, prompt_of(45, int(id)), 6)).ok());
        for (int i = 0; i < 9; ++i) tiny.cluster->turn();
        for (int id = 0; id < aborted; ++id) tiny.cluster->abort(uint64_t(id));
        while (!tiny.cluster->wait_idle(0)) tiny.cluster->turn();
        for (int i = 0; i < 20; ++i) tiny.cluster->turn();
        for (int id = 0; id < 8; ++id) {
          Recorder::Choice choice = tiny.recorder->choice(uint64_t(id));
          CHECK(choice.ends == 1);
          if (id >= aborted) CHECK(choice.tokens == oracle(prompt_of(45, id), 6));
        }
        check_quiescent(tiny);
      }
}

// The reason why parity is worth testing: a single wrong byte of KV shows.
class FlippingWire final : public WrappedTransport {
 public:
  static Result<std::unique_ptr<KvTransport>> make(const TransportOptions& options) {
    return std::unique_ptr<KvTransport>(std::make_unique<FlippingWire>(options));
  }
  explicit FlippingWire(const TransportOptions& options) : WrappedTransport("local", options) {}
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    const TransferId id = WrappedTransport::post(transfer, plan);
    if (std::exchange(first_, false)) plan.copies[0].destination[2] ^= std::byte{0x40};
    return id;
  }

 private:
  bool first_ = true;
};

TEST_CASE("one flipped bit between P and D changes the logits hash", "[cluster]") {
  auto hash = [](Result<std::unique_ptr<KvTransport>> (*wire)(const TransportOptions&)) {
    TinyCluster tiny({.topology = "1P1D"}, wire);
    REQUIRE(tiny.submit(tiny_request(1, prompt_of(40), 6)).ok());
    tiny.run();
    return tiny.cluster->logits_hash();
  };
  CHECK(hash(nullptr) == hash(nullptr));
  CHECK(hash(FlippingWire::make) != hash(nullptr));
}

TEST_CASE("instances as threads: many clients, aborts, and a stop in the middle", "[cluster]") {
  for (const char* topology : {"1C", "1P1D", "2P2D"})
    for (const char* transport : {"local", "handoff"}) {
      INFO(topology << " " << transport);
      TinySetup setup{.topology = topology, .placement = "random", .transport = transport};
      setup.pool_bytes = 512 * 256;
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
      REQUIRE(tiny.cluster->wait_idle(30));
      for (uint64_t id = 500; id < 540; ++id) {  // alone, to threads that have gone to sleep or not
        REQUIRE(tiny.submit(tiny_request(id, prompt_of(30, int(id)), 3)).ok());
        REQUIRE(tiny.cluster->wait_idle(10));
        if (id % 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
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

}  // namespace
}  // namespace xpyd::testing::cluster_test
