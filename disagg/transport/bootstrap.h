// The bootstrap of a transport: Bootstrap lets its two ends find each other over channels (disagg/net/channel.h) of a
// loop of its own. KV bytes then travel on the same sockets (tcp) or beside the channels (rdma, nccl). The owner of
// memory listens. Its address contains the host and port, a token, and where its memory lies. The caller's hello proves
// that it has the token. When a process dies its channels end at once, so the other side learns of it; RDMA itself
// would retry for seconds, and NCCL would wait for ever. A stopped peer stays connected.
//
// Thread safety: Bootstrap and Calls: the owner's thread, and callbacks run on the loop's thread. Answer: any thread.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "disagg/net/channel.h"
#include "disagg/net/fields.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg {

// The value of KvTransport::address() is its fields behind a kind, "tcp,0900…", hexadecimal. Only members of the cluster
// know it.
struct TransportAddress {
  std::string host;  // numeric
  uint16_t port = 0;
  std::string token;  // admits a caller
  std::vector<AddressRange> regions;
  bool operator==(const TransportAddress&) const = default;
};
XPYD_FIELDS(TransportAddress, host, port, token, regions)
std::string to_text(const std::string& kind, const TransportAddress& address);
Result<TransportAddress> parse_transport_address(const std::string& kind, const std::string& text);

// Sends one frame. All frames of a transport have the same type.
template <class Message>
void say(const ChannelPtr& channel, const Message& message) {
  channel->send(kFirstFrameType, to_bytes(message));
}
// Returns the callbacks of a channel. If `take` returns false, the channel is closed. `left` is called last.
ChannelEvents hear(const ChannelPtr& channel, std::function<bool(std::string_view)> take, std::function<void()> left);

// Returns a handle that closes the channel when its last copy is destroyed.
inline ChannelPtr held(const ChannelPtr& channel) {
  return {channel.get(), [channel](Channel*) { channel->close("the connection is not needed any more"); }};
}

// The result of a call, once there is one. Until then the loop's thread may keep the channel here.
template <class Connected>
class Answer {
 public:
  void set(Result<Connected> met) {
    std::lock_guard lock(mutex_);
    if (!met_) met_ = std::move(met);
  }
  std::optional<Result<Connected>> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(met_, std::nullopt);
  }
  ChannelPtr channel;  // held()

 private:
  std::mutex mutex_;
  std::optional<Result<Connected>> met_;
};

// Returns limits without heartbeat and silence timeout: peers may say nothing for hours, and a stopped peer may still
// be inside a registration.
ChannelLimits transport_limits(size_t max_frame_bytes);

class Bootstrap {
 public:
  using Accepted = std::function<ChannelEvents(const ChannelPtr&, PeerId)>;
  // `work`: as for ControlLoop.
  Bootstrap(const char* kind, PeerId self, const ChannelLimits& limits, std::function<bool()> work = nullptr);
  // Listens at a free port of options.host. `accepted` returns the callbacks of a new channel.
  Status listen(const TransportOptions& options, Accepted accepted);
  const std::string& address() const { return address_; }
  // Calls `address` with the number `session`. Returns an error if the address is invalid. When the peer admits us,
  // on_open(channel, answer) is called; a failure goes to `answer`. If nobody holds `answer` any more, the channel is
  // closed.
  template <class Connected, class OnAnswer>
  Status call(const std::string& address, uint64_t session, const std::shared_ptr<Answer<Connected>>& answer,
              OnAnswer on_open) {
    return dial(
        address, session,
        [weak = std::weak_ptr(answer), on_open](const ChannelPtr& channel) -> ChannelEvents {
          if (auto wanted = weak.lock()) return on_open(channel, wanted);
          channel->close("nobody waits for this connection");
          return {};
        },
        [weak = std::weak_ptr(answer)](const Result<ChannelPtr>& channel) {
          if (auto wanted = weak.lock(); wanted && !channel) wanted->set(channel.error());
        });
  }
  void post(std::function<void()> f) { loop_->post(std::move(f)); }
  void end() { loop_.reset(); }  // closes all channels; no callback runs afterwards

 private:
  Status dial(const std::string& address, uint64_t session, OnOpen on_open,
              std::function<void(Result<ChannelPtr>)> done);

  const std::string kind_;
  RealClock clock_;
  NodeIdentity self_;
  std::string address_;
  std::unique_ptr<ControlLoop> loop_;
};

// The calls of a transport that are not answered yet, for KvTransport::connect().
template <class Connected>
class Calls {
 public:
  Calls(const char* transport, const TransportOptions& options)
      : transport_(transport), clock_(*options.clock), connect_s_(options.connect_s) {}

  // Continues the call, or starts one with begin(answer) -> Status. Returns nothing while there is no answer. The error
  // `unavailable` ends the call.
  template <class Begin>
  Result<std::optional<Connected>> ask(PeerId peer, const std::string& address, Begin begin) {
    const auto wrong = [&](const std::string& why) {
      calls_.erase(peer);
      return Error{ErrorCode::unavailable, std::string(transport_) + ": " + address + ": " + why};
    };
    auto at = calls_.find(peer);
    if (at == calls_.end() || at->second.address != address) {
      Call fresh{address, clock_.now() + connect_s_, std::make_shared<Answer<Connected>>()};
      if (Status begun = begin(fresh.answer); !begun) return wrong(begun.error().message);
      at = calls_.insert_or_assign(peer, std::move(fresh)).first;
    }
    std::optional<Result<Connected>> met = at->second.answer->take();
    if (!met && clock_.now() < at->second.until_s) return std::optional<Connected>();
    if (!met) return wrong("the peer does not answer");
    if (!*met) return wrong(met->error().message);
    calls_.erase(at);
    return std::optional<Connected>(std::move(*met).value());
  }
  void give_up(PeerId peer) { calls_.erase(peer); }

 private:
  struct Call {
    std::string address;
    double until_s;
    std::shared_ptr<Answer<Connected>> answer;
  };
  const char* const transport_;
  Clock& clock_;
  const double connect_s_;
  std::unordered_map<PeerId, Call> calls_;
};

}  // namespace xpyd::disagg
