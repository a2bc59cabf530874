#include "disagg/pool/kv_event_feed.h"

#include <zmq.h>

#include <utility>

#include "disagg/net/msgpack.h"
#include "disagg/pool/kv_events.h"

namespace xpyd::disagg {

using allocator::Tier;

std::optional<std::vector<HeardEvent>> read_kv_events(std::string_view payload) try {
  using Fields = std::vector<msgpack::object>;
  const size_t n = payload.size();  // more elements, or longer ones, are a lie
  const msgpack::object_handle batch = msgpack::unpack(payload.data(), n, nullptr, nullptr,
                                                       msgpack::unpack_limit(n, n, n, n, n, 8));
  std::vector<HeardEvent> events;
  for (const msgpack::object& event : batch->as<Fields>().at(1).as<Fields>()) {
    const Fields fields = event.as<Fields>();
    const std::string kind = fields.at(0).as<std::string>();
    HeardEvent& heard = events.emplace_back();
    heard.cleared = kind == "AllBlocksCleared";
    const bool came = kind == "BlockStored";
    if (!came && kind != "BlockRemoved") continue;
    if (came) heard.block_tokens = fields.at(4).as<int>();
    const std::string medium = fields.at(came ? 6 : 2).as<std::string>();
    heard.report.tier = medium == "GPU" ? Tier::device : medium == "CPU" ? Tier::host : Tier::disk;
    (came ? heard.report.stored : heard.report.removed) = fields.at(1).as<std::vector<uint64_t>>();
  }
  return events;
} catch (const std::exception&) {  // of msgpack, of at()
  return {};
}

Result<std::unique_ptr<KvEventFeed>> KvEventFeed::open(const std::string& endpoint, const std::string& replay,
                                                       int block_tokens, Heard heard) try {
  constexpr int kMostWaiting = 10'000;  // messages
  const auto connected = [](int type, const std::string& to) {
    const std::string where = "KV events of \"" + to + "\": ";
    ZmqSocket socket = need(ZmqSocket::open(type, kMostWaiting), where);
    need(socket.connect(to), where);
    return socket;
  };
  ZmqSocket events = connected(ZMQ_SUB, endpoint);
  events.set(ZMQ_MAXMSGSIZE, 64 << 20);
  events.subscribe("");
  std::unique_ptr<ZmqSocket> again;
  if (!replay.empty()) again = std::make_unique<ZmqSocket>(connected(ZMQ_DEALER, replay));
  return std::unique_ptr<KvEventFeed>(
      new KvEventFeed(std::move(events), std::move(again), block_tokens, std::move(heard)));
} catch (const Error& error) {
  return error;
}

KvEventFeed::KvEventFeed(ZmqSocket events, std::unique_ptr<ZmqSocket> replay, int block_tokens, Heard heard)
    : block_tokens_(block_tokens), heard_(std::move(heard)), events_(std::move(events)), replay_(std::move(replay)) {
  thread_ = std::thread([this] { run(); });
}

KvEventFeed::~KvEventFeed() {
  stop_ = true;
  thread_.join();
}

// What came before the subscription did, or is the last for long, leaves no gap to be seen: so who hears nothing asks,
// too.
void KvEventFeed::run() {
  while (!stop_) {
    if (!wait(events_)) {
      catch_up();
      continue;
    }
    const std::vector<std::string> message = events_.receive();
    if (message.size() != 3 || message[1].size() != 8) continue;
    if (message[1] > sequence_text(next_)) catch_up();
    take(message[1], message[2]);
  }
}

// For a second; not: it is to stop.
bool KvEventFeed::wait(ZmqSocket& socket) {
  for (int i = 0; i < 20 && !stop_; ++i)
    if (socket.wait(50)) return true;
  return false;
}

void KvEventFeed::catch_up() {
  if (!replay_ || !replay_->send({"", sequence_text(next_)})) return;
  while (wait(*replay_)) {
    const std::vector<std::string> message = replay_->receive();
    if (message.size() != 3 || message[1] == sequence_text(kLastSequence)) return;
    take(message[1], message[2]);
  }
}

void KvEventFeed::take(std::string_view sequence, const std::string& payload) {
  if (sequence < sequence_text(next_)) return;
  if (sequence > sequence_text(next_)) forget();
  next_ = 0;
  for (const char byte : sequence) next_ = next_ << 8 | uint8_t(byte);
  ++next_;
  auto heard = read_kv_events(payload);
  if (!heard) return forget();  // as if it had not come
  for (HeardEvent& event : *heard) {
    CacheReport& report = event.report;
    if (event.cleared) forget();
    if (!report.stored.empty() && event.block_tokens != block_tokens_) continue;
    std::unordered_set<uint64_t>& known = known_[int(report.tier)];
    known.insert(report.stored.begin(), report.stored.end());
    for (const uint64_t hash : report.removed) known.erase(hash);
    if (!report.stored.empty() || !report.removed.empty()) heard_(std::move(report));
  }
}

void KvEventFeed::forget() {
  for (int tier = 0; tier < allocator::kTiers; ++tier)
    if (auto known = std::exchange(known_[tier], {}); !known.empty())
      heard_({.tier = Tier(tier), .removed = {known.begin(), known.end()}});
}

}  // namespace xpyd::disagg
