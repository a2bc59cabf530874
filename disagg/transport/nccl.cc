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
// the channels' thread, and no call blocks (communicators are made with blocking = 0).
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
        channels_(
            nccl::kSideLimits, [this](const std::shared_ptr<SideChannel>& channel) { accepted(channel); },
            [this] { return turn(); }) {
    address_.host = options.host;
    address_.token = random_secret();
    for (const MemoryRange& region : options.regions)
      address_.regions.push_back({reinterpret_cast<uint64_t>(region.data()), region.size()});
  }
  ~NcclTransport() override {
    windows_.shut();
    channels_.stop();
  }

  Status start() {
    if (auto listening = channels_.listen(address_.host); !listening)
      return Error{listening.error().code, "nccl: " + listening.error().message};
    address_.host = channels_.host();
    address_.port = channels_.port();
    channels_.start();
    return ok();
  }

  std::string address() const override { return to_text(kKind, address_); }

  // Two answers are waited for: of the peer's process, and then of NCCL, in both processes.
  Result<bool> connect(PeerId peer, const std::string& text) override {
    if (auto known = peers_.find(peer); known != peers_.end() && !known->second.link->dead()) {
      if (known->second.text == text) return true;
      return invalid("nccl: instance " + std::to_string(peer) + " has another address already");
    }
    const auto wrong = [&](const std::string& why) {
      give_up_call(peer);
      return Error{ErrorCode::unavailable, "instance " + std::to_string(peer) + " over nccl: " + why};
    };
    auto at = calling_.find(peer);
    if (at == calling_.end() || at->second.text != text) {
      auto address = parse_side_address(kKind, text);
      if (!address) return address.error();
      nccl::Hello hello{.from = options_.self, .token = address.value().token};
      if (const int result = api_.get_unique_id(&hello.id); result != kNcclSuccess)
        return wrong(nccl_error(api_, result, nullptr));
      auto call = SideCall::begin(address.value().host, address.value().port, frame(hello), nccl::kSideLimits);
      if (!call) return wrong(call.error().message);
      give_up_call(peer);
      at = calling_
               .emplace(peer, Calling{text, address.value().regions, hello.id, std::move(call).value(),
                                      options_.clock->now() + options_.connect_s, nullptr})
               .first;
    }
    Calling& calling = at->second;
    if (!calling.link) {
      const bool said = calling.call.said();
      auto body = calling.call.answer();
      if (!body) return wrong(body.error().message);
      if (!body.value()) {
        // The last call may have been a long step of the engine ago.
        if (!said && calling.call.said()) calling.until_s = options_.clock->now() + options_.connect_s;
        if (options_.clock->now() < calling.until_s) return false;
        return wrong("it does not answer");
      }
      const auto answer = nccl::parse_hello(*body.value());
      if (!answer) return wrong("its answer is none");
      if (!answer->refusal.empty()) return wrong("it refuses: " + answer->refusal);
      calling.link = start_link(calling.call.channel(), calling.id);
    }
    if (!calling.link->settled()) return false;  // the link gives up after kJoinSeconds
    if (calling.link->dead()) return wrong(calling.link->why());
    peers_[peer] = {calling.link, text, std::move(calling.regions)};
    calling_.erase(at);
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
    later([this, peer, link] {
      if (link) link->end("it was disconnected");
      for (const auto& guest : guests_)
        if (guest->peer() == peer) guest->end();
    });
  }

  std::byte* remote(PeerId peer, int region) const override {
    auto found = peers_.find(peer);
    if (found == peers_.end() || size_t(region) >= found->second.regions.size()) return nullptr;
    return reinterpret_cast<std::byte*>(found->second.regions[size_t(region)].base);
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
        if (unwanted && transfer.post->wanted.exchange(false)) channels_.wake();
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
    stats.refused = windows_.refused();
    return stats;
  }

 private:
  static constexpr const char* kKind = "nccl1";
  static constexpr double kReclaimSeconds = 5;
  struct Peer {
    std::shared_ptr<Link> link;
    std::string text;
    std::vector<SideAddress::Region> regions;
  };
  struct Calling {
    std::string text;
    std::vector<SideAddress::Region> regions;
    NcclUniqueId id;
    SideCall call;
    double until_s;              // Clock: for the call's answer
    std::shared_ptr<Link> link;  // since it came
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
    later([link = transfer.link, post = transfer.post] { link->add(post); });
  }
  void give_up_call(PeerId peer) {
    auto at = calling_.find(peer);
    if (at == calling_.end()) return;
    if (at->second.link) later([link = at->second.link] { link->end("it was disconnected"); });
    calling_.erase(at);
  }
  std::shared_ptr<Link> start_link(const std::shared_ptr<SideChannel>& channel, const NcclUniqueId& id) {
    auto link = std::make_shared<Link>(api_, make_pipe(), channel);
    channel->trusted = true;
    channel->frame = [weak = std::weak_ptr(link)](std::string_view body) {
      auto held = weak.lock();
      return held && held->take(body);
    };
    channel->left = [weak = std::weak_ptr(link)] {
      if (auto held = weak.lock()) held->end("it has hung up");
    };
    later([this, link, id] {
      links_.push_back(link);
      link->start(id);
    });
    channels_.add(channel);
    return link;
  }
  Link::MakePipe make_pipe() {
    return [this](const NcclUniqueId& id, int rank) {
      auto queue = dynamic_cast<VendorQueue&>(*options_.queue).make_beside();
      return std::make_unique<nccl::Pipe>(api_, std::move(queue), id, rank);
    };
  }

  // Work for the channels' thread.
  void later(std::function<void()> what) {
    {
      std::lock_guard lock(mutex_);
      later_.push_back(std::move(what));
    }
    channels_.wake();
  }
  bool turn() {
    std::vector<std::function<void()>> now;
    {
      std::lock_guard lock(mutex_);
      now.swap(later_);
    }
    for (const auto& what : now) what();
    bool soon = false;
    for (const auto& link : links_) soon |= link->turn();
    for (const auto& guest : guests_) soon |= guest->turn();
    std::erase_if(links_, [](const auto& link) { return link->gone(); });
    std::erase_if(guests_, [](const auto& guest) { return guest->gone(); });
    return soon;
  }
  // Handlers of a stranger's channel, and of a guest's from its hello on.
  void accepted(const std::shared_ptr<SideChannel>& channel) {
    auto guest = std::make_shared<std::weak_ptr<Guest>>();
    channel->frame = [this, guest, weak = std::weak_ptr(channel)](std::string_view body) {
      auto caller = weak.lock();
      if (caller->trusted) {
        auto known = guest->lock();
        return known && known->take(body);
      }
      const auto hello = nccl::parse_hello(body);
      if (!hello || hello->token != address_.token || hello->from < 0) return false;
      caller->trusted = true;
      guests_.push_back(std::make_shared<Guest>(hello->from, make_pipe(), windows_, hello->id, caller));
      *guest = guests_.back();
      caller->send(frame(nccl::Hello{}));
      return true;
    };
    channel->left = [guest] {
      if (auto known = guest->lock()) known->end();
    };
  }

  struct AtLast {
    ~AtLast() { await_aborted(kReclaimSeconds); }
  } at_last_;  // after everything below
  const TransportOptions options_;
  const NcclApi& api_;
  SideAddress address_;
  mutable WindowTable windows_;
  std::unordered_map<PeerId, Calling> calling_;
  std::unordered_map<PeerId, Peer> peers_;
  std::unordered_map<TransferId, Transfer> transfers_;
  TransferId last_id_ = 0;
  TransportStats stats_;
  std::mutex mutex_;
  std::vector<std::function<void()>> later_;
  std::vector<std::shared_ptr<Link>> links_;    // the channels' thread's
  std::vector<std::shared_ptr<Guest>> guests_;  // the channels' thread's
  SideChannels channels_;
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
