// nccl: memory of CUDA cards, by NCCL's point-to-point calls (ncclSend, ncclRecv). NCCL is
// two-sided and knows no permissions, so a side channel goes with it: the poster asks for each
// group of calls, the owner looks at the window, and both enqueue their halves on streams of the
// wire's own, or neither does.
//
//   poster's link                     owner's guest
//     ask(window, ranges)  ────────>  open? its generation? inside?  enter the window
//                          <────────  accepted, or refused
//     ncclSend…            ── go ──>  ncclRecv…
//                          <────────  placed: the stream has got past it; arrived() + 1
//
// A communicator of two ranks for each pair and direction: the poster is rank 0 and decides the
// order, so no order between communicators can lock two instances up. All of NCCL is called from
// the meeting's thread, and no call blocks (communicators are made with blocking = 0).
#include <unordered_map>

#include "base/device.h"
#include "disagg/transport/nccl_guest.h"
#include "disagg/transport/nccl_link.h"
#include "disagg/transport/wires.h"

namespace xpyd::nccl {
namespace {

class NcclTransport final : public KvTransport {
 public:
  NcclTransport(const TransportOptions& options, const NcclApi& api)
      : options_(options),
        api_(api),
        windows_(options.regions, true),
        calls_("nccl", options_),
        meeting_("nccl", options.self, schema_of<nccl::Message>(), wire_limits(kMaxMessageBytes),
                 [this] { return turn(); }) {}
  ~NcclTransport() override {
    windows_.shut();
    meeting_.end();
  }

  Status start() {
    return meeting_.listen(options_, [this](const ChannelPtr& channel, PeerId peer) {
      auto guest = std::make_shared<Guest>(peer, make_pipe(), windows_, channel);
      guests_.push_back(guest);
      return hear_end(channel, guest);
    });
  }

  std::string address() const override { return meeting_.address(); }

  // Two answers are waited for: of the peer's process, and then of NCCL, in both processes.
  Result<bool> connect(PeerId peer, const std::string& text) override {
    if (auto known = peers_.find(peer); known != peers_.end() && !known->second.link->dead()) {
      if (known->second.text == text) return true;
      return invalid("nccl: instance " + std::to_string(peer) + " has another address already");
    }
    auto at = joining_.find(peer);
    if (at != joining_.end() && at->second.text != text) {
      give_up_call(peer);
      at = joining_.end();
    }
    if (at == joining_.end()) {
      auto met = calls_.ask(peer, text, [&](const auto& answer) { return call(text, answer); });
      if (!met) return met.error();
      if (!met.value()) return false;
      at = joining_.emplace(peer, Peer{*met.value(), text, parse_wire_address("nccl", text).value().regions}).first;
    }
    if (!at->second.link->settled()) return false;  // the link gives up after kJoinSeconds
    const Peer joined = std::move(at->second);
    joining_.erase(at);
    if (joined.link->dead())
      return Error{ErrorCode::unavailable, "instance " + std::to_string(peer) + " over nccl: " + joined.link->why()};
    peers_[peer] = joined;
    windows_.connect(peer);
    return true;
  }

  void disconnect(PeerId peer) override {
    give_up_call(peer);
    windows_.disconnect(peer);
    std::shared_ptr<Link> link;
    if (auto at = peers_.find(peer); at != peers_.end()) {
      link = at->second.link;
      peers_.erase(at);
    }
    meeting_.post([this, peer, link] {
      if (link) link->end("it was disconnected");
      for (const auto& guest : guests_)
        if (guest->peer() == peer) guest->end();
    });
  }

  std::byte* remote(PeerId peer, int region) const override {
    auto found = peers_.find(peer);
    if (found == peers_.end() || size_t(region) >= found->second.regions.size()) return nullptr;
    return reinterpret_cast<std::byte*>(found->second.regions[size_t(region)].begin);
  }

  Result<WindowKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) override {
    return windows_.open(peer, op, ranges);
  }
  bool close(const WindowKey& window) override { return windows_.close(window); }
  int arrived(const WindowKey& window) const override { return windows_.arrived(window); }

  TransferId post(const KvTransfer& what, const TransferPlan& plan) override {
    const TransferId id = ++last_id_;
    ++stats_.posts;
    Transfer& transfer = transfers_[id];
    auto peer = peers_.find(what.peer);
    if (peer == peers_.end() || peer->second.link->dead() || late(what)) return id;
    transfer = {.post = std::make_shared<nccl::Post>(uint64_t(id), what, plan.copies),
                .link = peer->second.link,
                .bytes = int64_t(plan.bytes),
                .descriptors = int64_t(plan.copies.size())};
    // The source is there when the instance's queue has got as far as this.
    if (what.op == KvOp::write) transfer.mark = options_.queue->mark();
    submit(transfer);
    return id;
  }

  TransferState poll(TransferId id) override {
    auto at = transfers_.find(id);
    XPYD_CHECK(at != transfers_.end(), "poll of a transfer that is not known");
    Transfer& transfer = at->second;
    TransferState state = TransferState::failed;
    if (transfer.post) {
      const bool unwanted = transfer.cancelled || late(transfer.post->what);
      if (transfer.submitted || !unwanted) {
        submit(transfer);
        state = transfer.post->state;
      }
      if (state == TransferState::in_flight) {
        if (unwanted && transfer.post->wanted.exchange(false)) meeting_.post([] {});
        return state;
      }
      if (state == TransferState::done) stats_.bytes += transfer.bytes, stats_.descriptors += transfer.descriptors;
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
    stats.refused = windows_.refused() + meeting_.refused();
    return stats;
  }

 private:
  static constexpr double kReclaimSeconds = 5;
  struct Peer {
    std::shared_ptr<Link> link;
    std::string text;
    std::vector<AddressRange> regions;
  };
  struct Transfer {
    std::shared_ptr<nccl::Post> post;  // null: it has failed already
    std::shared_ptr<Link> link;
    int64_t bytes = 0, descriptors = 0;
    std::optional<int64_t> mark;  // of the instance's queue
    bool submitted = false, cancelled = false;
  };

  bool late(const KvTransfer& what) const { return what.deadline_s > 0 && options_.clock->now() >= what.deadline_s; }
  void submit(Transfer& transfer) {
    if (transfer.submitted || (transfer.mark && !options_.queue->reached(*transfer.mark))) return;
    transfer.submitted = true;
    meeting_.post([link = transfer.link, post = transfer.post] { link->add(post); });
  }
  void give_up_call(PeerId peer) {
    calls_.give_up(peer);
    joining_.erase(peer);
    meeting_.post([] {});  // turn() sees that nobody has its link
  }
  Status call(const std::string& text, const std::shared_ptr<Answer<std::shared_ptr<Link>>>& answer) {
    return meeting_.call(text, 0, answer, [this](const ChannelPtr& channel, const auto& wanted) {
      auto link = std::make_shared<Link>(api_, make_pipe(), channel);
      links_.push_back(link);
      link->start();
      wanted->set(link);
      return hear_end(channel, link);
    });
  }
  // A Link or a Guest.
  template <class End>
  static ChannelEvents hear_end(const ChannelPtr& channel, const std::shared_ptr<End>& end) {
    return hear(
        channel,
        [weak = std::weak_ptr(end)](std::string_view body) {
          auto held = weak.lock();
          return held && held->take(body);
        },
        [weak = std::weak_ptr(end)] {
          if (auto held = weak.lock()) held->end("it has hung up");
        });
  }
  Link::MakePipe make_pipe() {
    return [this](const NcclUniqueId& id, int rank) {
      auto queue = dynamic_cast<VendorQueue&>(*options_.queue).make_beside();
      return std::make_unique<nccl::Pipe>(api_, std::move(queue), id, rank);
    };
  }

  // On the meeting's thread.
  bool turn() {
    bool soon = false;
    for (const auto& link : links_) {
      if (link.use_count() == 1) link->end("it was given up");  // nobody waits for it, or posts
      soon |= link->turn();
    }
    for (const auto& guest : guests_) soon |= guest->turn();
    std::erase_if(links_, [](const auto& link) { return link->gone(); });
    std::erase_if(guests_, [](const auto& guest) { return guest->gone(); });
    return soon;
  }

  struct AtLast {
    ~AtLast() { await_aborted(kReclaimSeconds); }
  } at_last_;  // after everything below
  const TransportOptions options_;
  const NcclApi& api_;
  mutable WindowTable windows_;
  Calls<std::shared_ptr<Link>> calls_;
  std::unordered_map<PeerId, Peer> joining_;
  std::unordered_map<PeerId, Peer> peers_;
  std::unordered_map<TransferId, Transfer> transfers_;
  TransferId last_id_ = 0;
  TransportStats stats_;
  std::vector<std::shared_ptr<Link>> links_;    // the meeting's thread's
  std::vector<std::shared_ptr<Guest>> guests_;  // the meeting's thread's
  Meeting meeting_;
};

Status check_queue(const TransportOptions& options) {
  if (dynamic_cast<VendorQueue*>(options.queue)) return ok();
  return Error{ErrorCode::unavailable,
               "nccl: KV lies in memory of the host, and NCCL moves memory of CUDA cards; build "
               "with `make CUDA=1` and serve with --device cuda, or take --transport tcp"};
}

}  // namespace
}  // namespace xpyd::nccl

namespace xpyd {

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

}  // namespace xpyd
