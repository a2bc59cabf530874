// Instances of one process end every request over transports with faults, D counts its reads, and the order of P and D
// is chosen well before anything is measured.

#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

#include "disagg/transport/bootstrap.h"
#include "disagg/transport/fault.h"
#include "disagg/transport/forwarding.h"
#include "server/build.h"
#include "tests/catch.h"
#include "tests/disagg/sim_cluster.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::cluster_faults_test {
namespace {

using Tokens = std::vector<int32_t>;

constexpr size_t kTokenBytes = 256;  // of the tiny model

Tokens prompt_of(int length, int family) {
  Tokens prompt;
  for (int i = 0; i < length; ++i) prompt.push_back((i * 5 + family * 11 + 1) % 96);
  return prompt;
}

// A transport of the table with faults, as a function that the table could have.
FaultOptions faults;
std::string transport;
Result<std::unique_ptr<KvTransport>> make_faulty(const TransportOptions& options) {
  auto made = find_transport(transport)->make(options);
  if (!made) return made;
  return make_fault_transport(std::move(made).value(), faults, options);
}

void wait_until(const std::function<bool()>& holds, double seconds) {
  RealClock clock;
  for (const double until = clock.now() + seconds; !holds() && clock.now() < until;)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

int held(const TinyCluster& tiny) {
  int sum = 0;
  for (const auto& instance : tiny.cluster->instances()) {
    const KvStats kv = instance->memory().stats();
    sum += kv.capacity - kv.free - kv.cached;
  }
  return sum;
}

struct Order {
  const char* disagg;
  bool pull;
};
constexpr Order kOrders[] = {{"prefill_first", false}, {"prefill_first", true}, {"decode_first", false}};

TEST_CASE("faults over every transport in one process: every request ends, and nothing leaks", "[issues][lost_posts]") {
  const std::pair<const char*, FaultOptions> kFaults[] = {{"delay", {.seed = 2, .delay_s = 0.01}},
                                                          {"reorder", {.seed = 4, .reorder = 0.5}}};
  for (const char* name : {"local", "shm", "tcp"})
    for (const auto& [what, fault] : kFaults)
      for (const Order& order : kOrders) {
        INFO(name << " " << what << " " << order.disagg << " pull " << order.pull);
        transport = name;
        faults = fault;
        TinySetup setup{.topology = "2P1D", .transport = name, .disagg = order.disagg};
        setup.disagg_options.pull = order.pull;
        TinyCluster tiny(setup, make_faulty);
        REQUIRE(tiny.cluster->start().ok());
        for (uint64_t i = 0; i < 12; ++i) {
          auto request = tiny_request(i, prompt_of(20 + 9 * int(i % 5), int(i)), 6);
          request->ignore_eos = true;
          request->deadline_s = tiny.clock.now() + 1;
          REQUIRE(tiny.submit(request).ok());
        }
        CHECK(tiny.cluster->wait_idle(30));
        wait_until([&] { return held(tiny) == 0; }, 30);
        CHECK(held(tiny) == 0);
        for (uint64_t i = 0; i < 12; ++i) CHECK(tiny.recorder->choice(i).ends == 1);
        tiny.cluster->stop();
      }
}

// A request that waited for its next try was looked at only when something else happened.
TEST_CASE("an attempt that fails again and again in one process ends at its deadline", "[issues][lost_posts]") {
  struct Deaf final : ForwardingTransport {
    using ForwardingTransport::ForwardingTransport;
    Result<RemoteKey> open(PeerId, KvOp, std::span<const MemoryRange>) override { return invalid("no windows today"); }
  };
  TinyCluster tiny({.topology = "1P1D"}, [](const TransportOptions& options) -> Result<std::unique_ptr<KvTransport>> {
    return std::unique_ptr<KvTransport>(std::make_unique<Deaf>(find_transport("local")->make(options).value()));
  });
  REQUIRE(tiny.cluster->start().ok());
  auto request = tiny_request(1, prompt_of(30, 1), 300);  // each try brings a token from P
  request->ignore_eos = true;
  request->deadline_s = tiny.clock.now() + 0.7;
  REQUIRE(tiny.submit(request).ok());
  CHECK(tiny.cluster->wait_idle(10));
  CHECK(tiny.recorder->choice(1).finish == FinishReason::timeout);
  tiny.cluster->stop();
}

// The transport connected again only when it was asked to, and no instance asked.
TEST_CASE("a data connection that breaks alone is made anew", "[issues][lost_posts]") {
  TinyCluster tiny({.topology = "1P1D", .transport = "tcp"});
  REQUIRE(tiny.cluster->start().ok());
  const auto refused_after = [&](uint64_t id) {
    REQUIRE(tiny.submit(tiny_request(id, prompt_of(40, int(id)), 4)).ok());
    REQUIRE(tiny.cluster->wait_idle(10));
    return tiny.cluster->stats().instances[1].kv_refused;
  };
  REQUIRE(refused_after(0) == 0);
  const auto owner = parse_transport_address("tcp", tiny.cluster->instances()[1]->info().address).value();
  int broken = 0;
  for (int fd = 0; fd < 4096; ++fd) {
    sockaddr_in peer{};
    socklen_t length = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && peer.sin_family == AF_INET &&
        ntohs(peer.sin_port) == owner.port)
      broken += ::shutdown(fd, SHUT_RDWR) == 0;
  }
  REQUIRE(broken > 0);
  int64_t refused = 0;
  bool crosses = false;  // prompts that come while the connection is made may still be computed by D
  uint64_t id = 0;
  wait_until(
      [&] {
        const int64_t now = refused_after(++id);
        crosses = id > 1 && std::exchange(refused, now) == now;
        return crosses;
      },
      10);
  CHECK(crosses);
  tiny.cluster->stop();
}

TEST_CASE("pull: D counts the bytes, pieces and seconds of its reads", "[issues][pull]") {
  InstanceStats by[2];
  for (bool pull : {false, true}) {
    TinySetup setup{.topology = "1P1D"};
    setup.disagg_options.pull = pull;
    setup.stream_kv = StreamKv::request;
    TinyCluster tiny(setup);
    REQUIRE(tiny.submit(tiny_request(1, prompt_of(60, 1), 4)).ok());
    tiny.run();
    const auto stats = tiny.cluster->stats().instances;
    by[pull] = stats[pull ? 1 : 0];
    CHECK(stats[pull ? 0 : 1].transfer_bytes == 0);
    CHECK(stats[pull ? 0 : 1].transfers == 0);
  }
  for (const InstanceStats& poster : by) {
    CHECK(poster.transfers == 1);  // its bytes and seconds are divided by this
    CHECK(poster.transfer_bytes == int64_t(60 * kTokenBytes));
    CHECK(poster.transfer_seconds > 0);
  }
  CHECK(by[1].transfer_descriptors == by[0].transfer_descriptors);
}

TEST_CASE("issue: none of 1,000 prompts that come at once is refused", "[cluster]") {
  TinyCluster tiny({.topology = "1P1D"});
  for (uint64_t id = 0; id < 1000; ++id) REQUIRE(tiny.submit(tiny_request(id, std::vector<int32_t>(20, 7), 1)).ok());
  tiny.run();
  CHECK(tiny.recorder->ended() == 1000);
}

TEST_CASE("cluster: the queue's bytes are given back, however its requests leave it", "[cluster]") {
  for (const char* disagg : {"prefill_first", "decode_first"}) {
    INFO(disagg);
    TinyCluster tiny({.topology = "1P1D", .disagg = disagg, .max_queue_bytes = 3 * (4096 + 80)});
    for (uint64_t round = 0; round < 5; ++round) {
      const uint64_t first = 10 * round;
      for (uint64_t i = 0; i < 3; ++i)
        REQUIRE(tiny.submit(tiny_request(first + i, std::vector<int32_t>(20, 7), 2)).ok());
      CHECK(tiny.submit(tiny_request(first + 3, std::vector<int32_t>(20, 7), 2)).error().code ==
            ErrorCode::unavailable);
      if (round % 2)
        for (uint64_t i = 0; i < 3; ++i) tiny.cluster->abort(first + i);
      tiny.run();
    }
    CHECK(tiny.recorder->ended() == 15);
  }
}

// ---- conditional_cost.

const DisaggPolicy& cost() { return *find_disagg_policy("conditional_cost"); }

TEST_CASE("conditional_cost: the size of a chunk and the overlap count", "[issues][order]") {
  CHECK(overlap(StreamKv::layer, false, 32, 500, 512) == Approx(31.0 / 32));
  CHECK(overlap(StreamKv::layer, false, 32, 2048, 512) == Approx(1 - 0.25 / 32));
  CHECK(overlap(StreamKv::chunk, false, 32, 2048, 512) == Approx(0.75));
  CHECK(overlap(StreamKv::chunk, false, 32, 100, 512) == 0);
  CHECK(overlap(StreamKv::request, false, 32, 2048, 512) == 0);
  CHECK(overlap(StreamKv::layer, true, 32, 2048, 512) == 0);
  // The transfer takes as long as the computation. It is worth it if it hides behind the computation.
  DisaggView view{.tokens = 1000,
                  .prefill_s_per_token = 1e-4,
                  .decode_s_per_token = 1e-4,
                  .step_s = 0.01,
                  .kv_s_per_token = 1e-4,
                  .chunk_tokens = 100};
  view.overlap = 0;
  CHECK(cost().decide(view, {}) == DisaggOrder::local);
  view.overlap = 0.9;
  CHECK(cost().decide(view, {}) == DisaggOrder::push);
  // A transfer hides behind no more than there is to compute.
  view.cached_prefill = 990;
  CHECK(cost().decide(view, {}) == DisaggOrder::push);
  view.kv_s_per_token = 1e-3;
  CHECK(cost().decide(view, {}) == DisaggOrder::local);
  // Each chunk of a local prompt costs a step of D.
  view = {.tokens = 1000, .prefill_s_per_token = 1e-4, .decode_s_per_token = 1e-4, .step_s = 0.01};
  view.kv_s_per_token = 3e-5;
  view.chunk_tokens = 2000;
  CHECK(cost().decide(view, {}) == DisaggOrder::local);
  view.chunk_tokens = 100;
  CHECK(cost().decide(view, {}) == DisaggOrder::push);
}

// Every prompt was once local for ever: a P that had never run seemed to cost as little as D, so it never ran.
TEST_CASE("conditional_cost: a P that has not run yet gets its share", "[issues][order]") {
  for (bool pull : {false, true}) {
    SimOptions options;
    options.conductor.disagg = &cost();
    options.conductor.disagg_options.pull = pull;
    options.conductor.step_tokens = 16;
    options.conductor.prior = CostPrior{{checksum_config()}, {1e6, 1e8}};
    SimCluster sim;
    sim.open(std::move(options));
    sim.add_all("1P1D");
    sim.tick();
    auto recorder = std::make_shared<Recorder>();
    for (uint64_t id = 1; id <= 3; ++id) {
      auto request = tiny_request(id, Tokens(id == 1 ? 4 : 100, 5), 20);
      request->ignore_eos = true;
      REQUIRE(sim.conductor().submit(request, recorder).ok());
      sim.ticks(5);
    }
    for (int i = 0; i < 5000 && !sim.conductor().wait_idle(0); ++i) sim.tick();
    CHECK(sim.find(pull ? "D1" : "P0")->instance->stats().transfers >= 1);
    CHECK(recorder->ended() == 3);
  }
}

TEST_CASE("conditional_cost: the server knows the model's work and the machine's peaks", "[issues][order]") {
  const std::vector<std::string> words = {"--topology",     "1P1D", "--disagg",    "conditional_cost",
                                          "--kv-bytes",     "4MiB", "--threads",   "1",
                                          "--chunk-tokens", "96",   "--stream-kv", "chunk"};
  const auto build = prepare_build(Options::parse(option_table(), "serve", words, 0).value()).value();
  const ConductorOptions options = conductor_options(build->options);
  REQUIRE(options.prior.has_value());
  CHECK(options.prior->rates.flops_per_s > 1e8);
  CHECK(options.prior->rates.bytes_per_s > 1e8);
  CHECK(options.prior->model.config.hidden == build->config.hidden);
  CHECK(options.step_tokens == 96);
  CHECK(options.stream_kv == StreamKv::chunk);
}

}  // namespace
}  // namespace xpyd::testing::cluster_faults_test
