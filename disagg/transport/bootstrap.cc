#include "disagg/transport/bootstrap.h"

#include <limits>

#include "base/numbers.h"

namespace xpyd::disagg {
namespace {

constexpr double kHelloSeconds = 10;
constexpr double kCallSeconds = 120;  // longer than a caller waits by its own clock

std::string place(const std::string& host, uint16_t port) {
  return (host.find(':') == host.npos ? host : "[" + host + "]") + ":" + std::to_string(port);
}

}  // namespace

std::string to_text(const std::string& kind, const TransportAddress& address) {
  std::string text = kind + ",";
  for (char byte : to_bytes(address)) text += hex(uint8_t(byte), 2);
  return text;
}

Result<TransportAddress> parse_transport_address(const std::string& kind, const std::string& text) {
  const auto wrong = [&] { return invalid("this is no address of a " + kind + " transport: " + text); };
  if (!text.starts_with(kind + ",") || (text.size() - kind.size()) % 2 == 0) return wrong();
  std::string bytes;
  for (size_t at = kind.size() + 1; at < text.size(); at += 2) {
    uint8_t byte = 0;
    if (!read_number(std::string_view(text).substr(at, 2), byte, 16)) return wrong();
    bytes += char(byte);
  }
  auto address = from_bytes<TransportAddress>(bytes);
  return address && !address.value().token.empty() ? address : wrong();
}

ChannelLimits transport_limits(size_t max_frame_bytes) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  return {.handshake_timeout_s = kHelloSeconds,
          .heartbeat_s = kNever,
          .silence_timeout_s = kNever,
          .max_unsent_bytes = 4 << 20,  // a stopped peer does not read
          .max_frame_bytes = max_frame_bytes};
}

Bootstrap::Bootstrap(const char* kind, PeerId self, const ChannelLimits& limits, std::function<bool()> work)
    : kind_(kind),
      self_{std::to_string(self)},
      loop_(std::make_unique<ControlLoop>(clock_, limits, nullptr, std::move(work))) {}

Status Bootstrap::listen(const TransportOptions& options, Accepted accepted) {
  TransportAddress address{options.host, 0, hex(random_secret()) + hex(random_secret()), {}};
  for (const MemoryRange& region : options.regions)
    address.regions.push_back({reinterpret_cast<uint64_t>(region.data()), region.size()});
  auto bound = loop_->listen({place(options.host, 0), ClusterKey::of(address.token), self_, true},
                             [accepted = std::move(accepted)](const ChannelPtr& channel) -> ChannelEvents {
                               PeerId peer = -1;
                               if (read_number(channel->peer().id, peer)) return accepted(channel, peer);
                               channel->close("the peer's name is not an instance number");
                               return {};
                             });
  if (!bound) return Error{ErrorCode::unavailable, kind_ + ": --host " + options.host + ": " + bound.error().message};
  const std::string& text = bound.value();
  const bool listens = read_number(std::string_view(text).substr(text.rfind(':') + 1), address.port);
  XPYD_CHECK(listens, text);
  address_ = to_text(kind_, address);
  return ok();
}

Status Bootstrap::dial(const std::string& address, uint64_t session, OnOpen on_open,
                       std::function<void(Result<ChannelPtr>)> done) {
  NodeIdentity self = self_;
  self.fingerprint = session;
  const auto to = parse_transport_address(kind_, address);
  if (!to) return to.error();
  const std::string at = place(to.value().host, to.value().port);
  loop_->dial({at, ClusterKey::of(to.value().token), self, true}, kCallSeconds, std::move(on_open), std::move(done));
  return ok();
}

ChannelEvents hear(const ChannelPtr& channel, std::function<bool(std::string_view)> take, std::function<void()> left) {
  auto on_frame = [channel, take = std::move(take)](uint16_t, std::string_view bytes) {
    if (!take(bytes)) channel->close("the peer sent an invalid message");
  };
  return {.on_frame = std::move(on_frame), .on_closed = [left = std::move(left)](const std::string&) { left(); }};
}

}  // namespace xpyd::disagg
