// Where the two ends of a wire meet, before bytes go their own way (tcp: bulk frames on the same sockets; rdma; nccl)
// or beside them: channels (disagg/net/channel.h) of a loop of the wire's own. The owner of memory listens, and says in
// its address where, with which token, and where its memory lies; who calls proves by its hello that it has the token.
// When a process dies its channels end at once, which is how the other side learns of it: RDMA itself would retry for
// seconds, NCCL would wait for ever. A peer that is only stopped stays connected. Processes of one user and host (shm,
// handoff) meet at a Unix socket of an abstract, random name instead, on which descriptors cross.
//
// Thread safety: Bootstrap: its owner's thread; callbacks come on the loop's. Calls: its owner's thread; Answer: any.
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

// KvTransport::address() of such a wire: KIND,HOST,PORT,TOKEN,BASE+BYTES,..., text without blanks, known to the cluster
// only.
struct TransportAddress {
  std::string host;  // numeric, without commas
  uint16_t port = 0;
  std::string token;  // what lets somebody in: 32 hexadecimal digits
  std::vector<AddressRange> regions;
  bool operator==(const TransportAddress&) const = default;
};
std::string to_text(const std::string& kind, const TransportAddress& address);
Result<TransportAddress> parse_transport_address(const std::string& kind, const std::string& text);

// One frame, of the kind that all of a wire's are.
template <class Message>
void say(const ChannelPtr& channel, const Message& message) {
  channel->send(kFirstFrameType, to_bytes(message));
}
// Listens: `take` false, the peer talks nonsense and is hung up on; `left` is the last call.
ChannelEvents hear(const ChannelPtr& channel, std::function<bool(std::string_view)> take, std::function<void()> left);

// A channel that is closed when nobody holds this any more.
inline ChannelPtr held(const ChannelPtr& channel) {
  return {channel.get(), [channel](Channel*) { channel->close("it is not needed any more"); }};
}

// What a call gives, once it does; until then, on the loop's thread, its channel.
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

// Channels that end only when a process ends one, or itself: nothing is said on them for hours, and a peer that is
// stopped is still inside what it was let into.
ChannelLimits transport_limits(size_t max_frame_bytes, size_t max_files = 0);

class Bootstrap {
 public:
  using Accepted = std::function<ChannelEvents(const ChannelPtr&, PeerId)>;
  // `schema`: of what the ends tell each other. `log`, `work`: ControlLoop's.
  Bootstrap(const char* kind, PeerId self, uint64_t schema, const ChannelLimits& limits,
            std::function<bool()> work = nullptr, std::function<void(const std::string&)> log = nullptr);
  // Callers come to `accepted`, which gives what listens to the channel. At a port of options.host; or here.
  Status listen(const TransportOptions& options, Accepted accepted);
  Status listen_here(Accepted accepted);  // KIND:@NAME
  const std::string& address() const { return address_; }
  // Calls, as the session of that number. Error: the address is none. Who lets us in comes to on_open(channel, answer);
  // a failure, to the answer. Where nobody waits for that any more, who lets us in is hung up on.
  template <class Connected, class OnAnswer>
  Status call(const std::string& address, uint64_t session, const std::shared_ptr<Answer<Connected>>& answer,
              OnAnswer on_open) {
    return dial(
        address, session,
        [weak = std::weak_ptr(answer), on_open](const ChannelPtr& channel) -> ChannelEvents {
          if (auto wanted = weak.lock()) return on_open(channel, wanted);
          channel->close("nobody waits for it");
          return {};
        },
        [weak = std::weak_ptr(answer)](const Result<ChannelPtr>& channel) {
          if (auto wanted = weak.lock(); wanted && !channel) wanted->set(channel.error());
        });
  }
  void post(std::function<void()> f) { loop_->post(std::move(f)); }
  int64_t refused() const { return loop_->stats().garbage; }  // strangers
  void end() { loop_.reset(); }                               // closes all channels; no callback runs afterwards

 private:
  Result<std::string> listen_at(const std::string& place, const std::string& token, Accepted accepted);
  Status dial(const std::string& address, uint64_t session, OnOpen on_open,
              std::function<void(Result<ChannelPtr>)> done);

  const std::string kind_;
  RealClock clock_;
  NodeIdentity self_;
  std::string address_;
  std::unique_ptr<ControlLoop> loop_;
};

// The calls of a transport that are not answered: KvTransport::connect(), up to what was met.
template <class Connected>
class Calls {
 public:
  Calls(const char* transport, const TransportOptions& options)
      : transport_(transport), clock_(*options.clock), connect_s_(options.connect_s) {}

  // Goes on, or begins with begin(answer) -> Status. Nothing: not yet; the error `unavailable` ends the call.
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
    if (!met) return wrong("it does not answer");
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
