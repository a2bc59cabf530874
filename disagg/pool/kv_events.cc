#include "disagg/pool/kv_events.h"

#include <zmq.h>

#include <chrono>
#include <utility>

#include "base/log.h"
#include "base/numbers.h"
#include "disagg/net/msgpack.h"

namespace xpyd::disagg {
namespace {

using allocator::Tier;

constexpr int kEveryMs = 10;
constexpr size_t kMostInOne = 1024;  // changes in one message
constexpr int kMostKept = 10'000;    // messages
constexpr size_t kMostKeptBytes = 64 << 20;
constexpr size_t kMostRequest = 64;  // most bytes of a frame from outside

// Adds the rank to the port.
Result<std::string> endpoint_of(const char* option, const std::string& text, int rank) {
  const auto wrong = [&](const std::string& expected) {
    return invalid(std::string("--") + option + " " + text + ": expected " + expected);
  };
  const size_t colon = text.rfind(':');
  if (!text.starts_with("tcp://") || colon <= std::string_view("tcp://").size()) return wrong("tcp://HOST:PORT");
  int port = -1;
  if (!read_number(std::string_view(text).substr(colon + 1), port) || port < 0 || port > UINT16_MAX)
    return wrong("tcp://HOST:PORT, a port from 0 to 65535");
  if (port == 0) return text;
  if (port + rank > UINT16_MAX) return wrong("a port that, with " + std::to_string(rank) + " added, is at most 65535");
  return text.substr(0, colon + 1) + std::to_string(port + rank);
}

ZmqSocket bound(const char* option, const std::string& text, int rank, int type) {
  const std::string endpoint = need(endpoint_of(option, text, rank));
  const std::string where = std::string("--") + option + " " + endpoint + ": ";
  ZmqSocket socket = need(ZmqSocket::open(type, kMostKept + 1), where);  // room for a whole replay
  socket.set(ZMQ_MAXMSGSIZE, int(kMostRequest));
  need(socket.bind(endpoint), where);
  return socket;
}

const char* medium(Tier tier) { return tier == Tier::device ? "GPU" : tier == Tier::host ? "CPU" : "DISK"; }

}  // namespace

Status check_kv_events(const KvEventsOptions& options) {
  if (options.endpoint.empty() && options.replay.empty()) return ok();
  if (options.endpoint.empty()) return invalid("--kv-events-replay: needs --kv-events, whose messages it sends again");
  if (auto endpoint = endpoint_of("kv-events", options.endpoint, options.rank); !endpoint) return endpoint.error();
  if (options.replay.empty()) return ok();
  if (auto endpoint = endpoint_of("kv-events-replay", options.replay, options.rank); !endpoint) return endpoint.error();
  return ok();
}

std::string sequence_text(uint64_t number) {
  std::string bytes;
  for (int shift = 56; shift >= 0; shift -= 8) bytes += char(number >> shift & 0xff);
  return bytes;
}

std::string pack_kv_events(double ts, bool cleared, std::span<const CacheChange> changes,
                           std::span<const int32_t> tokens, int rank) {
  const auto joins = [&](size_t i) {  // change i continues the event of change i - 1
    const CacheChange &a = changes[i - 1], &b = changes[i];
    return a.tier == b.tier && a.n_tokens == b.n_tokens && (b.n_tokens == 0 || (!b.first && b.parent == a.hash));
  };
  std::vector<size_t> begins;
  for (size_t i = 0; i < changes.size(); ++i)
    if (i == 0 || !joins(i)) begins.push_back(i);
  msgpack::sbuffer bytes;
  msgpack::packer<msgpack::sbuffer> to(bytes);
  to.pack_array(3);
  to.pack(ts);
  to.pack_array(uint32_t(begins.size() + cleared));
  if (cleared) {
    to.pack_array(1);
    to.pack("AllBlocksCleared");
  }
  for (size_t e = 0; e < begins.size(); ++e) {
    const auto event = changes.subspan(begins[e], (e + 1 < begins.size() ? begins[e + 1] : changes.size()) - begins[e]);
    const CacheChange& first = event[0];
    const bool came = first.n_tokens > 0;
    to.pack_array(came ? 8 : 3);
    to.pack(came ? "BlockStored" : "BlockRemoved");
    to.pack_array(uint32_t(event.size()));
    for (const CacheChange& change : event) to.pack(change.hash);
    if (came) {
      first.first ? to.pack_nil() : to.pack(first.parent);
      const size_t n = event.size() * size_t(first.n_tokens);
      to.pack_array(uint32_t(n));
      for (int32_t token : tokens.first(n)) to.pack(token);
      tokens = tokens.subspan(n);
      to.pack(first.n_tokens);
      to.pack_nil();  // lora_id
    }
    to.pack(medium(first.tier));
    if (came) to.pack_nil();  // lora_name
  }
  to.pack(rank);
  return std::string(bytes.data(), bytes.size());
}

Result<std::shared_ptr<KvEvents>> KvEvents::open(const KvEventsOptions& options) try {
  ZmqSocket publisher = bound("kv-events", options.endpoint, options.rank, ZMQ_PUB);
  std::unique_ptr<ZmqSocket> replay;
  if (!options.replay.empty())
    replay = std::make_unique<ZmqSocket>(bound("kv-events-replay", options.replay, options.rank, ZMQ_ROUTER));
  return std::shared_ptr<KvEvents>(new KvEvents(options, std::move(publisher), std::move(replay)));
} catch (const Error& error) {
  return error;
}

KvEvents::KvEvents(const KvEventsOptions& options, ZmqSocket publisher, std::unique_ptr<ZmqSocket> replay)
    : options_(options),
      endpoint_(publisher.endpoint()),
      replay_endpoint_(replay ? replay->endpoint() : ""),
      publisher_(std::move(publisher)),
      replay_(std::move(replay)) {
  told_.cleared = true;
  log_line(LogLevel::info, "xpyd: KV events of rank %d are published at %s%s%s", options_.rank, endpoint_.c_str(),
           replay_ ? ", and replayed at " : "", replay_endpoint_.c_str());
  thread_ = std::thread([this] { run(); });
}

KvEvents::~KvEvents() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  thread_.join();
}

void KvEvents::stored(Tier tier, uint64_t hash, std::optional<uint64_t> parent, std::span<const int32_t> tokens) {
  tell({hash, parent.value_or(0), int(tokens.size()), tier, !parent}, tokens);
}

void KvEvents::removed(Tier tier, uint64_t hash) { tell({.hash = hash, .tier = tier}, {}); }

void KvEvents::tell(const CacheChange& change, std::span<const int32_t> tokens) {
  std::lock_guard lock(mutex_);
  if (told_.changes.size() == kMostTold) {
    told_.cleared = true;
    told_.changes.clear();
    told_.tokens.clear();
  }
  told_.changes.push_back(change);
  told_.tokens.insert(told_.tokens.end(), tokens.begin(), tokens.end());
}

void KvEvents::run() {
  for (bool stop = false; !stop;) {
    if (!replay_)
      std::this_thread::sleep_for(std::chrono::milliseconds(kEveryMs));
    else if (replay_->wait(kEveryMs))
      answer();
    {
      std::lock_guard lock(mutex_);
      stop = stop_;
      std::swap(told_, sending_);
    }
    send();
  }
}

void KvEvents::send() {
  const std::span<const CacheChange> changes = sending_.changes;
  std::span<const int32_t> tokens = sending_.tokens;
  if (sending_.cleared && next_ > 0)
    log_line(LogLevel::warning,
             "xpyd: --kv-events lost changes, because too many came at once; subscribers must start over");
  for (size_t at = 0; at < changes.size() || sending_.cleared; at += kMostInOne) {
    const auto part = changes.subspan(at, std::min(kMostInOne, changes.size() - at));
    const double ts = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    Sent sent{sequence_text(next_++),
              pack_kv_events(ts, std::exchange(sending_.cleared, false), part, tokens, options_.rank)};
    for (const CacheChange& change : part) tokens = tokens.subspan(size_t(change.n_tokens));
    publisher_.send({"", sent.sequence, sent.payload});  // a slow subscriber asks for a replay
    kept_bytes_ += sent.payload.size();
    kept_.push_back(std::move(sent));
    while (kept_.size() > size_t{kMostKept} || (kept_bytes_ > kMostKeptBytes && kept_.size() > 1)) {
      kept_bytes_ -= kept_.front().payload.size();
      kept_.pop_front();
    }
  }
  sending_.changes.clear();
  sending_.tokens.clear();
}

// Anything but a request is ignored, because anyone may connect.
void KvEvents::answer() {
  const std::vector<std::string> request = replay_->receive();
  if (request.size() != 3 || request[2].size() != 8) return;
  for (const Sent& sent : kept_)
    if (sent.sequence >= request[2]) replay_->send({request[0], "", sent.sequence, sent.payload});
  replay_->send({request[0], "", sequence_text(kLastSequence), ""});
}

}  // namespace xpyd::disagg
