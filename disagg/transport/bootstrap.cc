#include "disagg/transport/bootstrap.h"

#include <algorithm>
#include <limits>

#include "base/numbers.h"

namespace xpyd::disagg {
namespace {

constexpr size_t kMaxRegions = 1024, kTokenDigits = 32;
constexpr double kHelloSeconds = 10;
constexpr double kCallSeconds = 120;  // longer than a caller waits by its own clock

std::string random_digits() { return hex(random_secret()) + hex(random_secret()); }

// Returns the text up to the next `separator` and removes both from `text`.
std::string_view next(std::string_view& text, char separator) {
  const size_t at = std::min(text.find(separator), text.size());
  std::string_view taken = text.substr(0, at);
  text.remove_prefix(std::min(at + 1, text.size()));
  return taken;
}

std::string place(const std::string& host, uint16_t port) {
  return (host.find(':') == host.npos ? host : "[" + host + "]") + ":" + std::to_string(port);
}

}  // namespace

std::string to_text(const std::string& kind, const TransportAddress& address) {
  std::string text = kind + "," + address.host + "," + std::to_string(address.port) + "," + address.token;
  for (const AddressRange& region : address.regions) text += "," + hex(region.begin, 1) + "+" + hex(region.bytes, 1);
  return text;
}

Result<TransportAddress> parse_transport_address(const std::string& kind, const std::string& text) {
  auto wrong = [&](const std::string& what) { return invalid("address of a " + kind + " transport: " + what); };
  std::string_view rest = text;
  if (next(rest, ',') != kind) return wrong("it does not begin with " + kind);
  TransportAddress address;
  address.host = next(rest, ',');
  if (address.host.empty()) return wrong("expected a host");
  if (!read_number(next(rest, ','), address.port) || address.port == 0) return wrong("expected a port from 1 to 65535");
  address.token = next(rest, ',');
  if (address.token.size() != kTokenDigits || address.token.find_first_not_of("0123456789abcdef") != std::string::npos)
    return wrong("expected a token of 32 hexadecimal digits");
  while (!rest.empty()) {
    std::string_view part = next(rest, ',');
    AddressRange region;
    if (!read_number(next(part, '+'), region.begin, 16) || !read_number(part, region.bytes, 16) ||
        region.bytes > UINT64_MAX - region.begin)
      return wrong("expected regions as BASE+BYTES in hexadecimal");
    if (address.regions.size() == kMaxRegions) return wrong("there are more than 1024 regions");
    address.regions.push_back(region);
  }
  return address;
}

ChannelLimits transport_limits(size_t max_frame_bytes, size_t max_files) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  return {.handshake_timeout_s = kHelloSeconds,
          .heartbeat_s = kNever,
          .silence_timeout_s = kNever,
          .max_unsent_bytes = 4 << 20,  // a stopped peer does not read
          .max_channels = 4096,
          .max_frame_bytes = max_frame_bytes,
          .max_files = max_files};
}

Bootstrap::Bootstrap(const char* kind, PeerId self, const ChannelLimits& limits, std::function<bool()> work)
    : kind_(kind),
      self_{std::to_string(self)},
      loop_(std::make_unique<ControlLoop>(clock_, limits, nullptr, std::move(work))) {}

Result<std::string> Bootstrap::listen_at(const std::string& at, const std::string& token, Accepted accepted) {
  return loop_->listen({at, ClusterKey::of(token), self_, true},
                       [accepted = std::move(accepted)](const ChannelPtr& channel) -> ChannelEvents {
                         PeerId peer = -1;
                         if (read_number(channel->peer().id, peer)) return accepted(channel, peer);
                         channel->close("the peer's name is not an instance number");
                         return {};
                       });
}

Status Bootstrap::listen(const TransportOptions& options, Accepted accepted) {
  TransportAddress address{options.host, 0, random_digits(), {}};
  for (const MemoryRange& region : options.regions)
    address.regions.push_back({reinterpret_cast<uint64_t>(region.data()), region.size()});
  auto bound = listen_at(place(options.host, 0), address.token, std::move(accepted));
  if (!bound) return Error{ErrorCode::unavailable, kind_ + ": --host " + options.host + ": " + bound.error().message};
  const std::string& text = bound.value();
  const bool listens = read_number(std::string_view(text).substr(text.rfind(':') + 1), address.port);
  XPYD_CHECK(listens, text);
  address_ = to_text(kind_, address);
  return ok();
}

Status Bootstrap::listen_here(Accepted accepted) {
  const std::string name = "@xpyd-" + kind_ + "-" + random_digits();
  auto bound = listen_at("unix:" + name, "", std::move(accepted));
  if (!bound) return Error{ErrorCode::unavailable, kind_ + ": a Unix socket: " + bound.error().message};
  address_ = kind_ + ":" + name;
  return ok();
}

Status Bootstrap::dial(const std::string& address, uint64_t session, OnOpen on_open,
                       std::function<void(Result<ChannelPtr>)> done) {
  NodeIdentity self = self_;
  self.fingerprint = session;
  std::string at, token;
  if (address.starts_with(kind_ + ":@") && address.size() > kind_.size() + 2) {
    at = "unix:" + address.substr(kind_.size() + 1);
  } else {
    const auto to = parse_transport_address(kind_, address);
    if (!to) return to.error();
    at = place(to.value().host, to.value().port), token = to.value().token;
  }
  loop_->dial({at, ClusterKey::of(token), self, true}, kCallSeconds, std::move(on_open), std::move(done));
  return ok();
}

ChannelEvents hear(const ChannelPtr& channel, std::function<bool(std::string_view)> take, std::function<void()> left) {
  auto on_frame = [channel, take = std::move(take)](uint16_t, std::string_view bytes) {
    if (!take(bytes)) channel->close("the peer sent an invalid message");
  };
  return {.on_frame = std::move(on_frame), .on_closed = [left = std::move(left)](const std::string&) { left(); }};
}

}  // namespace xpyd::disagg
