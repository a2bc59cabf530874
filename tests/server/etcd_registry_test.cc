#include <condition_variable>
#include <mutex>

#include "server/http/http_client.h"
#include "server/workers/local_workers.h"
#include "tests/json.h"
#include "tests/program.h"
#include "tests/server/etcd_fixture.h"

namespace xpyd::testing::etcd_registry_test {

// Collects the values of one name.
struct Follower {
  std::mutex mutex;
  std::condition_variable changed;
  std::string now;

  void follow(Registry& registry, const std::string& name) {
    registry.watch(name, [this](const std::string& value) {
      std::lock_guard lock(mutex);
      now = value;
      changed.notify_all();
    });
  }
  std::string value() {
    std::lock_guard lock(mutex);
    return now;
  }
  void wait(const std::string& expected) {
    std::unique_lock lock(mutex);
    const bool equal = changed.wait_for(lock, std::chrono::seconds(60), [&] { return now == expected; });
    CHECK(now == expected);
    REQUIRE(equal);
  }
};

std::unique_ptr<Registry> open(const Etcd& etcd, double ttl_s = 2) {
  static RealClock clock;
  auto registry = open_etcd(etcd.url(), ttl_s, clock);
  REQUIRE(registry.ok());
  return std::move(registry).value();
}

#define NEED_ETCD() \
  if (find_etcd().empty()) SKIP_TEST("no etcd: `make check STAGE=etcd` fetches Debian's etcd-server")

struct EtcdByHand {
  std::unique_ptr<HttpClient> http;
  explicit EtcdByHand(const Etcd& etcd) {
    auto made = HttpClient::create({"127.0.0.1", etcd.port(), ""}, {});
    REQUIRE(made.ok());
    http = std::move(made).value();
  }
  json operator()(const char* target, const json& body) {
    auto answer = http->fetch({.target = target, .body = as_text(body)});
    return answer.ok() ? parsed(answer.value()) : json::object();  // empty while etcd starts
  }
};

TEST_CASE("etcd: followers see a name that comes, changes and goes", "[.][slow][etcd]") {
  NEED_ETCD();
  Etcd etcd;
  Follower conductor, worker, later;  // declared before the registries that call them
  auto a = open(etcd), b = open(etcd);
  conductor.follow(*b, "conductor"), worker.follow(*b, "worker/P0");
  const std::string bytes("any \0 bytes \xff", 13);
  a->announce("conductor", bytes);
  a->announce("worker/P0", "10.0.0.1:7");
  conductor.wait(bytes);
  worker.wait("10.0.0.1:7");
  later.follow(*b, "worker/P0");
  later.wait("10.0.0.1:7");
  a->announce("worker/P0", "10.0.0.1:8");
  worker.wait("10.0.0.1:8");
  a->withdraw("worker/P0");
  worker.wait("");
  CHECK(a->state().held == std::set<std::string>{"conductor"});
  CHECK(a->state().trouble.empty());
  a.reset();  // the name goes at once, and not when its lease ends
  conductor.wait("");
}

TEST_CASE("etcd: an outage of the registry removes no name, even if it loses its data", "[.][slow][etcd]") {
  NEED_ETCD();
  Etcd etcd;
  Follower p, d;
  auto a = open(etcd, 2), b = open(etcd, 2);
  p.follow(*b, "worker/P0"), d.follow(*b, "worker/D0");
  a->announce("worker/P0", "a");
  p.wait("a");
  etcd.kill();
  while (b->state().trouble.empty()) std::this_thread::yield();
  CHECK(p.value() == "a");
  b->announce("worker/D0", "b");  // sent as soon as the registry is back
  etcd.forget_everything();
  etcd.start();
  EtcdByHand ask(etcd);
  const auto there = [&](const char* key) { return ask("/v3/kv/range", {{"key", key}}).contains("kvs"); };
  REQUIRE(until(60, [&] { return there("L3Rlc3Qvd29ya2VyL1Aw") && there("L3Rlc3Qvd29ya2VyL0Qw"); }));
  p.wait("a"), d.wait("b");
}

TEST_CASE("a registry's address is checked", "[server][etcd]") {
  RealClock clock;
  for (const char* bad :
       {"", "etcd", "http://127.0.0.1:1", "etcd://", "etcd://:1", "etcd://127.0.0.1:99999", "etcd://127.0.0.1:1?x"})
    CHECK(!open_etcd(bad, 10, clock).ok());
  CHECK(!open_etcd("etcd://127.0.0.1:1", 1, clock).ok());
  // Nothing listens there: the registry reports trouble and keeps trying.
  auto registry = open_etcd("etcd://127.0.0.1:1", 10, clock);
  REQUIRE(registry.ok());
  while (registry.value()->state().trouble.empty()) std::this_thread::yield();
}

}  // namespace xpyd::testing::etcd_registry_test
