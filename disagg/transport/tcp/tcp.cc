// The tcp transport: several connections to each peer, and a frame takes any connection that has room. sendmsg() sends
// from the initiator's KV rows and readv() reads into the owner's KV rows, so only the kernel copies.
//
// The owner's I/O threads place every byte. They ask the registration before each readv(), and no call blocks. A
// registration therefore closes at once, whatever its peer does, and a peer reaches no memory beyond its ranges. The
// owner reads and drops the payload of a refused frame.
//
// An initiator proves that it has the token of the owner's address, which travels over control channels only. A holder
// of the token may claim to be any instance, so each remote key (`RemoteKey`) also has a secret.
//
// MSG_ZEROCOPY is left out. On loopback it is slower, because the kernel copies there anyway, and source rows would
// have to stay until the peer acknowledges them.

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "base/device/device.h"
#include "disagg/transport/bootstrap.h"
#include "disagg/transport/posting_transport.h"
#include "disagg/transport/tcp/tcp_poster.h"
#include "disagg/transport/transports.h"

namespace xpyd::disagg::tcp {
namespace {

constexpr int kMaxLinks = 4096;      // connections to one owner
constexpr size_t kMaxAnswers = 256;  // unsent answers of a link; beyond it the link reads nothing

// The owner's half: registrations, and the sessions whose connections have come. Thread safety: any thread.
struct Host {
  explicit Host(std::span<const MemoryRange> regions) : registrations(regions, true) {}
  void disconnect(PeerId peer) {
    registrations.disconnect(peer);
    ++disconnects;
  }
  // Returns the session for one more of its connections. The initiator has drawn the session's number at random. Null
  // if the session belongs to another peer.
  std::shared_ptr<InboundSession> session(uint64_t number, PeerId peer) {
    std::lock_guard lock(mutex_);
    std::erase_if(sessions_, [](const auto& entry) { return entry.second.expired(); });
    auto& entry = sessions_[number];
    auto session = entry.lock();
    if (session) return session->peer() == peer ? session : nullptr;
    entry = session = std::make_shared<InboundSession>(peer, registrations);
    return session;
  }

  RegistrationTable registrations;
  std::atomic<int> links{0};
  std::atomic<int> disconnects{0};  // after a change each link checks whether its peer is gone

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::weak_ptr<InboundSession>> sessions_;
};

class OwnerLink final : public Link {
 public:
  OwnerLink(Fd socket, Host& host, std::shared_ptr<InboundSession> session)
      : Link(std::move(socket)), host_(host), reader_(host.registrations, std::move(session)) {
    ++host_.links;
  }
  ~OwnerLink() override { --host_.links; }

  Next run() override {
    if (!flush()) return Next::close;
    for (int turn = 0; turn < kTurn; ++turn) {
      if (answers_.size() > kMaxAnswers) return Next::wait;  // until the socket has room
      const auto outcome = reader_.pump([this](iovec* where, int n) { return read_now(fd(), where, n); });
      for (auto& answer : reader_.answers()) answers_.push_back({std::move(answer), {}, {}, false});
      reader_.answers().clear();
      if (!flush()) return Next::close;
      if (outcome == TcpReader::Outcome::ended || reader_.reason()) return Next::close;
      if (outcome == TcpReader::Outcome::would_block) return given_up() ? Next::close : Next::wait;
    }
    return given_up() ? Next::close : Next::again;
  }

 private:
  struct Outgoing {
    InboundReader::Answer answer;
    Sending bytes, data;
    bool begun = false;
  };

  // True if the owner has disconnected this peer since the connection came.
  bool given_up() {
    const int disconnects = host_.disconnects;
    if (disconnects == seen_disconnects_) return false;
    seen_disconnects_ = disconnects;
    const bool was_ours = std::exchange(known_, host_.registrations.connected(reader_.peer()));
    return was_ours && !known_;
  }

  bool flush() {
    if (!known_) known_ = host_.registrations.connected(reader_.peer());
    while (!answers_.empty()) {
      from_.clear();
      bool entered = false;
      Outgoing* last = nullptr;  // the last answer of this call; its data, if any, ends the call
      for (Outgoing& out : answers_) {
        if (!std::exchange(out.begun, true)) {
          out.bytes.set({{out.answer.bytes.data(), out.answer.bytes.size()}});
          out.data.set(std::move(out.answer.ranges));
        }
        out.bytes.append_to(from_);
        if (!out.data.empty() || from_.size() >= kMaxAnswers) {
          last = &out;
          break;
        }
      }
      if (last && !last->data.empty()) {
        const FrameHead& asked = last->answer.asked;
        entered = !last->answer.refused &&
                  host_.registrations.enter(asked.registration, reader_.peer(), KvOp::read, std::span<const Copy>());
        if (!entered && !std::exchange(last->answer.refused, true)) last->data.become_zeros();
        last->data.append_to(from_);
      }
      const ssize_t n = send_now(fd(), from_);
      if (entered) host_.registrations.leave(last->answer.asked.registration, false);
      if (n < 0) return false;
      if (n == 0) return true;
      for (size_t sent = size_t(n); sent > 0;) {
        Outgoing& out = answers_.front();
        out.bytes.advance(sent);
        out.data.advance(sent);
        if (!out.bytes.empty() || !out.data.empty()) break;
        finish_front();
      }
    }
    return true;
  }

  void finish_front() {
    const InboundReader::Answer answer = std::move(answers_.front().answer);
    answers_.pop_front();
    if (answer.asked.type != FrameType::read) return;
    reader_.answer(answer.asked, KvOp::read, !answer.refused);
    for (auto& more : reader_.answers()) answers_.push_back({std::move(more), {}, {}, false});
    reader_.answers().clear();
  }

  Host& host_;
  InboundReader reader_;
  std::deque<Outgoing> answers_;
  std::vector<iovec> from_;
  bool known_ = false;  // the owner has connected to this peer
  int seen_disconnects_ = 0;
};

struct SessionTransfer {
  std::shared_ptr<PosterSession> session;
  std::shared_ptr<tcp::Transfer> post;
};

class TcpTransport final : public PostingTransport<PosterSession, SessionTransfer> {
 public:
  explicit TcpTransport(const TransportOptions& options)
      : PostingTransport("tcp", options),
        host_(options_.regions),
        calls_("tcp", options_),
        bootstrap_("tcp", options.self, transport_limits(0)) {
    const int cores = int(std::thread::hardware_concurrency());
    const int n = std::clamp(std::min(options.connections, cores / 2), 1, 8);
    for (int i = 0; i < n; ++i) loops_.push_back(std::make_unique<Loop>());
  }
  ~TcpTransport() override {
    bootstrap_.end();
    for (auto& loop : loops_) loop->stop();
  }

  Status listen() {
    return bootstrap_.listen(options_, [this](const ChannelPtr& channel, PeerId peer) -> ChannelEvents {
      auto session = host_.session(channel->peer().fingerprint, peer);
      if (!session) return {.take_over = [](const Fd&) {}};
      return {.take_over = [this, session](Fd socket) {
        if (host_.links >= kMaxLinks) return;
        loops_[accepted_++ % loops_.size()]->add(std::make_unique<OwnerLink>(std::move(socket), host_, session));
      }};
    });
  }

  std::string address() const override { return bootstrap_.address(); }

 private:
  Result<std::shared_ptr<PosterSession>> connect_peer(PeerId peer, const std::string& address) override {
    auto met = calls_.ask(peer, address, [&](const auto& answer) { return call(address, answer); });
    if (!met) return met.error();
    if (!met.value()) return std::shared_ptr<PosterSession>();
    auto& [session, sockets] = *met.value();
    for (size_t i = 0; i < sockets.size(); ++i)
      loops_[i % loops_.size()]->add(make_poster_link(std::move(sockets[i]), session));
    host_.registrations.connect(peer);
    return session;
  }
  void leave(PeerId peer, const std::shared_ptr<PosterSession>& session) override {
    calls_.give_up(peer);
    if (session) session->give_up();
    host_.disconnect(peer);
    kick();
  }
  std::shared_ptr<SessionTransfer> begin(TransferId id, const std::shared_ptr<PosterSession>& session,
                                         const KvTransfer& what, const TransferPlan& plan) override {
    auto post = std::make_shared<tcp::Transfer>();
    post->id = uint64_t(id), post->what = what;
    cut(plan, *post);
    session->add(post);
    kick();
    return std::make_shared<SessionTransfer>(SessionTransfer{session, post});
  }
  TransferState progress(SessionTransfer& transfer, bool unwanted) override {
    const TransferState state = transfer.session->poll(*transfer.post, unwanted);
    if (unwanted && state == TransferState::failed) kick();  // an abandon may have to be sent
    return state;
  }
  RegistrationTable& registrations() const override { return host_.registrations; }

  // A peer that has accepted all connections of the session.
  struct Connected {
    std::shared_ptr<PosterSession> session;
    std::vector<Fd> sockets;
  };
  Status call(const std::string& address, const std::shared_ptr<Answer<Connected>>& answer) {
    const auto to = parse_transport_address("tcp", address);
    if (!to) return to.error();
    auto met = std::make_shared<Connected>();  // only the bootstrap's I/O thread uses it from here on
    met->session = std::make_shared<PosterSession>(address);
    met->session->regions = to.value().regions;
    const size_t n = size_t(std::max(1, options_.connections));
    for (size_t i = 0; i < n; ++i) {
      const auto let_in = [met, n, weak = std::weak_ptr(answer)](Fd socket) {
        met->sockets.push_back(std::move(socket));
        auto wanted = weak.lock();
        if (wanted && met->sockets.size() == n) wanted->set(std::move(*met));
      };
      const Status calls = bootstrap_.call(address, met->session->number, answer, [let_in](const auto&, const auto&) {
        return ChannelEvents{.take_over = let_in};
      });
      if (!calls) return calls;
    }
    return ok();
  }

  void kick() {
    for (auto& loop : loops_) loop->kick();
  }

  mutable Host host_;
  Calls<Connected> calls_;
  size_t accepted_ = 0;  // only the bootstrap's I/O thread uses it
  std::vector<std::unique_ptr<Loop>> loops_;
  Bootstrap bootstrap_;
};

}  // namespace
}  // namespace xpyd::disagg::tcp

namespace xpyd::disagg {

MadeTransport make_tcp_transport(const TransportOptions& options) {
  XPYD_CHECK(options.clock);
  if (dynamic_cast<VendorQueue*>(options.queue))
    return Error{ErrorCode::unavailable,
                 "tcp: the KV is in a card's memory, which sockets cannot read; expected --transport nccl or rdma, or "
                 "local or handoff in one process"};
  auto transport = std::make_unique<tcp::TcpTransport>(options);
  if (Status status = transport->listen(); !status) return status.error();
  return std::unique_ptr<KvTransport>(std::move(transport));
}

}  // namespace xpyd::disagg
