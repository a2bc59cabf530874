// tcp: several connections to each peer, over which a post's frames go as each has room. Bytes go
// from the poster's rows into the socket (sendmsg) and from the socket into the owner's rows
// (readv), with no copy of ours in between.
//
// The owner's own thread places every byte, and asks the window before each readv; none blocks. So
// a window is closed at once, whatever the peer does, and nobody reaches memory that it was not
// given. A frame that is refused is read and dropped.
//
// A poster proves itself with the token of the owner's address, which only travels over control
// channels. Whoever holds it may say which instance it is; a window's key holds a secret.
//
// MSG_ZEROCOPY is left out: over loopback it is slower (the kernel copies there all the same), and
// source rows would have to stay until the peer's acknowledgements.

#include <algorithm>

#include "base/device.h"
#include "disagg/transport/meeting.h"
#include "disagg/transport/tcp_owner.h"
#include "disagg/transport/tcp_poster.h"
#include "disagg/transport/wires.h"

namespace xpyd::tcp {
namespace {

class TcpTransport final : public KvTransport {
 public:
  explicit TcpTransport(const TransportOptions& options)
      : options_(options),
        host_(options_.regions),
        calls_("tcp", options),
        meeting_("tcp", options.self, kTcpVersion, wire_limits(0)) {
    const int cores = int(std::thread::hardware_concurrency());
    const int n = std::clamp(std::min(options.connections, cores / 2), 1, 8);
    for (int i = 0; i < n; ++i) loops_.push_back(std::make_unique<Loop>());
  }
  ~TcpTransport() override {
    meeting_.end();
    for (auto& loop : loops_) loop->stop();
  }

  Status listen() {
    return meeting_.listen(options_, [this](const ChannelPtr& channel, PeerId peer) -> ChannelEvents {
      auto session = host_.session(channel->peer().fingerprint, peer);
      if (!session) return {.take_over = [this](const Fd&) { host_.windows.count_refused(); }};
      return {.take_over = [this, session](Fd socket) {
        if (auto link = make_owner_link(std::move(socket), host_, session))
          loops_[accepted_++ % loops_.size()]->add(std::move(link));
      }};
    });
  }

  std::string address() const override { return meeting_.address(); }

  Result<bool> connect(PeerId peer, const std::string& address) override {
    if (auto known = peers_.find(peer); known != peers_.end() && !known->second->dead) {
      if (known->second->address == address) return true;
      return invalid("tcp: instance " + std::to_string(peer) + " has another address already");
    }
    auto met = calls_.ask(peer, address, [&](const auto& answer) { return call(address, answer); });
    if (!met) return met.error();
    if (!met.value()) return false;
    auto& [session, sockets] = *met.value();
    for (size_t i = 0; i < sockets.size(); ++i)
      loops_[i % loops_.size()]->add(make_poster_link(std::move(sockets[i]), session));
    peers_[peer] = session;
    host_.windows.connect(peer);
    return true;
  }
  void disconnect(PeerId peer) override {
    calls_.give_up(peer);
    if (auto at = peers_.find(peer); at != peers_.end()) {
      at->second->dead = true;
      peers_.erase(at);
    }
    host_.disconnect(peer);
    kick();
  }
  std::byte* remote(PeerId peer, int region) const override {
    auto found = peers_.find(peer);
    if (found == peers_.end() || size_t(region) >= found->second->regions.size()) return nullptr;
    return reinterpret_cast<std::byte*>(uintptr_t(found->second->regions[size_t(region)].begin));
  }

  Result<WindowKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) override {
    return host_.windows.open(peer, op, ranges);
  }
  bool close(const WindowKey& window) override { return host_.windows.close(window); }
  int arrived(const WindowKey& window) const override { return host_.windows.arrived(window); }

  TransferId post(const KvTransfer& what, const TransferPlan& plan) override {
    const TransferId id = ++last_id_;
    ++stats_.posts;
    InFlight& transfer = transfers_[id];
    auto peer = peers_.find(what.peer);
    if (peer == peers_.end() || late(what)) return id;
    transfer.session = peer->second;
    transfer.post = std::make_shared<Post>();
    Post& post = *transfer.post;
    post.id = uint64_t(id), post.what = what, post.bytes = plan.bytes;
    post.descriptors = int64_t(plan.copies.size());
    cut(plan, post);
    transfer.session->add(transfer.post);
    kick();
    return id;
  }

  TransferState poll(TransferId id) override {
    auto at = transfers_.find(id);
    XPYD_CHECK(at != transfers_.end(), "poll of a transfer that is not known");
    TransferState state = TransferState::failed;
    if (Post* post = at->second.post.get()) {
      const bool give_up = at->second.cancelled || late(post->what);
      state = at->second.session->poll(*post, give_up);
      if (give_up && state == TransferState::failed) kick();  // there may be an abandon to send
      if (state == TransferState::in_flight) return state;
      if (state == TransferState::done) stats_.bytes += int64_t(post->bytes), stats_.descriptors += post->descriptors;
    }
    stats_.failed += state == TransferState::failed;
    transfers_.erase(at);
    return state;
  }

  void cancel(TransferId id) override {
    if (auto at = transfers_.find(id); at != transfers_.end()) at->second.cancelled = true;
  }
  TransportStats stats() const override {
    TransportStats stats = stats_;
    stats.refused = host_.windows.refused() + meeting_.refused();
    return stats;
  }

 private:
  // A peer that has let all connections in.
  struct Met {
    std::shared_ptr<PosterSession> session;
    std::vector<Fd> sockets;
  };
  Status call(const std::string& address, const std::shared_ptr<Answer<Met>>& answer) {
    const auto to = parse_wire_address("tcp", address);
    if (!to) return to.error();
    auto met = std::make_shared<Met>();  // the loop's thread's
    met->session = std::make_shared<PosterSession>(address);
    met->session->regions = to.value().regions;
    const size_t n = size_t(std::max(1, options_.connections));
    for (size_t i = 0; i < n; ++i) {
      const auto let_in = [met, n, weak = std::weak_ptr(answer)](Fd socket) {
        met->sockets.push_back(std::move(socket));
        auto wanted = weak.lock();
        if (wanted && met->sockets.size() == n) wanted->set(std::move(*met));
      };
      const Status calls = meeting_.call(address, met->session->number, answer, [let_in](const auto&, const auto&) {
        return ChannelEvents{.take_over = let_in};
      });
      if (!calls) return calls;
    }
    return ok();
  }

  struct InFlight {
    std::shared_ptr<PosterSession> session;
    std::shared_ptr<Post> post;  // null: it has failed already
    bool cancelled = false;
  };

  bool late(const KvTransfer& what) const { return what.deadline_s > 0 && options_.clock->now() >= what.deadline_s; }
  void kick() {
    for (auto& loop : loops_) loop->kick();
  }

  const TransportOptions options_;
  Host host_;
  Calls<Met> calls_;
  std::unordered_map<PeerId, std::shared_ptr<PosterSession>> peers_;
  std::unordered_map<TransferId, InFlight> transfers_;
  TransferId last_id_ = 0;
  TransportStats stats_;
  size_t accepted_ = 0;  // the meeting's thread's
  std::vector<std::unique_ptr<Loop>> loops_;
  Meeting meeting_;
};

}  // namespace
}  // namespace xpyd::tcp

namespace xpyd {

MadeTransport make_tcp_transport(const TransportOptions& options) {
  XPYD_CHECK(options.clock);
  if (dynamic_cast<VendorQueue*>(options.queue))
    return Error{ErrorCode::unavailable,
                 "tcp: the KV is in a card's memory, which sockets cannot read; expected "
                 "--transport nccl or rdma, or local or handoff in one process"};
  auto transport = std::make_unique<tcp::TcpTransport>(options);
  if (Status status = transport->listen(); !status) return status.error();
  return std::unique_ptr<KvTransport>(std::move(transport));
}

}  // namespace xpyd
