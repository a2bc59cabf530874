// KV events: their bytes, their order, how much is kept, and that a subscriber knows what the memory caches.

#include "disagg/pool/kv_events.h"

#include <zmq.h>

#include <deque>
#include <map>
#include <set>
#include <sstream>

#include "base/random.h"
#include "disagg/net/msgpack.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/program.h"

namespace xpyd::testing::kv_events_test {

constexpr const char* kAny = "tcp://127.0.0.1:0";

std::string text_of(const std::string& payload) {
  std::ostringstream text;
  text << msgpack::unpack(payload.data(), payload.size()).get();
  return text.str();
}

ZmqSocket connected(int type, const std::string& endpoint) {
  ZmqSocket socket = ZmqSocket::open(type, 100'000).value();
  if (type == ZMQ_SUB) socket.subscribe("");
  REQUIRE(socket.connect(endpoint));
  return socket;
}

uint64_t number(const std::string& frame) {
  REQUIRE(frame.size() == 8);
  uint64_t n = 0;
  for (const char byte : frame) n = n << 8 | uint8_t(byte);
  return n;
}

// Returns the messages from that number on: sequence and payload. The last frames must mark the end.
std::vector<std::pair<uint64_t, std::string>> replayed(ZmqSocket& socket, uint64_t from) {
  std::vector<std::pair<uint64_t, std::string>> all;
  REQUIRE(socket.send({"", sequence_text(from)}));
  for (;;) {
    REQUIRE(socket.wait(60'000));
    const std::vector<std::string> frames = socket.receive();
    REQUIRE(frames.size() == 3);
    REQUIRE(frames[0].empty());
    if (number(frames[1]) == kLastSequence) {
      CHECK(frames[2].empty());
      return all;
    }
    all.emplace_back(number(frames[1]), frames[2]);
  }
}

TEST_CASE("kv_events: events are packed as vLLM packs them", "[disagg][kv_events]") {
  const std::vector<int32_t> tokens{1, 2, 3, 4, 5, 6, 7, 8, 70000, 9};
  const CacheChange changes[] = {
      {.hash = 11, .n_tokens = 2, .tier = Tier::device, .first = true},
      {.hash = ~uint64_t{0}, .parent = 11, .n_tokens = 2, .tier = Tier::device},  // follows: the same event
      {.hash = 13, .parent = 11, .n_tokens = 2, .tier = Tier::device},            // another branch
      {.hash = 14, .parent = 13, .n_tokens = 2, .tier = Tier::host},              // another offload tier
      {.hash = 11, .tier = Tier::disk},
      {.hash = 12, .tier = Tier::disk},  // one event
      {.hash = 12, .tier = Tier::device},
      {.hash = 15, .n_tokens = 2, .tier = Tier::device, .first = true},
  };
  CHECK(text_of(pack_kv_events(1.5, true, changes, tokens, 3)) ==
        R"([1.5,[["AllBlocksCleared"],)"
        R"(["BlockStored",[11,18446744073709551615],null,[1,2,3,4],2,null,"GPU",null],)"
        R"(["BlockStored",[13],11,[5,6],2,null,"GPU",null],["BlockStored",[14],13,[7,8],2,null,"CPU",null],)"
        R"(["BlockRemoved",[11,12],"DISK"],["BlockRemoved",[12],"GPU"],)"
        R"(["BlockStored",[15],null,[70000,9],2,null,"GPU",null]],3])");
  CHECK(pack_kv_events(1.5, false, {}, {}, 0) == std::string("\x93\xcb\x3f\xf8\0\0\0\0\0\0\x90\0", 12));
}

TEST_CASE("kv_events: an address that cannot be had is an error that names the option", "[disagg][kv_events]") {
  auto taken = KvEvents::open({.endpoint = kAny}).value();
  const struct {
    KvEventsOptions options;
    const char* expected;
    bool at_once = true;
  } cases[] = {
      {{.endpoint = "5557"}, "--kv-events 5557: expected tcp://HOST:PORT"},
      {{.endpoint = "tcp://127.0.0.1:65536"}, "a port from 0 to 65535"},
      {{.endpoint = "tcp://127.0.0.1:65535", .rank = 1}, "a port that, with 1 added, is at most 65535"},
      {{.endpoint = kAny, .replay = "tcp://127.0.0.1:-1"}, "--kv-events-replay tcp://127.0.0.1:-1: expected"},
      {{.replay = kAny}, "--kv-events-replay: needs --kv-events"},
      {{.endpoint = taken->endpoint()}, "Address already in use", false},
      {{.endpoint = kAny, .replay = taken->endpoint()}, "--kv-events-replay tcp://127.0.0.1:", false},
      {{.endpoint = "tcp://192.0.2.1:7"}, "--kv-events tcp://192.0.2.1:7: ", false},  // an address of no machine
  };
  for (const auto& c : cases) {
    INFO(c.expected);
    const Status checked = check_kv_events(c.options);
    CHECK(checked.ok() != c.at_once);
    const std::string said = c.at_once ? checked.error().message : KvEvents::open(c.options).error().message;
    INFO(said);
    CHECK(said.find(c.expected) != said.npos);
  }
  CHECK(check_kv_events({}).ok());
}

TEST_CASE("kv_events: the history is bounded, and neither a deaf nor a lying subscriber holds up the memory", "[disagg][kv_events]") {
  auto events = KvEvents::open({.endpoint = kAny, .replay = kAny}).value();
  ZmqSocket deaf = connected(ZMQ_SUB, events->endpoint());  // it reads nothing
  ZmqSocket again = connected(ZMQ_DEALER, events->replay()), liar = connected(ZMQ_DEALER, events->replay());
  // A nonsense request gets no answer and harms nobody.
  for (const char* nonsense : {"", "1234567", "123456789"}) REQUIRE(liar.send({"", nonsense}));
  REQUIRE(liar.send({"12345678"}));
  REQUIRE(liar.send({"", "12345678", "12345678"}));
  REQUIRE(liar.send({std::string(1 << 20, 'x')}));
  const std::vector<int32_t> tokens(16, INT32_MAX);
  size_t all = 0;
  uint64_t hash = 0, next = 0;
  bool over = false;
  const auto hear = [&] {
    for (const auto& [sequence, payload] : replayed(again, next)) {
      next = sequence + 1, all += payload.size();
      over |= payload.find("BlockRemoved") != payload.npos;
    }
    return over;
  };
  while (all < 80 << 20) {  // bytes
    for (int i = 0; i < 20'000; ++i) events->stored(Tier::device, ++hash, std::nullopt, tokens);
    hear();
  }
  events->removed(Tier::host, ++hash);  // the last event
  REQUIRE(until(60, hear));
  const auto kept = replayed(again, 0);
  size_t bytes = 0;
  for (size_t i = 0; i < kept.size(); ++i) {
    REQUIRE(kept[i].first == kept[0].first + i);
    bytes += kept[i].second.size();
  }
  CHECK(kept.back().first + 1 == next);
  CHECK(kept[0].first > 0);
  CHECK(kept.size() <= 10'000);
  CHECK(bytes <= 64 << 20);
  CHECK(bytes > 60 << 20);
  CHECK(replayed(again, next).empty());
  CHECK(replayed(again, ~uint64_t{0}).empty());
  CHECK(!liar.wait(0));
}

TEST_CASE("kv_events: events that come faster than they can be packed are dropped, and a cleared event says so",
          "[disagg][kv_events]") {
  auto events = KvEvents::open({.endpoint = kAny, .replay = kAny}).value();
  ZmqSocket again = connected(ZMQ_DEALER, events->replay());
  const std::vector<int32_t> tokens(16, 7);
  bool cleared = false;
  uint64_t hash = 0, next = 1;
  for (int turn = 0; turn < 50 && !cleared; ++turn) {
    for (size_t i = 0; i < 3 * KvEvents::kMostTold; ++i) events->stored(Tier::device, ++hash, std::nullopt, tokens);
    for (const auto& [sequence, payload] : replayed(again, next)) {
      next = sequence + 1;
      cleared |= payload.find("AllBlocksCleared") != payload.npos;
    }
  }
  CHECK(cleared);
}

// Hashes of blocks, by offload tier.
using Known = std::map<std::string, std::set<uint64_t>>;

// A subscriber as a user would write one. It misses messages on purpose.
class Subscriber {
 public:
  Subscriber(const KvEvents& events, uint64_t seed)
      : random_(seed), events_(connected(ZMQ_SUB, events.endpoint())), again_(connected(ZMQ_DEALER, events.replay())) {}
  void listen(const std::map<uint64_t, std::pair<std::optional<uint64_t>, std::vector<int32_t>>>& blocks) {
    blocks_ = &blocks;
    while (events_.wait(0)) {
      const std::vector<std::string> frames = events_.receive();
      if (dropped_ < 3 || random_.below(5) == 0) {  // at least three, however busy the machine is
        ++dropped_;
        continue;
      }
      const uint64_t sequence = number(frames[1]);
      if (sequence > next_) catch_up();
      if (sequence == next_) take(sequence, frames[2]);
    }
  }
  void catch_up() {
    for (const auto& [sequence, payload] : replayed(again_, next_)) {
      REQUIRE(sequence == next_);
      take(sequence, payload);
    }
  }
  const Known& known() const { return known_; }
  int dropped() const { return dropped_; }

 private:
  void take(uint64_t sequence, const std::string& payload) {
    using Fields = std::vector<msgpack::object>;
    next_ = sequence + 1;
    const auto batch = msgpack::unpack(payload.data(), payload.size());
    for (const auto& event : batch->as<Fields>().at(1).as<Fields>()) {
      const Fields f = event.as<Fields>();
      if (f[0].as<std::string>() == "AllBlocksCleared") {
        known_.clear();
      } else if (f[0].as<std::string>() == "BlockRemoved") {
        for (uint64_t hash : f[1].as<std::vector<uint64_t>>()) REQUIRE(known_[f[2].as<std::string>()].erase(hash) == 1);
      } else {
        std::optional<uint64_t> parent;
        if (!f[2].is_nil()) parent = f[2].as<uint64_t>();
        const auto tokens = f[3].as<std::vector<int32_t>>();
        const size_t n = f[4].as<size_t>();
        size_t at = 0;
        for (uint64_t hash : f[1].as<std::vector<uint64_t>>()) {
          REQUIRE(known_[f[6].as<std::string>()].insert(hash).second);
          const auto& [before, own] = blocks_->at(hash);
          REQUIRE(before == parent);
          REQUIRE(own == std::vector(tokens.begin() + long(at), tokens.begin() + long(at + n)));
          at += n;
          parent = hash;
        }
        REQUIRE(at == tokens.size());
      }
    }
  }

  Random random_;
  ZmqSocket events_, again_;
  const std::map<uint64_t, std::pair<std::optional<uint64_t>, std::vector<int32_t>>>* blocks_ = nullptr;
  uint64_t next_ = 0;
  Known known_;
  int dropped_ = 0;
};

TEST_CASE("kv_events: a subscriber that asks for missed messages knows what the memory finds", "[disagg][kv_events]") {
  constexpr int kBlock = 4;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    Random random(seed);
    Memory memory(tiny_options(kBlock, 40));
    auto events = KvEvents::open({.endpoint = kAny, .replay = kAny}).value();
    memory.pool->tell(events);
    Subscriber subscriber(*events, seed);
    std::map<uint64_t, std::pair<std::optional<uint64_t>, std::vector<int32_t>>> blocks;
    std::set<std::pair<uint64_t, std::vector<int32_t>>> prompts;
    std::deque<KvHandle> live;
    int64_t found = 0;
    for (int turn = 0; turn < 2000; ++turn) {
      if (random.below(3) == 0 || live.size() > 4) {
        if (!live.empty()) memory.kv->free(live.front()), live.pop_front();
      } else if (random.below(300) == 0) {
        memory.kv->clear_prefix_cache();
      } else {
        const uint64_t salt = random.below(4) == 0 ? 77 : 0;
        std::vector<int32_t> tokens(1 + random.below(6 * kBlock));
        int32_t letter = 0;  // few prefixes, which diverge often
        for (int32_t& token : tokens) token = random.below(6) == 0 ? letter = int32_t(random.below(4)) : letter;
        const std::vector<uint64_t> hashes = allocator::prefix_hashes(tokens, kBlock, salt);
        for (size_t i = 0; i < hashes.size(); ++i)
          blocks[hashes[i]] = {i == 0 ? std::nullopt : std::optional(hashes[i - 1]),
                               {tokens.begin() + long(i * kBlock), tokens.begin() + long((i + 1) * kBlock)}};
        prompts.insert({salt, tokens});
        if (memory.kv->stats().available() < 7) continue;
        live.push_back(fill(*memory.kv, tokens, salt).handle);
      }
      if (turn % 50 != 0) continue;
      // The memory is at rest, so all its events arrive in a while.
      const auto equal = [&] {
        subscriber.listen(blocks);
        subscriber.catch_up();
        const std::set<uint64_t>& known = subscriber.known().contains("GPU") ? subscriber.known().at("GPU")
                                                                             : std::set<uint64_t>();
        for (const auto& [salt, tokens] : prompts) {
          std::span<const int32_t> all(tokens);
          const auto hashes = allocator::prefix_hashes(all.first(all.size() - 1), kBlock, salt);
          int n = 0;
          while (n < int(hashes.size()) && known.contains(hashes[size_t(n)])) ++n;
          if (n * kBlock != memory.kv->probe(tokens, salt)) return false;
          found += n;
        }
        return true;
      };
      INFO("seed " << seed << " turn " << turn);
      REQUIRE(until(60, equal));
    }
    CHECK(found > 1000);
    CHECK(subscriber.dropped() > 2);
    CHECK(memory.kv->stats().evictions > 100);
    for (KvHandle handle : live) memory.kv->free(handle);
  }
}

}  // namespace xpyd::testing::kv_events_test
