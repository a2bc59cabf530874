#include <condition_variable>
#include <mutex>

#include "server/http/http_client.h"
#include "server/workers/local_workers.h"
#include "tests/json.h"
#include "tests/server/etcd_fixture.h"

namespace xpyd::testing::etcd_registry_test {
namespace {

using Entries = Registry::Entries;

// Collects the entries below one prefix.
struct Follower {
  std::mutex mutex;
  std::condition_variable changed;
  Entries now;
  int calls = 0;

  void follow(Registry& registry, const std::string& prefix) {
    registry.watch(prefix, [this](const Entries& entries) {
      std::lock_guard lock(mutex);
      now = entries;
      ++calls;
      changed.notify_all();
    });
  }
  Entries entries() {
    std::lock_guard lock(mutex);
    return now;
  }
  void wait(const Entries& expected) {
    std::unique_lock lock(mutex);
    bool equal = changed.wait_for(lock, std::chrono::seconds(60), [&] { return now == expected; });
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
    REQUIRE(answer.ok());
    return parsed(answer.value());
  }
};

TEST_CASE("etcd: followers see names that come, change and go", "[.][slow][etcd]") {
  NEED_ETCD();
  Etcd etcd;
  Follower all, workers;  // declared before the registries that call them
  auto a = open(etcd), b = open(etcd);
  all.follow(*b, "");
  a->announce("worker/P0", "10.0.0.1:7");
  a->announce("conductor", std::string("any \0 bytes \xff", 13));
  const Entries both{{"worker/P0", "10.0.0.1:7"}, {"conductor", std::string("any \0 bytes \xff", 13)}};
  all.wait(both);
  workers.follow(*b, "worker/");  // it first gets what is already there
  workers.wait({{"worker/P0", "10.0.0.1:7"}});
  b->announce("worker/D0", "10.0.0.2:7");
  workers.wait({{"worker/P0", "10.0.0.1:7"}, {"worker/D0", "10.0.0.2:7"}});
  a->announce("worker/P0", "10.0.0.1:8");
  workers.wait({{"worker/P0", "10.0.0.1:8"}, {"worker/D0", "10.0.0.2:7"}});
  a->withdraw("worker/P0");
  workers.wait({{"worker/D0", "10.0.0.2:7"}});
  CHECK(a->state().reachable);
  CHECK(a->state().lost_leases == 0);
  a.reset();  // the name goes at once, and not when its lease ends
  all.wait({{"worker/D0", "10.0.0.2:7"}});
}

TEST_CASE("etcd: a name of a dead process is taken over only when its lease ends", "[.][slow][etcd]") {
  NEED_ETCD();
  Etcd etcd;
  Follower names;
  auto watcher = open(etcd);
  names.follow(*watcher, "");
  names.wait({});
  while (!watcher->state().reachable) std::this_thread::yield();
  // The old conductor announced itself and was killed, so nothing renews its lease.
  EtcdByHand ask(etcd);
  std::string lease = ask("/v3/lease/grant", {{"TTL", "2"}})["ID"];
  ask("/v3/kv/put",  // "/test/conductor": "old"
      {{"key", "L3Rlc3QvY29uZHVjdG9y"}, {"value", "b2xk"}, {"lease", lease}});
  names.wait({{"conductor", "old"}});
  auto next = open(etcd);
  next->announce("conductor", "new");
  // The new conductor does not take the name early, because the old one might live.
  while (next->state().trouble.find("another process holds the name 'conductor'") == std::string::npos)
    std::this_thread::yield();
  names.wait({{"conductor", "new"}});
}

TEST_CASE("etcd: a restart of the registry loses no name", "[.][slow][etcd]") {
  NEED_ETCD();
  Etcd etcd;
  Follower names;
  auto a = open(etcd, 30), b = open(etcd, 3);
  names.follow(*b, "");
  a->announce("worker/P0", "a");
  names.wait({{"worker/P0", "a"}});
  etcd.kill();
  while (b->state().reachable) std::this_thread::yield();
  CHECK(names.entries() == Entries{{"worker/P0", "a"}});  // an outage of the registry removes no name
  b->announce("worker/D0", "b");                          // sent as soon as the registry is back
  etcd.start();
  names.wait({{"worker/P0", "a"}, {"worker/D0", "b"}});
  CHECK(b->state().outages == 1);
  a->announce("worker/P0", "later");
  names.wait({{"worker/P0", "later"}, {"worker/D0", "b"}});
  CHECK(a->state().lost_leases == 0);
}

TEST_CASE("etcd: after the registry loses its data every process announces itself again", "[.][slow][etcd]") {
  NEED_ETCD();
  Etcd etcd;
  Follower names;
  auto a = open(etcd, 2), b = open(etcd, 2);
  names.follow(*b, "");
  a->announce("worker/P0", "a");
  b->announce("worker/D0", "b");
  const Entries both{{"worker/P0", "a"}, {"worker/D0", "b"}};
  names.wait(both);
  etcd.kill();
  etcd.forget_everything();
  etcd.start();
  while (a->state().lost_leases == 0 || b->state().lost_leases == 0) std::this_thread::yield();
  names.wait(both);
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
  CHECK(!registry.value()->state().reachable);
}

}  // namespace
}  // namespace xpyd::testing::etcd_registry_test
