// The nccl transport: memory of CUDA devices, by NCCL's point-to-point calls (ncclSend, ncclRecv). NCCL is two-sided
// and has no permissions. On a side channel the initiator therefore asks for each group of calls, and the owner checks
// the registration. Then both enqueue their halves on streams of the transport, or neither does.
//
//   initiator's Link                  owner's Client
//     ask(key, ranges)     ────────>  is all of it inside an open registration?  enter it
//                          <────────  accepted, or refused
//     ncclSend…            ── go ──>  ncclRecv…
//                          <────────  placed: the stream has passed the group; arrived() counts the last
//
// Each pair of instances and direction has a communicator of two ranks. The initiator is rank 0 and decides the order,
// so the order of groups in different communicators cannot lock two instances up. Only the bootstrap's I/O thread calls
// NCCL, and no call blocks (communicators are made with blocking = 0).
#include <map>
#include <unordered_map>

#include "base/device/device.h"
#include "disagg/transport/nccl/nccl_link.h"
#include "disagg/transport/posting_transport.h"
#include "disagg/transport/transports.h"

namespace xpyd::disagg::nccl {
namespace {

// The owner's half: a client, which has called this instance, and its communicators, in which this instance is rank 1.
// A group enters its registration when the owner accepts it. It leaves when the peer drops it, or when the owner's half
// has run or was broken off. While a group is accepted, the registration cannot close and its blocks stay in
// quarantine: until the peer goes on, its channel ends, or disconnect() is called. Thread safety: the bootstrap's I/O
// thread.
class Client {
 public:
  using MakePipe = std::function<std::unique_ptr<Pipe>(const NcclUniqueId& id, int rank)>;
  Client(PeerId peer, MakePipe make_pipe, RegistrationTable& registrations, ChannelPtr channel)
      : peer_(peer), make_pipe_(std::move(make_pipe)), registrations_(registrations), channel_(std::move(channel)) {}
  ~Client();

  PeerId peer() const { return peer_; }
  bool take(std::string_view body);  // handles a message; false: an initiator does not send this
  // Gives the client up, because its channel has ended or it was disconnected.
  void end(const std::string& why = "it was disconnected");
  bool turn();  // continues all work; true: call it again soon
  bool gone() const { return ended_ && !pipe_; }

 private:
  struct Held {  // an accepted group
    Ask ask;
    bool going = false;
  };
  bool accept(uint64_t seq, const Ask& ask);
  void go(uint64_t seq, const Ask& ask);
  void ended(uint64_t seq, bool whole);
  void say(Message::Kind kind, uint64_t seq);

  const PeerId peer_;
  const MakePipe make_pipe_;
  RegistrationTable& registrations_;
  const ChannelPtr channel_;
  std::unique_ptr<Pipe> pipe_;  // null: not made, or the client has ended and the pipe has run empty
  std::map<uint64_t, Held> held_;
  uint64_t last_seq_ = 0;
  // The transfer whose groups run now, and how many have run; they run in order.
  uint64_t post_ = 0;
  uint32_t placed_ = 0;
  bool ended_ = false;
};

Client::~Client() {
  pipe_.reset();
  for (const auto& [seq, held] : held_) registrations_.leave(held.ask.registration, false);
}

void Client::say(Message::Kind kind, uint64_t seq) { disagg::say(channel_, Message{.kind = kind, .seq = seq}); }

bool Client::take(std::string_view body) {
  const auto read = read_message(body);
  if (!read || ended_) return false;
  const Message& message = read.value();
  const uint64_t seq = message.seq;
  if (message.kind == Message::join) {
    if (pipe_) return false;
    pipe_ = make_pipe_(*message.id, 1);
    return true;
  }
  if (message.kind == Message::ask) return seq > std::exchange(last_seq_, seq) && accept(seq, *message.asked);
  const auto at = held_.find(seq);
  if (at == held_.end() || at->second.going) return false;
  if (message.kind == Message::go) {
    at->second.going = true;
    go(seq, at->second.ask);
    return true;
  }
  if (message.kind != Message::drop) return false;
  registrations_.leave(at->second.ask.registration, false);
  held_.erase(at);
  return true;
}

bool Client::accept(uint64_t seq, const Ask& ask) {
  if (!pipe_ || held_.size() >= kMaxAhead) return false;
  std::vector<Copy> copies;
  for (const AddressRange& range : ask.ranges) {
    auto* here = reinterpret_cast<std::byte*>(range.begin);
    copies.push_back({here, here, range.bytes});
  }
  const bool may = registrations_.enter(ask.registration, peer_, ask.op, copies);
  if (may) held_[seq] = {ask};
  say(may ? Message::accepted : Message::refused, seq);
  return true;
}

void Client::go(uint64_t seq, const Ask& ask) {
  std::vector<MemoryRange> parts;
  for (const AddressRange& range : ask.ranges)
    parts.push_back({reinterpret_cast<std::byte*>(range.begin), range.bytes});
  pipe_->enqueue(seq, ask.op == KvOp::read, std::move(parts));
}

void Client::ended(uint64_t seq, bool whole) {
  const Ask ask = std::move(held_.at(seq).ask);
  held_.erase(seq);
  if (whole && ask.group == 0) post_ = ask.post, placed_ = 0;
  const bool next = whole && ask.post == post_ && ask.group == placed_;
  placed_ += next;
  const bool counted = registrations_.leave(ask.registration, next && placed_ == ask.n_groups);
  say(counted && next ? Message::placed : Message::lost, seq);
}

void Client::end(const std::string& why) {
  if (std::exchange(ended_, true)) return;
  channel_->close(why);
  if (pipe_) pipe_->abort("the peer is gone");
  std::erase_if(held_, [&](const auto& held) {
    if (held.second.going) return false;
    registrations_.leave(held.second.ask.registration, false);
    return true;
  });
}

bool Client::turn() {
  if (!pipe_) return false;
  const bool soon = pipe_->turn([this](uint64_t seq, bool whole) { ended(seq, whole); });
  if (pipe_->overdue() || pipe_->state() == Pipe::State::broken) end();
  if (pipe_->state() == Pipe::State::broken && pipe_->empty()) pipe_.reset();
  return soon;
}

struct Peer {
  std::shared_ptr<Link> link;
  std::string address;
  std::vector<AddressRange> regions;
  bool dead() const { return link->dead(); }
};
struct LinkTransfer {
  std::shared_ptr<nccl::Transfer> post;
  std::shared_ptr<Link> link;
  std::optional<int64_t> mark;  // write: of the instance's queue, behind the work that fills the source rows
  bool submitted = false;
};

class NcclTransport final : public PostingTransport<Peer, LinkTransfer> {
 public:
  NcclTransport(const TransportOptions& options, const NcclApi& api)
      : PostingTransport("nccl", options),
        api_(api),
        registrations_(options.regions, true),
        calls_("nccl", options_),
        bootstrap_("nccl", options.self, transport_limits(kMaxMessageBytes),
                   [this] { return turn(); }) {}
  ~NcclTransport() override {
    registrations_.shut();
    bootstrap_.end();
    transfers_.clear(), peers_.clear();  // with the last of their links
  }

  Status start() {
    return bootstrap_.listen(options_, [this](const ChannelPtr& channel, PeerId peer) {
      auto client = std::make_shared<Client>(peer, make_pipe(), registrations_, channel);
      clients_.push_back(client);
      return hear_end(channel, client);
    });
  }

  std::string address() const override { return bootstrap_.address(); }

 private:
  static constexpr double kReclaimSeconds = 5;

  // Waits first for the answer of the peer's process, and then for the communicator.
  Result<std::shared_ptr<Peer>> connect_peer(PeerId peer, const std::string& address) override {
    auto at = joining_.find(peer);
    if (at != joining_.end() && at->second->address != address) {
      give_up_call(peer);
      at = joining_.end();
    }
    if (at == joining_.end()) {
      auto met = calls_.ask(peer, address, [&](const auto& answer) { return call(address, answer); });
      if (!met) return met.error();
      if (!met.value()) return std::shared_ptr<Peer>();
      const auto regions = parse_transport_address("nccl", address).value().regions;
      at = joining_.emplace(peer, std::make_shared<Peer>(Peer{*met.value(), address, regions})).first;
    }
    if (!at->second->link->settled()) return std::shared_ptr<Peer>();  // the link gives up after kJoinSeconds
    auto joined = std::move(at->second);
    joining_.erase(at);
    if (joined->dead())
      return Error{ErrorCode::unavailable, "instance " + std::to_string(peer) + " over nccl: " + joined->link->why()};
    registrations_.connect(peer);
    return joined;
  }
  void leave(PeerId peer, const std::shared_ptr<Peer>& known) override {
    give_up_call(peer);
    registrations_.disconnect(peer);
    bootstrap_.post([this, peer, known] {
      if (known) known->link->end("it was disconnected");
      for (const auto& client : clients_)
        if (client->peer() == peer) client->end();
    });
  }
  std::shared_ptr<LinkTransfer> begin(TransferId id, const std::shared_ptr<Peer>& peer, const KvTransfer& what,
                                      const TransferPlan& plan) override {
    auto transfer = std::make_shared<LinkTransfer>(
        LinkTransfer{std::make_shared<nccl::Transfer>(uint64_t(id), what, plan.copies), peer->link});
    // The source rows are complete when the instance's queue has reached this mark.
    if (what.op == KvOp::write) transfer->mark = options_.queue->mark();
    submit(*transfer);
    return transfer;
  }
  TransferState progress(LinkTransfer& transfer, bool unwanted) override {
    if (unwanted && !transfer.submitted) return TransferState::failed;
    submit(transfer);
    const TransferState state = transfer.post->state;
    if (unwanted && state == TransferState::in_flight && transfer.post->wanted.exchange(false)) bootstrap_.post([] {});
    return state;
  }
  RegistrationTable& registrations() const override { return registrations_; }

  void submit(LinkTransfer& transfer) {
    if (transfer.submitted || (transfer.mark && !options_.queue->reached(*transfer.mark))) return;
    transfer.submitted = true;
    bootstrap_.post([link = transfer.link, post = transfer.post] { link->add(post); });
  }
  void give_up_call(PeerId peer) {
    calls_.give_up(peer);
    joining_.erase(peer);
    bootstrap_.post([] {});  // wakes turn(), which ends links that have no other user
  }
  Status call(const std::string& text, const std::shared_ptr<Answer<std::shared_ptr<Link>>>& answer) {
    return bootstrap_.call(text, 0, answer, [this](const ChannelPtr& channel, const auto& wanted) {
      auto link = std::make_shared<Link>(api_, make_pipe(), channel);
      links_.push_back(link);
      link->start();
      wanted->set(link);
      return hear_end(channel, link);
    });
  }
  // `End` is Link or Client.
  template <class End>
  static ChannelEvents hear_end(const ChannelPtr& channel, const std::shared_ptr<End>& end) {
    return hear(
        channel,
        [weak = std::weak_ptr(end)](std::string_view body) {
          auto held = weak.lock();
          return held && held->take(body);
        },
        [weak = std::weak_ptr(end)] {
          if (auto held = weak.lock()) held->end("the peer closed the connection");
        });
  }
  Link::MakePipe make_pipe() {
    return [this](const NcclUniqueId& id, int rank) {
      auto queue = dynamic_cast<VendorQueue&>(*options_.queue).make_beside();
      return std::make_unique<nccl::Pipe>(api_, std::move(queue), id, rank);
    };
  }

  // Runs on the bootstrap's I/O thread.
  bool turn() {
    bool soon = false;
    for (const auto& link : links_) {
      if (link.use_count() == 1)
        link->end("the connection attempt was given up");  // no peer, call or transfer holds it
      soon |= link->turn();
    }
    for (const auto& client : clients_) soon |= client->turn();
    std::erase_if(links_, [](const auto& link) { return link->gone(); });
    std::erase_if(clients_, [](const auto& client) { return client->gone(); });
    return soon;
  }

  struct AtLast {
    ~AtLast() { await_aborted(kReclaimSeconds); }
  } at_last_;  // destroyed after all members below
  const NcclApi& api_;
  mutable RegistrationTable registrations_;
  Calls<std::shared_ptr<Link>> calls_;
  std::unordered_map<PeerId, std::shared_ptr<Peer>> joining_;  // their communicators are not ready yet
  std::vector<std::shared_ptr<Link>> links_;                   // only the bootstrap's I/O thread uses it
  std::vector<std::shared_ptr<Client>> clients_;               // only the bootstrap's I/O thread uses it
  Bootstrap bootstrap_;
};

Status check_queue(const TransportOptions& options) {
  if (dynamic_cast<VendorQueue*>(options.queue)) return ok();
  return Error{ErrorCode::unavailable,
               "nccl: the KV is in host memory, but NCCL transfers memory of CUDA cards; build with `make CUDA=1` and "
               "serve with --device cuda, or use --transport tcp"};
}

}  // namespace
}  // namespace xpyd::disagg::nccl

namespace xpyd::disagg {

MadeTransport make_nccl_transport(const TransportOptions& options, const NcclApi& api) {
  XPYD_CHECK(options.queue && options.clock);
  if (Status suits = nccl::check_queue(options); !suits) return suits.error();
  auto made = std::make_unique<nccl::NcclTransport>(options, api);
  if (Status started = made->start(); !started) return started.error();
  return std::unique_ptr<KvTransport>(std::move(made));
}

MadeTransport make_nccl_transport(const TransportOptions& options) {
  XPYD_CHECK(options.queue && options.clock);
  if (Status suits = nccl::check_queue(options); !suits) return suits.error();
  auto api = load_nccl();
  if (!api) return api.error();
  return make_nccl_transport(options, *api.value());
}

}  // namespace xpyd::disagg
