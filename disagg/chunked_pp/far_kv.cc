#include "disagg/chunked_pp/far_kv.h"

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "disagg/transport/bootstrap.h"
#include "disagg/transport/posting_transport.h"

namespace xpyd::disagg::ranks {

void FarQueue::copy(std::span<const Copy> copies, bool) {
  std::vector<Copies> of_stages(size_t(pipeline_.stages()));
  for (const Copy& copy : copies) {
    const RemotePipeline::KvAddress from = pipeline_.find(copy.source), to = pipeline_.find(copy.destination);
    XPYD_CHECK(from.stage == to.stage && from.rank == to.rank);
    Copies& all = of_stages[size_t(from.stage)];
    all.pieces.push_back({uint32_t(from.rank), from.at, to.at, copy.bytes});
    if (all.pieces.size() < kMaxPieces) continue;
    pipeline_.tell(from.stage, all);
    all.pieces.clear();
  }
  for (int stage = 0; stage < pipeline_.stages(); ++stage)
    if (const Copies& all = of_stages[size_t(stage)]; !all.pieces.empty()) pipeline_.tell(stage, all);
}

namespace {

// A peer that all stages are connected to.
struct FarPeer {
  std::string address;
  std::vector<AddressRange> regions;
  bool dead() const { return false; }
};

struct FarTransfer {
  int stage;
  uint64_t id;
  TransferState state = TransferState::in_flight;
  bool cancelled = false;
};

struct NoRegistrations {
  Result<RemoteKey> open(PeerId, KvOp, std::span<const MemoryRange>) const {
    return Error{ErrorCode::unavailable,
                 "the KV of this instance is on the hosts of its stages, where no other instance can read or write it: "
                 "expected --kv-transfer push and role prefill or colocated"};
  }
  bool close(const RemoteKey&) const { return true; }
  int arrived(const RemoteKey&) const { return 0; }
};

class FarTransport final : public PostingTransport<FarPeer, FarTransfer, const NoRegistrations> {
 public:
  FarTransport(std::unique_ptr<KvTransport> inner, RemotePipeline& pipeline, const TransportOptions& options)
      : PostingTransport("far", options), inner_(std::move(inner)), pipeline_(pipeline) {}
  std::string address() const override { return inner_->address(); }

 private:
  struct Connection {
    std::set<int> stages;  // stages that are connected to the peer
    std::string error;
  };

  Result<std::shared_ptr<FarPeer>> connect_peer(PeerId peer, const std::string& address) override {
    const Result<bool> here = inner_->connect(peer, address);
    if (!here) return here.error();
    if (connections_.try_emplace(peer).second) tell_all(ConnectPeer{uint32_t(peer), address});
    hear();
    const Connection& connection = connections_[peer];
    const Error error{ErrorCode::unavailable, connection.error};
    const bool met = here.value() && int(connection.stages.size()) == pipeline_.stages();
    if (error.message.empty() && !met) return std::shared_ptr<FarPeer>();
    connections_.erase(peer);
    if (!error.message.empty()) return error;
    return std::make_shared<FarPeer>(FarPeer{address, need(parse_transport_address("tcp", address)).regions});
  }
  void leave(PeerId peer, const std::shared_ptr<FarPeer>&) override {
    inner_->disconnect(peer);
    connections_.erase(peer);
    tell_all(Leave{uint32_t(peer)});
  }
  std::shared_ptr<FarTransfer> begin(TransferId id, const std::shared_ptr<FarPeer>&, const KvTransfer& what,
                                     const TransferPlan& plan) override {
    if (what.op != KvOp::write || plan.copies.empty()) return nullptr;
    const int stage = pipeline_.find(plan.copies[0].source).stage;
    Transfer post{.id = uint64_t(id), .peer = uint32_t(what.peer), .registration = what.registration};
    for (size_t i = 0; i < plan.copies.size(); ++i) {
      const Copy& copy = plan.copies[i];
      const RemotePipeline::KvAddress from = pipeline_.find(copy.source);
      XPYD_CHECK(stage == from.stage);
      post.pieces.push_back({uint32_t(from.rank), from.at, reinterpret_cast<uint64_t>(copy.destination), copy.bytes});
      post.more = i + 1 < plan.copies.size();
      if (post.more && post.pieces.size() < kMaxPieces) continue;
      if (!pipeline_.tell(stage, post)) return nullptr;
      post.pieces.clear();
    }
    return std::make_shared<FarTransfer>(FarTransfer{stage, post.id});
  }
  TransferState progress(FarTransfer& post, bool unwanted) override {
    hear();
    if (unwanted && post.state == TransferState::in_flight && !std::exchange(post.cancelled, true))
      pipeline_.tell(post.stage, Cancel{post.id});
    return post.state;
  }
  const NoRegistrations& registrations() const override {
    static constexpr NoRegistrations kNone;
    return kNone;
  }

  template <class T>
  void tell_all(const T& message) {
    for (int stage = 0; stage < pipeline_.stages(); ++stage) pipeline_.tell(stage, message);
  }
  void hear() {
    std::vector<RemotePipeline::KvNews> news;
    pipeline_.kv_news().take(news);
    for (const auto& [stage, what] : news) {
      if (what.of_post) {
        const auto at = transfers_.find(TransferId(what.id));
        if (at != transfers_.end() && at->second.transfer && at->second.transfer->stage == stage)
          at->second.transfer->state = what.error.empty() ? TransferState::done : TransferState::failed;
      } else if (const auto at = connections_.find(PeerId(what.id)); at != connections_.end()) {
        if (what.error.empty())
          at->second.stages.insert(stage);
        else
          at->second.error = "rank " + std::to_string(stage) + ": " + what.error;
      }
    }
  }

  const std::unique_ptr<KvTransport> inner_;
  RemotePipeline& pipeline_;
  std::map<PeerId, Connection> connections_;
};

}  // namespace

std::unique_ptr<KvTransport> make_far_transport(std::unique_ptr<KvTransport> inner, RemotePipeline& pipeline,
                                                const TransportOptions& options) {
  return std::make_unique<FarTransport>(std::move(inner), pipeline, options);
}

// ---- The stage's half.

Status KvPoster::take(uint16_t type, std::string_view bytes) try {
  if (type == kType<ConnectPeer>) {
    const ConnectPeer connect = need(from_bytes<ConnectPeer>(bytes));
    connecting_[PeerId(connect.peer)] = connect.address;
  } else if (type == kType<Leave>) {
    const auto peer = PeerId(need(from_bytes<Leave>(bytes)).peer);
    connecting_.erase(peer);
    transport_->disconnect(peer);
  } else if (type == kType<Cancel>) {
    const auto at = posts_.find(need(from_bytes<Cancel>(bytes)).id);
    if (at != posts_.end()) transport_->cancel(at->second);
  } else {
    post(need(from_bytes<Transfer>(bytes)));
  }
  return ok();
} catch (const Error& error) {
  return error;
}

void KvPoster::post(const Transfer& post) {
  for (const KvBytes& piece : post.pieces) {
    plan_.copies.push_back(
        {kv_[piece.rank].data() + piece.at, reinterpret_cast<std::byte*>(uintptr_t(piece.to)), size_t(piece.bytes)});
    plan_.bytes += piece.bytes;
  }
  if (post.more) return;
  posts_[post.id] = transport_->post({.peer = PeerId(post.peer), .op = KvOp::write, .registration = post.registration},
                                     std::exchange(plan_, {}));
}

bool KvPoster::go_on() {
  std::erase_if(connecting_, [this](const auto& connection) {
    const auto& [peer, address] = connection;
    const Result<bool> connected = transport_->connect(peer, address);
    if (connected && !connected.value()) return false;
    return say_to(head_, Outcome{false, uint64_t(peer), connected ? "" : connected.error().message}), true;
  });
  std::erase_if(posts_, [this](const auto& post) {
    const TransferState state = transport_->poll(post.second);
    if (state == TransferState::in_flight) return false;
    return say_to(head_, Outcome{true, post.first, state == TransferState::done ? "" : "the transfer failed"}), true;
  });
  return !connecting_.empty() || !posts_.empty();
}

}  // namespace xpyd::disagg::ranks
