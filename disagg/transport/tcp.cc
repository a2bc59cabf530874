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

#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "base/device.h"
#include "disagg/transport/tcp_owner.h"
#include "disagg/transport/tcp_poster.h"
#include "disagg/transport/wires.h"

namespace xpyd::tcp {
namespace {

class TcpTransport final : public KvTransport {
 public:
  TcpTransport(const TransportOptions& options, const TcpToken& token)
      : options_(options), host_(std::span(options_.regions), token) {
    const int cores = int(std::thread::hardware_concurrency());
    const int n = std::clamp(std::min(options.connections, cores / 2), 1, 8);
    for (int i = 0; i < n; ++i) loops_.push_back(std::make_unique<Loop>());
  }
  ~TcpTransport() override {
    for (auto& loop : loops_) loop->stop();
  }

  Status listen(const TcpToken& token) {
    AddressInfo at = look_up(options_.host, "0", AI_NUMERICHOST | AI_PASSIVE);
    if (!at) return invalid("tcp: --host " + options_.host + ": not an IP address of this machine");
    const int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_storage bound{};
    socklen_t length = sizeof bound;
    char port[16], host[128];
    if (fd < 0 || bind(fd, at->ai_addr, at->ai_addrlen) != 0 || ::listen(fd, 512) != 0 ||
        getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0 ||
        getnameinfo(reinterpret_cast<sockaddr*>(&bound), length, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
      const Error error{ErrorCode::unavailable, "tcp: " + options_.host + ": " + os_text()};
      if (fd >= 0) ::close(fd);
      return error;
    }
    const bool v6 = bound.ss_family == AF_INET6;
    address_ = std::string("tcp:") + (v6 ? "[" : "") + host + (v6 ? "]" : "") + ":" + port + ":";
    for (uint8_t byte : token) {
      char hex[3];
      std::snprintf(hex, sizeof hex, "%02x", byte);
      address_ += hex;
    }
    loops_[0]->add(
        std::make_unique<Listener>(fd, host_, [this]() -> Loop& { return *loops_[accepted_++ % loops_.size()]; }));
    return ok();
  }

  std::string address() const override { return address_; }

  Result<bool> connect(PeerId peer, const std::string& address) override {
    if (auto known = peers_.find(peer); known != peers_.end() && !known->second->dead) {
      if (known->second->address == address) return true;
      return invalid("tcp: instance " + std::to_string(peer) + " has another address already");
    }
    auto call = calls_.find(peer);
    if (call == calls_.end() || call->second.session->address != address) {
      auto parsed = parse_address(address);
      if (!parsed.ok()) return parsed.error();
      Call fresh{std::make_shared<PosterSession>(peer, address), {}, options_.clock->now() + options_.connect_s};
      const TcpHello hello{kTcpMagic, fresh.session->id, parsed.value().token, options_.self};
      for (int i = 0; i < std::max(1, options_.connections); ++i) fresh.dials.emplace_back(parsed.value(), hello);
      call = calls_.insert_or_assign(peer, std::move(fresh)).first;
    }
    const Result<bool> let_in = go_on(call->second);
    if (let_in && !let_in.value()) return false;
    Call done = std::move(call->second);
    calls_.erase(call);
    if (!let_in) return unreachable(address, let_in.error().message);
    done.session->regions = done.dials[0].regions();
    for (size_t i = 0; i < done.dials.size(); ++i)
      loops_[i % loops_.size()]->add(tcp::make_poster_link(done.dials[i].release(), done.session));
    peers_[peer] = done.session;
    host_.windows.connect(peer);
    return true;
  }
  void disconnect(PeerId peer) override {
    calls_.erase(peer);
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
    return reinterpret_cast<std::byte*>(uintptr_t(found->second->regions[size_t(region)].address));
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
    stats.refused = host_.windows.refused();
    return stats;
  }

 private:
  // A peer that has not let all connections in yet.
  struct Call {
    std::shared_ptr<PosterSession> session;
    std::vector<Dial> dials;
    double until_s;  // Clock
  };
  Result<bool> go_on(Call& call) {
    bool all = true;
    for (Dial& dial : call.dials) {
      const int before = dial.stage();
      const Result<bool> let_in = dial.go_on();
      if (!let_in) return let_in;
      all &= let_in.value();
      // The last call may have been a long step of the engine ago.
      if (dial.stage() != before) call.until_s = options_.clock->now() + options_.connect_s;
    }
    if (!all && options_.clock->now() >= call.until_s) return Error{ErrorCode::unavailable, "it does not answer"};
    return all;
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
  std::string address_;
  std::unordered_map<PeerId, Call> calls_;
  std::unordered_map<PeerId, std::shared_ptr<PosterSession>> peers_;
  std::unordered_map<TransferId, InFlight> transfers_;
  TransferId last_id_ = 0;
  TransportStats stats_;
  size_t accepted_ = 0;  // of the first loop's thread
  std::vector<std::unique_ptr<Loop>> loops_;
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
  tcp::TcpToken token;
  for (size_t half : {0, 1}) {
    const uint64_t random = random_secret();
    std::memcpy(token.data() + 8 * half, &random, sizeof random);
  }
  auto transport = std::make_unique<tcp::TcpTransport>(options, token);
  if (Status status = transport->listen(token); !status.ok()) return status.error();
  return std::unique_ptr<KvTransport>(std::move(transport));
}

}  // namespace xpyd
