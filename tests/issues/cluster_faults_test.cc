// Instances of one process end every request over transports with faults, D counts its reads, and the order of P and D
// is chosen well before anything is measured.

#include <netinet/in.h>
#include <sys/socket.h>

#include <map>
#include <optional>
#include <thread>

#include "base/random.h"
#include "disagg/transport/bootstrap.h"
#include "server/build.h"
#include "tests/catch.h"
#include "tests/disagg/sim_cluster.h"
#include "tests/tiny_model.h"
#include "tests/wrapped_transport.h"

namespace xpyd::testing::cluster_faults_test {
namespace {

using Tokens = std::vector<int32_t>;

constexpr size_t kTokenBytes = 256;  // of the tiny model

Tokens prompt_of(int length, int family) {
  Tokens prompt;
  for (int i = 0; i < length; ++i) prompt.push_back((i * 5 + family * 11 + 1) % 96);
  return prompt;
}

// A transport of the table whose transfers begin late: by 10 ms on average, or half of them after the next one. It is
// made by a function that the table could have.
enum class Late { delay, reorder } late;
std::string transport;
class LateTransport final : public WrappedTransport {
 public:
  explicit LateTransport(const TransportOptions& options)
      : WrappedTransport(transport.c_str(), options), clock_(*options.clock), random_(uint64_t(options.self)) {}
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    const double wait_s = late == Late::delay ? 0.01 * random_.exponential() : random_.below(2) ? 0.001 : 0;
    posts_[++last_] = {transfer, plan, clock_.now() + wait_s, {}};
    return last_;
  }
  TransferState poll(TransferId id) override {
    Post& post = posts_.at(id);
    TransferState state = TransferState::in_flight;
    if (!post.inner && clock_.now() >= post.due_s) post.inner = WrappedTransport::post(post.transfer, post.plan);
    if (post.inner) state = WrappedTransport::poll(*post.inner);
    if (state != TransferState::in_flight) posts_.erase(id);
    return state;
  }
  void cancel(TransferId id) override {
    Post& post = posts_.at(id);
    if (post.inner)
      WrappedTransport::cancel(*post.inner);
    else
      post.transfer.deadline_s = post.due_s = clock_.now();
  }

 private:
  struct Post {
    KvTransfer transfer;
    TransferPlan plan;
    double due_s;
    std::optional<TransferId> inner;
  };
  Clock& clock_;
  Random random_;
  std::map<TransferId, Post> posts_;
  TransferId last_ = 0;
};
Result<std::unique_ptr<KvTransport>> make_late(const TransportOptions& options) {
  return std::unique_ptr<KvTransport>(std::make_unique<LateTransport>(options));
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
  for (const char* name : {"local", "shm", "tcp"})
    for (Late what : {Late::delay, Late::reorder})
      for (const Order& order : kOrders) {
        INFO(name << " " << int(what) << " " << order.disagg << " pull " << order.pull);
        transport = name;
        late = what;
        TinySetup setup{.topology = "2P1D", .transport = name, .disagg = order.disagg};
        setup.disagg_options.pull = order.pull;
        TinyCluster tiny(setup, make_late);
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
TEST_CASE("a request whose attempts fail again and again in one process is given up", "[issues][lost_posts]") {
  struct Deaf final : WrappedTransport {
    using WrappedTransport::WrappedTransport;
    Result<RemoteKey> open(PeerId, KvOp, std::span<const MemoryRange>) override { return invalid("no windows today"); }
  };
  TinyCluster tiny({.topology = "1P1D"}, [](const TransportOptions& options) -> Result<std::unique_ptr<KvTransport>> {
    return std::unique_ptr<KvTransport>(std::make_unique<Deaf>("local", options));
  });
  REQUIRE(tiny.cluster->start().ok());
  auto request = tiny_request(1, prompt_of(30, 1), 300);  // each try brings a token from P
  request->ignore_eos = true;
  REQUIRE(tiny.submit(request).ok());
  CHECK(tiny.cluster->wait_idle(10));
  CHECK(tiny.recorder->choice(1).finish == FinishReason::error);
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

TEST_CASE("placement: the server knows the model's work and the machine's peaks", "[issues][placement]") {
  const std::vector<std::string> words = {"--topology", "1P1D", "--placement",    "mooncake", "--kv-bytes",  "4MiB",
                                          "--threads",  "1",    "--chunk-tokens", "96",       "--stream-kv", "chunk"};
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
